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
    "MaxDamage": "0",
    "MaxRepairs": "0",
    "Partial": "FALSE",
    "Ahead": "FALSE",
    "EndsSessions": "TRUE",
    "Fair": "{}",
}

_SQL_REPAIR = {"MaxDamage": "1", "MaxRepairs": "1"}
_SQL_REPAIR_GOES_ON = {**_SQL_REPAIR, "Records": "1", "Bad": "{}", "EndsSessions": "FALSE"}
_SQL_TWO_REPAIRS = {
    "Records": "1",
    "Bad": "{}",
    "MaxDamage": "1",
    "MaxRepairs": "2",
    "MaxResets": "0",
}
_SQL_THREADS = {"Records": "3", "Ahead": "TRUE"}
_SQL_TWO_THREADS_AND_A_TAKEOVER = {
    "Processes": tla_set("r1", "r2", "r3"),
    "Ahead": "TRUE",
    "MaxEpoch": "2",
    "MaxResets": "0",
}
_SQL_WORKERS = {"Partitions": _TWO_PARTITIONS, "Records": "1", "Partial": "TRUE"}

SQL_LEDGER = Model(
    "SqlLedger",
    (
        "ExactlyOnce",
        "FinishedRangesAreBeyond",
        "LettersBelowPositions",
        "HistoryTellsRows",
        "NobodyCommitsOutsideTheFence",
        "OneHolder",
        "NobodyStops",
    ),
    (
        "FencedByAnOwner",
        "PositionsGoBackByResetsOnly",
        "OnlyLosersAreEnded",
        "AllComeBeforeSome",
    ),
    _SQL_SIZES,
    (
        {"EndsSessions": "FALSE", "Holes": '{<<"p1", 0>>}'},
        {"MaxFailovers": "1", "MaxResets": "0"},
        {"Partitions": _TWO_PARTITIONS, "Records": "1", "Late": tla_set("p2")},
        _SQL_WORKERS,
        {"Partitions": _TWO_PARTITIONS, "Records": "3"},
        _SQL_REPAIR,
        _SQL_REPAIR_GOES_ON,
        _SQL_TWO_REPAIRS,
        _SQL_THREADS,
    ),
    (
        _SQL_TWO_THREADS_AND_A_TAKEOVER,
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
        Mistake("repair does not look at resets", _SQL_REPAIR_GOES_ON),
        Mistake("repair without the range lock", _SQL_TWO_REPAIRS),
        Mistake("repair of a range beyond the position", _SQL_REPAIR),
        Mistake("delete and insert in two transactions", _SQL_REPAIR),
        Mistake("amendment apart from the rows", _SQL_REPAIR),
        Mistake("rows are deleted before dead letters", _SQL_REPAIR),
        Mistake("rows beyond the position are removed without its lock", _SQL_REPAIR),
        Mistake("partial takeover ends all sessions", _SQL_WORKERS),
        Mistake("the last takeover of all is not compared", _SQL_WORKERS),
        Mistake("a takeover of some fences one of all", _SQL_WORKERS),
        Mistake("position moves over an unfinished offset", _SQL_THREADS),
        Mistake("position is computed without the lock", _SQL_THREADS),
        Mistake("finished ranges are not compared", _SQL_THREADS),
        Mistake("finished ranges are forgotten at a takeover", _SQL_THREADS),
        Mistake("a reset keeps ranges beyond the position", _SQL_THREADS),
    ),
    symmetric=("Processes",),
)

