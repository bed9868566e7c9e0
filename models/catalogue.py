"""Every model with its sizes and the mistakes that it must catch."""

from __future__ import annotations

from models.check import Mistake, Model, tla_set

_TWO = tla_set("r1", "r2")
_ONE_PARTITION = tla_set("p1")
_TWO_PARTITIONS = tla_set("p1", "p2")

SQL_LEDGER = Model(
    "SqlLedger",
    (
        "ExactlyOnce",
        "NobodyCommitsOutsideTheFence",
        "FencedByAnOwner",
        "NobodyStops",
    ),
    ("PositionsGoBackByResetsOnly", "OnlyLosersAreEnded"),
    {
        "Processes": _TWO,
        "Partitions": _ONE_PARTITION,
        "Records": "2",
        "Bad": '{<<"p1", 1>>}',
        "MaxEpoch": "3",
        "MaxResets": "1",
        "MaxCrashes": "1",
        "MaxFailovers": "0",
        "Partial": "FALSE",
        "EndsSessions": "TRUE",
    },
    (
        {"EndsSessions": "FALSE"},
        {"Partitions": _TWO_PARTITIONS, "Records": "1", "Partial": "TRUE"},
    ),
    ({"Partitions": _TWO_PARTITIONS, "Records": "3"},),
    (
        Mistake("planned end is claimed"),
        Mistake("no compare-and-set"),
        Mistake("compare position only"),
        Mistake("history before compare-and-set"),
        Mistake("tidy judged by the row"),
        Mistake("reopen judged by the row"),
        Mistake("replay does not look at resets"),
        Mistake(
            "partial takeover ends all sessions",
            {"Partitions": _TWO_PARTITIONS, "Records": "1", "Partial": "TRUE"},
        ),
    ),
)

TOPIC_LEDGER = Model(
    "TopicLedger",
    ("ExactlyOnce", "FencedByAnOwner", "ResetsAreWhole", "NobodyStops"),
    ("PositionsGoBackByResetsOnly",),
    {
        "Processes": _TWO,
        "Partitions": _ONE_PARTITION,
        "Records": "2",
        "Holes": '{<<"p1", 1>>}',
        "Modes": '{"partition", "batch"}',
        "Partial": "FALSE",
        "MaxEpoch": "2",
        "MaxResets": "0",
        "MaxCrashes": "1",
        "MaxExpiries": "1",
        "MaxForeign": "0",
        "MaxLate": "0",
        "BumpsOnEnd": "FALSE",
    },
    (
        {"MaxForeign": "1", "MaxExpiries": "0"},
        {"MaxLate": "1", "MaxExpiries": "0"},
        {
            "Partitions": _TWO_PARTITIONS,
            "Records": "1",
            "Modes": '{"partition"}',
            "MaxResets": "1",
            "MaxExpiries": "0",
        },
    ),
    (),
    (
        Mistake("read before init"),
        Mistake("holes by the partition's own id", {"Modes": '{"batch"}'}),
        Mistake(
            "one producer instance for many transactions",
            {"MaxLate": "1", "Holes": "{}", "MaxExpiries": "0"},
        ),
        Mistake("group offset believed without owner", {"MaxForeign": "1"}),
        Mistake(
            "reset without kept targets",
            {
                "Partitions": _TWO_PARTITIONS,
                "Records": "1",
                "Modes": '{"partition"}',
                "MaxResets": "1",
                "MaxExpiries": "0",
            },
        ),
    ),
)

FILES_TABLE = Model(
    "FilesTable",
    (
        "ExactlyOnce",
        "LetterAtMostOnce",
        "NamedFilesExist",
        "SchemasCoverFiles",
        "ReadersFindTheirFiles",
    ),
    (),
    {
        "Publishers": tla_set("run"),
        "Replays": "{}",
        "Compactors": "{}",
        "Files": tla_set("f1", "f2"),
        "Records": "1",
        "Ages": "{1}",
        "Timeout": "1",
        "Drift": "0",
        "Slack": "0",
        "MaxTime": "4",
        "MaxCrashes": "1",
    },
    (
        {"Drift": "1", "Slack": "1", "MaxTime": "5"},
        {"Ages": "{1, 2}", "MaxCrashes": "0"},
        {
            "Compactors": tla_set("compactor"),
            "Files": tla_set("f1", "f2", "f3"),
            "Records": "2",
            "MaxCrashes": "0",
            "MaxTime": "1",
        },
        {"Publishers": tla_set("run", "replay"), "Replays": tla_set("replay"), "MaxTime": "1"},
    ),
    (),
    (
        Mistake("age looked at before the transaction"),
        Mistake("age judged by the vacuum's own settings", {"Ages": "{1, 3}", "MaxTime": "6"}),
        Mistake("manifest read before the listing"),
        Mistake(
            "schema read before init",
            {
                "Publishers": tla_set("run", "replay"),
                "Replays": tla_set("replay"),
                "MaxTime": "1",
            },
        ),
        Mistake(
            "compaction does not read after init",
            {
                "Compactors": tla_set("c1", "c2"),
                "Files": tla_set("f1", "f2", "f3", "f4"),
                "Records": "2",
                "MaxCrashes": "0",
                "MaxTime": "0",
            },
        ),
    ),
)

WORKER_GROUP = Model(
    "WorkerGroup",
    ("ExactlyOnce", "NobodyLosesByMistake", "Bound"),
    ("PositionsNeverGoBack", "Progress"),
    {
        "Workers": tla_set("w1", "w2"),
        "Partitions": _ONE_PARTITION,
        "Records": "2",
        "MaxRebalances": "2",
        "MaxSpark": "1",
        "MaxCrashes": "1",
    },
    (),
    ({"Partitions": _TWO_PARTITIONS},),
    (
        Mistake("epoch is not compared"),
        Mistake("memory kept over a revocation"),
        Mistake("generations are not compared"),
        Mistake("a fenced worker takes over again"),
        Mistake("a worker takes all partitions", {"Partitions": _TWO_PARTITIONS, "Records": "1"}),
    ),
)

MODELS = (SQL_LEDGER, TOPIC_LEDGER, FILES_TABLE, WORKER_GROUP)
