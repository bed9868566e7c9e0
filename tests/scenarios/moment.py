"""The moment inside a commit: everything stands still while a transaction is open, for certain.

A commit lasts a tenth of a second, so a fault fired by the clock mostly hits nothing. Here a
trigger holds the first COPY into the table until the pipeline's processes are stopped (SIGSTOP).
Then COPY goes on, but its client stands still, so the transaction is open until the block ends.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import psycopg

from tests.scenarios.world import World, await_that, tree

_GATE = 4711
_INSTALL = f"""
CREATE OR REPLACE FUNCTION wait_at_the_gate() RETURNS trigger LANGUAGE plpgsql AS
'BEGIN PERFORM pg_advisory_xact_lock_shared({_GATE}); RETURN NULL; END';
CREATE OR REPLACE TRIGGER gate BEFORE INSERT ON rows EXECUTE FUNCTION wait_at_the_gate();
"""
_WAITING = """
SELECT pid, client_port FROM pg_stat_activity
WHERE application_name LIKE 'oncely/%' AND wait_event = 'advisory'
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
def inside_a_commit(
    world: World, pid: int, publish: Callable[[], object], timeout: float = 300
) -> Iterator[Moment]:
    """Stop the pipeline below ``pid`` inside a COPY; what the block leaves of it goes on.

    Args:
        world: its table is waited for.
        pid: the driver.
        publish: writes the records whose commit is stopped.
        timeout: seconds for the table, and again for the commit.
    """
    stopped: list[psutil.Process] = []
    await_that(lambda: world.sql("SELECT to_regclass('rows')")[0][0], "the table", timeout)
    with closed_gate(world) as database:
        publish()
        moment = await_that(lambda: _caught(database, pid, stopped), "a commit", timeout)
    try:
        yield moment
    finally:
        _send(stopped, signal.SIGCONT)


@contextlib.contextmanager
def closed_gate(world: World) -> Iterator[psycopg.Connection[Any]]:
    """Every COPY into the table that begins within the block waits for its end."""
    with psycopg.connect(world.url, autocommit=True) as database:
        database.execute(_INSTALL.encode())
        database.execute(b"SELECT pg_advisory_lock(%s)", (_GATE,))
        try:
            yield database
        finally:
            database.execute(b"SELECT pg_advisory_unlock(%s)", (_GATE,))


def waiting(database: psycopg.Connection[Any]) -> list[tuple[int, int]]:
    """The sessions that wait at the gate: pid and the client's port."""
    return database.execute(_WAITING.encode()).fetchall()


def _caught(
    database: psycopg.Connection[Any], pid: int, stopped: list[psutil.Process]
) -> Moment | None:
    """Stop everything if a COPY waits at the gate, and make sure that it still does then."""
    seen = waiting(database)
    if not seen:
        return None
    stopped[:] = tree(pid)
    _send(stopped, signal.SIGSTOP)
    time.sleep(0.005)  # a stopped thread may still be on its way out of the kernel
    for session, port in waiting(database):
        owner = owner_of(port, stopped)
        if owner is not None and (session, port) in seen:
            return Moment(session, owner)
    _send(stopped, signal.SIGCONT)
    return None


def owner_of(port: int, processes: Iterable[psutil.Process]) -> psutil.Process | None:
    """Which of the processes has the connection from a local port."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if any(one.laddr.port == port for one in process.net_connections("tcp")):
                return process
    return None


def _send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
