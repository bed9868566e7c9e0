"""Every model with its sizes and the mistakes that it must catch."""

from __future__ import annotations

from models.check import Mistake, Model, tla_sequence, tla_set

_TWO = tla_set("r1", "r2")
_ONE_PARTITION = tla_set("p1")
_TWO_PARTITIONS = tla_set("p1", "p2")

_SQL_SIZES = {
    "Processes": _TWO,
    "Partitions": _ONE_PARTITION,
    "Records": "2",
    "Bad": '{<<"p1", 1>>}',
    "Holes": "{}",
    "Late": "{}",
    "MaxEpoch": "3",
    "MaxResets": "1",
    "MaxFaults": "1",
    "MaxFailovers": "0",
    "Partial": "FALSE",
    "EndsSessions": "TRUE",
    "Fair": "{}",
}

SQL_LEDGER = Model(
    "SqlLedger",
    (
        "ExactlyOnce",
        "LettersBelowPositions",
        "NobodyCommitsOutsideTheFence",
        "OneHolder",
        "NobodyStops",
    ),
    ("FencedByAnOwner", "PositionsGoBackByResetsOnly", "OnlyLosersAreEnded"),
    _SQL_SIZES,
    (
        {"EndsSessions": "FALSE", "Holes": '{<<"p1", 0>>}'},
        {"MaxFailovers": "1", "MaxResets": "0"},
        {"Partitions": _TWO_PARTITIONS, "Records": "1", "Late": tla_set("p2")},
        {"Partitions": _TWO_PARTITIONS, "Records": "1", "Partial": "TRUE"},
        {"Partitions": _TWO_PARTITIONS, "Records": "3"},
    ),
    (
        {"Partitions": _TWO_PARTITIONS, "Records": "3", "Late": tla_set("p2"), "MaxFaults": "2"},
        {"Processes": tla_set("r1", "r2", "r3"), "MaxEpoch": "4"},
        {"MaxEpoch": "4", "MaxFaults": "2", "MaxFailovers": "1"},
    ),
    (
        Mistake("planned end is claimed"),
        Mistake("no compare-and-set"),
        Mistake("compare position only"),
        Mistake("run's name is not compared", {"MaxFailovers": "1", "MaxResets": "0"}),
        Mistake("history before compare-and-set"),
        Mistake("tidy judged by the row"),
        Mistake("reopen judged by the row"),
        Mistake(
            "new partition is added without looking",
            {"Partitions": _TWO_PARTITIONS, "Records": "1", "Late": tla_set("p2")},
        ),
        Mistake("replay does not look at resets"),
        Mistake(
            "partial takeover ends all sessions",
            {"Partitions": _TWO_PARTITIONS, "Records": "1", "Partial": "TRUE"},
        ),
    ),
    symmetric="Processes",
)

SQL_LEDGER_PROGRESS = Model(
    "SqlLedger",
    (),
    ("Progress",),
    {**_SQL_SIZES, "Fair": _TWO, "MaxResets": "0"},
    ({"MaxFailovers": "1"},),
    (),
    (
        Mistake("a ledger that went back is read again", {"MaxFailovers": "1"}),
        Mistake("sessions are not ended"),
    ),
)

_TOPIC_RESET = {"Twins": "FALSE", "Records": "1", "MaxEpoch": "3", "MaxResets": "1"}
_TOPIC_REPLAY = {
    **_TOPIC_RESET,
    "Bad": "{0}",
    "MaxReplays": "1",
    "MaxCrashes": "0",
}
_TOPIC_WORKERS = {
    **_TOPIC_RESET,
    "Partitions": _TWO_PARTITIONS,
    "Partial": "TRUE",
    "MaxEpoch": "2",
    "MaxResets": "0",
}
_TOPIC_RESET_BY_WORKERS = {**_TOPIC_WORKERS, "MaxEpoch": "3", "MaxResets": "1", "MaxCrashes": "0"}
_TOPIC_BATCH = {"Modes": '{"batch"}', "Holes": "{0}"}
_TOPIC_MODES = {**_TOPIC_BATCH, "Modes": '{"partition", "batch"}', "Twins": "FALSE"}
_TOPIC_NEW = {**_TOPIC_MODES, "New": "TRUE", "MaxCrashes": "0"}
_TOPIC_WHOLE_BATCHES = {
    **_TOPIC_BATCH,
    "Partitions": _TWO_PARTITIONS,
    "Holes": "{}",
    "Twins": "FALSE",
    "MaxCrashes": "0",
}
_TOPIC_TASKS = {**_TOPIC_WHOLE_BATCHES, "Modes": '{"partition"}', "Records": "1"}
_TOPIC_EXPIRY = {"Twins": "FALSE", "MaxExpiries": "1", "MaxCrashes": "0"}
_TOPIC_FOREIGN = {"Twins": "FALSE", "MaxForeign": "1", "MaxCrashes": "0"}
_TOPIC_LATE = {"Twins": "FALSE", "MaxLate": "1", "MaxEpoch": "1"}
_TOPIC_LIVE = {"Twins": "FALSE", "Records": "1", "MaxEpoch": "3"}

