"""Tests of pipelines against real servers, with real kills. See ``docs/testing.md``.

    from oncely.testing import Broker, Postgres, inside_a_commit, kill_tree, running

Needs ``pip install 'oncely[local]'`` and Java. Four parts:

- servers: :class:`Broker` (Kafka, one KRaft node), :class:`Postgres`, :class:`SparkCluster`
  (standalone). Each is a context manager, listens on 127.0.0.1, keeps its files in one directory,
  and ends with the process that started it, even if that is killed.
- processes: :func:`running` (``oncely run`` as a child), :func:`tree`, :func:`jvm_of`,
  :func:`kill_tree`, :func:`await_that`.
- faults: :func:`inside_a_commit` stops a pipeline while its transaction on PostgreSQL is open,
  :func:`running_halting` one into Kafka or files; :class:`KillAt` kills a process before or after
  the n-th call to the database.
- readers: :func:`messages`, :func:`ends`, :func:`held_back` read topics with plain clients.

``oncely semantics`` and :mod:`oncely.testing.semantics` kill pipelines at each step of a commit and
count lost and duplicated records.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncely.testing.faults import KillAt, Moment, inside_a_commit
    from oncely.testing.halting import Point, ask_to_halt, halted, running_halting
    from oncely.testing.processes import await_that, child, jvm_of, kill_tree, running, tree
    from oncely.testing.readers import ends, held_back, messages
    from oncely.testing.servers.kafka import Broker, Scram
    from oncely.testing.servers.postgres import Postgres
    from oncely.testing.servers.spark_cluster import SparkCluster

__all__ = [
    "Broker",
    "KillAt",
    "Moment",
    "Point",
    "Postgres",
    "Scram",
    "SparkCluster",
    "ask_to_halt",
    "await_that",
    "child",
    "ends",
    "halted",
    "held_back",
    "inside_a_commit",
    "jvm_of",
    "kill_tree",
    "messages",
    "running",
    "running_halting",
    "tree",
]

_MODULES = {
    "faults": ("KillAt", "Moment", "inside_a_commit"),
    "halting": ("Point", "ask_to_halt", "halted", "running_halting"),
    "processes": ("await_that", "child", "jvm_of", "kill_tree", "running", "tree"),
    "readers": ("ends", "held_back", "messages"),
    "servers.kafka": ("Broker", "Scram"),
    "servers.postgres": ("Postgres",),
    "servers.spark_cluster": ("SparkCluster",),
}
_ELSEWHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name at its first use: the readers' clients need no PostgreSQL."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
