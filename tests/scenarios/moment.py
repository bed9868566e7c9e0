"""The moment inside a commit: everything stands still while a transaction is open, for certain.

A commit lasts a tenth of a second, so a fault fired by the clock mostly hits nothing. Here the
pipeline's processes are stopped (SIGSTOP) as soon as the database shows a transaction that has
begun to copy, and then the database is asked again: its client stands still, so what is open now
stays open until the block ends.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import psycopg

from tests.scenarios.world import World, tree

_OPEN = """
SELECT pid, client_port, xact_start::text FROM pg_stat_activity
WHERE application_name LIKE 'oncely/%' AND xact_start IS NOT NULL AND ltrim(query) LIKE 'COPY%'
"""


@dataclass(frozen=True)
class Moment:
    """What is open.

    Attributes:
        session: the server process's pid.
        owner: the process at the other end of the connection, stopped.
    """

    session: int
    owner: psutil.Process


@contextlib.contextmanager
def inside_a_commit(world: World, pid: int, timeout: float = 90) -> Iterator[Moment]:
    """Stop the pipeline below ``pid`` inside a COPY; what the block leaves of it goes on."""
    with psycopg.connect(world.url, autocommit=True) as database:
        moment, stopped = _catch(database, pid, time.monotonic() + timeout)
    try:
        yield moment
    finally:
        _send(stopped, signal.SIGCONT)


def _catch(
    database: psycopg.Connection[Any], pid: int, deadline: float
) -> tuple[Moment, list[psutil.Process]]:
    while time.monotonic() < deadline:
        seen = database.execute(_OPEN).fetchall()
        if not seen:
            time.sleep(0.002)
            continue
        stopped = tree(pid)
        _send(stopped, signal.SIGSTOP)
        time.sleep(0.005)  # a stopped thread may still be on its way out of the kernel
        for session, port, began in database.execute(_OPEN).fetchall():
            owner = _owner(port, stopped)
            if owner is not None and (session, port, began) in seen:
                return Moment(session, owner), stopped
        _send(stopped, signal.SIGCONT)
    raise AssertionError("no commit was caught")


def _owner(port: int, processes: list[psutil.Process]) -> psutil.Process | None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if any(one.laddr.port == port for one in process.net_connections("tcp")):
                return process
    return None


def _send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