_TOPIC_DEEP = {
    "Partitions": _TWO_PARTITIONS,
    "Records": "3",
    "Holes": "{1}",
    "Modes": '{"partition", "batch"}',
    "MaxEpoch": "4",
    "MaxResets": "1",
    "MaxTimeouts": "1",
    "MaxExpiries": "1",
}

TOPIC_LEDGER = Model(
    "TopicLedger",
    ("ExactlyOnce", "FencedByAnOwner", "ResetsAreWhole", "NobodyStops"),
    ("PositionsGoBackByResetsOnly",),
    {
        "Processes": _TWO,
        "Partitions": _ONE_PARTITION,
        "New": "FALSE",
        "Records": "2",
        "Holes": "{}",
        "Bad": "{}",
        "Modes": '{"partition"}',
        "Partial": "FALSE",
        "Twins": "TRUE",
        "MaxEpoch": "2",
        "MaxResets": "0",
        "MaxReplays": "0",
        "MaxCrashes": "1",
        "MaxTimeouts": "0",
        "MaxExpiries": "0",
        "MaxForeign": "0",
        "MaxLate": "0",
        "BumpsOnEnd": "FALSE",
        "AtOnce": "FALSE",
    },
    (
        _TOPIC_BATCH,
        _TOPIC_MODES,
        _TOPIC_WHOLE_BATCHES,
        _TOPIC_TASKS,
        {"Records": "3", "Holes": "{1}"},
        _TOPIC_NEW,
        _TOPIC_EXPIRY,
        _TOPIC_FOREIGN,
        _TOPIC_LATE,
        _TOPIC_RESET,
        _TOPIC_REPLAY,
        _TOPIC_WORKERS,
    ),
    (
        _TOPIC_RESET_BY_WORKERS,
        _TOPIC_DEEP,
        {**_TOPIC_DEEP, "Modes": '{"partition"}', "Bad": "{0}", "MaxReplays": "1"},
    ),
    (
        Mistake("read before init"),
        Mistake("one mode for the pipeline", _TOPIC_BATCH),
        Mistake("first position by the run's mode", _TOPIC_NEW),
        Mistake("planned end is claimed"),
        Mistake("one producer instance for many transactions", _TOPIC_LATE),
        Mistake("group offset believed without owner", _TOPIC_FOREIGN),
        Mistake("reset without kept targets", _TOPIC_RESET),
        Mistake("reset in one epoch", _TOPIC_RESET),
        Mistake("replay does not look at resets", _TOPIC_REPLAY),
        Mistake("reset leaves replays alone", _TOPIC_REPLAY),
        Mistake("a partial takeover ends the whole reset", _TOPIC_RESET_BY_WORKERS),
        Mistake("the opener's number fences"),
    ),
    symmetric="Processes",
)

# Symmetry can't be used with a temporal property.
TOPIC_LEDGER_PROGRESS = Model(
    "TopicLedger",
    (),
    ("Progress",),
    {**TOPIC_LEDGER.constants, **_TOPIC_LIVE},
    (),
    (),
    (Mistake("mover is guessed once", {"Modes": '{"partition", "batch"}'}),),
)

_LOWERED = "{<<0, 0>>, <<1, 0>>}"
"""max_staging_age is 1 when a run starts and 0 later, or the other way round."""

_COMPACTION = {"Compactors": tla_set("c1"), "Settings": "{<<1, 1>>}", "MaxCrashes": "0"}
_READERS = {**_COMPACTION, "Settings": "{<<0, 1>>}", "MaxTime": "2", "MaxReads": "1"}
_BESIDE_A_RUN = {
    **_COMPACTION,
    "Files": tla_sequence("f1", "f2", "f3"),
    "Records": "2",
    "MaxTime": "0",
}
_TWO_COMPACTIONS = {
    **_COMPACTION,
    "Compactors": tla_set("c1", "c2"),
    "Files": tla_sequence("f1", "f2", "f3"),
    "MaxTime": "0",
    "MaxReads": "1",
}
_REPLAY = {
    "Publishers": tla_set("run", "replay"),
    "Replays": tla_set("replay"),
    "Settings": "{<<1, 1>>}",
    "MaxTime": "0",
    "MaxReads": "1",
}