SQL_LEDGER_PROGRESS = Model(
    "SqlLedger",
    (),
    ("Progress",),
    {**_SQL_SIZES, "Fair": _TWO, "MaxResets": "0"},
    ({"MaxFailovers": "1", "Records": "1", "Bad": "{}"},),
    ({"MaxFailovers": "1"}, {"Ahead": "TRUE"}),
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
_TOPIC_REPAIR = {
    **_TOPIC_RESET,
    "Bad": "{0}",
    "MaxDamage": "1",
    "MaxRepairs": "1",
    "MaxCrashes": "0",
}
_TOPIC_REPAIRS = {
    **_TOPIC_REPAIR,
    "Bad": "{}",
    "MaxEpoch": "2",
    "MaxResets": "0",
    "MaxRepairs": "2",
    "MaxCrashes": "1",
}
_TOPIC_RESET_IN_FULL = {
    **_TOPIC_RESET,
    "Partitions": _TWO_PARTITIONS,
    "Records": "3",
    "MaxCrashes": "0",
}
_TOPIC_RESET_OF_BATCHES = {**_TOPIC_RESET_IN_FULL, "Modes": '{"batch"}', "MaxCrashes": "1"}
_ONE_RECORD = {"Records": "1"}
_TOPIC_WORKERS = {
    **_TOPIC_RESET,
    "Partitions": _TWO_PARTITIONS,
    "Partial": "TRUE",
    "MaxEpoch": "2",
    "MaxResets": "0",
}
_TOPIC_RESET_BY_WORKERS = {**_TOPIC_WORKERS, "MaxEpoch": "3", "MaxResets": "1", "MaxCrashes": "0"}
_TOPIC_REPLAY_BY_WORKERS = {
    **_TOPIC_RESET_BY_WORKERS,
    "Bad": "{0}",
    "MaxReplays": "1",
    "MaxCrashes": "1",
    "AtOnce": "TRUE",
}
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
_TOPIC_LOSSES = {**_TOPIC_RESET, "MaxLosses": "1"}
_TOPIC_LOSES_ONE = {**_TOPIC_LOSSES, "Partitions": _TWO_PARTITIONS, "MaxCrashes": "0"}
_TOPIC_TIMEOUT = {"Twins": "FALSE", "MaxTimeouts": "1", "MaxCrashes": "0"}
_TOPIC_LATE = {"Twins": "FALSE", "MaxLate": "1", "MaxEpoch": "1"}
_TOPIC_TURNS = {"Modes": '{"turns"}', "Records": "3"}
_TOPIC_TURNS_AND_TASKS = {"Modes": '{"partition", "turns"}', "Twins": "FALSE"}
_TOPIC_TURNS_LATE = {**_TOPIC_LATE, **_TOPIC_TURNS}
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
    ("PositionsGoBackByResetsOnly", "AllComeBeforeSome"),
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
        "MaxDamage": "0",
        "MaxRepairs": "0",
        "MaxCrashes": "1",
        "MaxTimeouts": "0",
        "MaxExpiries": "0",
        "MaxForeign": "0",
        "MaxLosses": "0",
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
        _TOPIC_TIMEOUT,
        _TOPIC_LATE,
        {**_TOPIC_LATE, "BumpsOnEnd": "TRUE"},
        _TOPIC_RESET,
        {**_TOPIC_RESET_IN_FULL, **_ONE_RECORD},
        {**_TOPIC_RESET_OF_BATCHES, **_ONE_RECORD},
        _TOPIC_LOSSES,
        _TOPIC_REPLAY,
        _TOPIC_REPAIR,
        _TOPIC_REPAIRS,
        _TOPIC_WORKERS,
        _TOPIC_TURNS,
        _TOPIC_TURNS_AND_TASKS,
        _TOPIC_TURNS_LATE,
        {**_TOPIC_TURNS, **_TOPIC_EXPIRY, "Records": "2"},
        {**_TOPIC_TURNS, **_TOPIC_TIMEOUT, "Records": "2"},
        {**_TOPIC_TURNS, **_TOPIC_RESET, "MaxCrashes": "0"},
        {**_TOPIC_WORKERS, "Modes": _TOPIC_TURNS["Modes"], "MaxCrashes": "0"},
    ),
    (
        _TOPIC_LOSES_ONE,
        _TOPIC_RESET_BY_WORKERS,
        _TOPIC_RESET_IN_FULL,
        _TOPIC_RESET_OF_BATCHES,
        {**_TOPIC_RESET_IN_FULL, "MaxCrashes": "1"},
        _TOPIC_REPLAY_BY_WORKERS,
        _TOPIC_DEEP,
        {**_TOPIC_DEEP, "Modes": '{"partition"}', "Bad": "{0}", "MaxReplays": "1"},
    ),
    (
        Mistake("read before init"),
        Mistake("one mode for the pipeline", _TOPIC_BATCH),
        Mistake("first position by the run's mode", _TOPIC_NEW),
        Mistake("planned end is claimed"),
        Mistake("one producer instance for many transactions", _TOPIC_LATE),
        Mistake("one producer instance for many transactions", _TOPIC_TURNS_LATE),
        Mistake("a takeover knows the first id only", _TOPIC_TURNS),
        Mistake("the other id is initialised late and nothing is read", _TOPIC_TURNS),
        Mistake("a lost answer counts as a commit", _TOPIC_TURNS),
        Mistake("group offset believed without owner", _TOPIC_FOREIGN),
        Mistake("reset without kept targets", _TOPIC_RESET),
        Mistake("reset in one epoch", _TOPIC_RESET),
        Mistake("a lost position begins anew", _TOPIC_LOSSES),
        Mistake("a lost position is put before the decision", _TOPIC_LOSSES),
        Mistake("replay does not look at resets", _TOPIC_REPLAY),
        Mistake("reset leaves replays alone", _TOPIC_REPLAY),
        Mistake("repair of a record beyond the position", _TOPIC_REPAIR),
        Mistake("repair does not look at a reset under way", _TOPIC_REPAIR),
        Mistake("repair has no transactional id of replays", _TOPIC_REPAIR),
        Mistake("repair reads the output before init", _TOPIC_REPAIRS),
        Mistake("repair does not look at dead letters", _TOPIC_REPAIR),
        Mistake("a partial takeover ends the whole reset", _TOPIC_RESET_BY_WORKERS),
        Mistake("the last takeover of all is not compared", _TOPIC_WORKERS),
        Mistake("a takeover of some fences one of all", _TOPIC_WORKERS),
        Mistake("the opener's number fences"),
        Mistake("the opener's number fences a reset", _TOPIC_RESET),
    ),
    symmetric=("Processes", "Partitions"),
    view="View",
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
_REWRITES = {
    **_COMPACTION,
    "Compactors": "{}",
    "Rewriters": tla_set("w1", "w2"),
    "Files": tla_sequence("f1", "f2", "f3"),
    "MaxTime": "0",
    "MaxDrops": "1",
}
_REWRITE_BESIDE_A_RUN = {**_BESIDE_A_RUN, "Compactors": "{}", "Rewriters": tla_set("w1")}
_REWRITE_BESIDE_A_COMPACTION = {
    **_REWRITES,
    "Compactors": tla_set("c1"),
    "Rewriters": tla_set("w1"),
    "MaxDrops": "0",
}
_REWRITE_BESIDE_A_REPLAY = {
    **_REWRITES,
    "Publishers": tla_set("run", "replay"),
    "Replays": tla_set("replay"),
    "Rewriters": tla_set("w1"),
    "MaxDrops": "0",
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
        "Rewriters": "{}",
        "Files": tla_sequence("f1", "f2"),
        "Records": "1",
        "Least": "1",
        "Settings": _LOWERED,
        "Drift": "0",
        "Slack": "0",
        "MaxTime": "3",
        "MaxCrashes": "0",
        "MaxReads": "0",
        "MaxDrops": "0",
    },
    (
        {"Drift": "1", "Slack": "2", "MaxTime": "4"},
        {"Settings": "{<<0, 1>>, <<1, 1>>}", "MaxTime": "2", "MaxCrashes": "1"},
        {"Publishers": tla_set("run", "next run"), "MaxTime": "1"},
        _READERS,
        _BESIDE_A_RUN,
        _TWO_COMPACTIONS,
        _REPLAY,
        _REWRITES,
        _REWRITE_BESIDE_A_RUN,
        _REWRITE_BESIDE_A_COMPACTION,
        _REWRITE_BESIDE_A_REPLAY,
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
        Mistake("a rewrite reaches beyond the position", _REWRITE_BESIDE_A_RUN),
        Mistake("a rewrite does not compare the files", _REWRITES),
        Mistake("files of a rewrite are named one after the other", _REWRITE_BESIDE_A_RUN),
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
        {**_NO_SPARK, "Records": "2", "MaxCrashes": "1"},
        {"MaxCrashes": "1"},
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
