"""The traces that tests walk: of which sizes, how many, and to which steps."""

from __future__ import annotations

from dataclasses import replace

from models.catalogue import SQL_LEDGER, TOPIC_LEDGER
from models.check import tla_set
from models.traces import Recipe

_SQL = {
    "Processes": tla_set("r1", "r2", "r3"),
    "Partitions": tla_set("p1", "p2"),
    "Records": "3",
    "Bad": '{<<"p1", 1>>, <<"p2", 0>>}',
    "Holes": '{<<"p1", 2>>, <<"p2", 1>>}',
    "Late": tla_set("p2"),
    "MaxEpoch": "8",
    "MaxResets": "1",
    "MaxFaults": "4",
    "MaxFailovers": "1",
}
_SQL_WORKERS = {**_SQL, "Late": "{}", "Partial": "TRUE", "MaxFailovers": "0"}
_SQL_THREADS = {**_SQL, "Late": "{}", "Ahead": "TRUE"}
_SEED = 20261122

SQL_OF_ALL = Recipe("sql-of-all", SQL_LEDGER, _SQL, number=40, depth=45, seed=_SEED)
SQL_OF_SOME = Recipe("sql-of-some", SQL_LEDGER, _SQL_WORKERS, number=20, depth=45, seed=_SEED)
"""Takeovers take some of the partitions, too."""
SQL_THREADS = Recipe("sql-threads", SQL_LEDGER, _SQL_THREADS, number=20, depth=45, seed=_SEED)
"""Processes of a run finish ranges beyond the position."""

_TOPIC = {
    "Holes": "{1}",
    "Bad": "{0}",
    "Modes": '{"partition", "batch"}',
    "MaxEpoch": "3",
    "MaxCrashes": "0",
    "AtOnce": "TRUE",
}
_TOPIC_FAULTS = {**_TOPIC, "MaxExpiries": "1", "MaxForeign": "1"}
_TOPIC_RESET = {
    **_TOPIC,
    "Modes": '{"partition"}',
    "Bad": "{}",
    "Twins": "FALSE",
    "MaxResets": "1",
}
_TOPIC_REPLAY = {**_TOPIC_RESET, "Records": "1", "Bad": "{0}", "MaxReplays": "1"}
_TOPIC_MODEL = replace(TOPIC_LEDGER, symmetric=(), view=None)


def _goes(was: str, now: str, which: str = "TRUE") -> str:
    """A step of one process."""
    return (
        f'\\E r \\in Processes : proc[r].pc = "{was}" /\\ proc\'[r].pc = "{now}" /\\ left\' = left'
        f" /\\ {which}"
    )


def _moves(which: str) -> str:
    """A step that changes a position."""
    return f"\\E p \\in Partitions : ledger'[p] # ledger[p] /\\ {which}"


_TOPIC_RACES = {
    "faults": (
        _TOPIC_FAULTS,
        {
            "a run reads behind init that it is fenced": _goes("initialised", "fenced"),
            "a transaction is fenced before its commit": _goes(
                "ready", "idle", "\\A i \\in proc[r].ids : holder[i] # r"
            ),
            "an opener reads that it is fenced": _goes("settle read", "fenced"),
            "an opener is overtaken by one that has taken nothing": _goes("settling", "again"),
            "a batch's positions are taken over by a run of tasks": _moves(
                'ledger[p].mode = "batch" /\\ ledger[p].at > 0 /\\ ledger\'[p].mode = "partition"'
            ),
            "a group offset is not believed, and the ledger topic tells": _goes(
                "initialised",
                "read",
                "\\E p \\in proc[r].done : ~Believed(p) /\\ ledger[p].at > 0",
            ),
            "the group holds another pipeline's positions": _goes("fencing", "down"),
        },
    ),
    "reset": (
        _TOPIC_RESET,
        {"a reset puts a position back": _moves("ledger'[p].at < ledger[p].at")},
    ),
    "replay": (
        _TOPIC_REPLAY,
        {
            "a dead letter is replayed": "replayed' > replayed",
            "a replay compares behind a reset": _goes(
                "replay initialised", "down", "resets # proc[r].letter.resets"
            ),
        },
    ),
}
TOPIC = [
    Recipe(f"topic-{name}", _TOPIC_MODEL, sizes, number=2, depth=50, seed=1, goals=races)
    for name, (sizes, races) in _TOPIC_RACES.items()
]
"""To races of docs/decisions 0010, 0012, 0013 and 0021."""

RECIPES = [SQL_OF_ALL, SQL_OF_SOME, SQL_THREADS, *TOPIC]