FILES_TABLE = Model(
    "FilesTable",
    (
        "ExactlyOnce",
        "LetterAtMostOnce",
        "NamedFilesExist",
        "SchemasCoverFiles",
        "EachPrefixIsATable",
        "ReadersResolveFiles",
        "ReadersFindTheirFiles",
    ),
    (),
    {
        "Publishers": tla_set("run"),
        "Replays": "{}",
        "Compactors": "{}",
        "Files": tla_sequence("f1", "f2"),
        "Records": "1",
        "Least": "1",
        "Settings": _LOWERED,
        "Drift": "0",
        "Slack": "0",
        "MaxTime": "3",
        "MaxCrashes": "0",
        "MaxReads": "0",
    },
    (
        {"Drift": "1", "Slack": "2", "MaxTime": "4"},
        {"Settings": "{<<0, 1>>, <<1, 1>>}", "MaxTime": "2", "MaxCrashes": "1"},
        {"Publishers": tla_set("run", "next run"), "MaxTime": "1"},
        _READERS,
        _BESIDE_A_RUN,
        _TWO_COMPACTIONS,
        _REPLAY,
    ),
    (),
    (
        Mistake("age looked at before the transaction"),
        Mistake("named without a transaction"),
        Mistake("vacuum reads no leases"),
        Mistake("lease written after the first file"),
        Mistake("lease counts for one batch"),
        Mistake("lease written once"),
        Mistake("manifest read before the listing"),
        Mistake("clock read last"),
        Mistake("schema read before init", _REPLAY),
        Mistake("a replay has its own id", _REPLAY),
        Mistake("schema read before the manifest", _REPLAY),
        Mistake("an unknown schema is not waited for", _REPLAY),
        Mistake("compaction does not read after init", _TWO_COMPACTIONS),
        Mistake("an output that was named is deleted", _TWO_COMPACTIONS),
        Mistake("an output does not name what it replaces", _BESIDE_A_RUN),
        Mistake("readers' time counts from the message", _READERS),
    ),
)

_NO_SPARK = {"Records": "1", "MaxRebalances": "1", "MaxSpark": "0", "MaxCrashes": "0"}

WORKER_GROUP = Model(
    "WorkerGroup",
    ("ExactlyOnce", "Bound"),
    (
        "PositionsNeverGoBack",
        "WorkersTakeWhatWasAssigned",
        "OnlyTheOwnerCommits",
        "SparkLosesToLaterWorkers",
        "Progress",
    ),
    {
        "Workers": tla_set("w1", "w2"),
        "Partitions": _ONE_PARTITION,
        "Records": "1",
        "MaxRebalances": "1",
        "MaxSpark": "1",
        "MaxCrashes": "0",
        "MaxDeletions": "0",
    },
    (
        {**_NO_SPARK, "Records": "2", "MaxRebalances": "2"},
        {**_NO_SPARK, "MaxDeletions": "1"},
        {**_NO_SPARK, "Partitions": _TWO_PARTITIONS},
    ),
    (
        {"Records": "2", "MaxRebalances": "2", "MaxDeletions": "1"},
        {"Partitions": _TWO_PARTITIONS},
    ),
    (
        Mistake("epoch is not compared", _NO_SPARK),
        Mistake(
            "memory kept over a revocation",
            {**_NO_SPARK, "Records": "2", "MaxRebalances": "2"},
        ),
        Mistake("a fenced worker lets go", _NO_SPARK),
        Mistake("a fenced worker takes over again", _NO_SPARK),
        Mistake("a worker does not look for a run on Spark"),
        Mistake("generations are compared, and nobody asks", {**_NO_SPARK, "MaxDeletions": "1"}),
        Mistake("a worker takes all partitions", {**_NO_SPARK, "Partitions": _TWO_PARTITIONS}),
    ),
)

MODELS = (
    SQL_LEDGER,
    SQL_LEDGER_PROGRESS,
    TOPIC_LEDGER,
    TOPIC_LEDGER_PROGRESS,
    FILES_TABLE,
    WORKER_GROUP,
)
