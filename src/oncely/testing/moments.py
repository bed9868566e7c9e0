"""Stops a pipeline inside a commit: all of its processes are stopped while a transaction is open.

A commit lasts a tenth of a second, so a fault at a fixed time rarely hits one. Here a trigger holds
the first COPY into the table until the pipeline's processes are stopped (SIGSTOP). Then the server
continues, but its client is stopped, so the transaction is open until the block ends.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import psycopg
from psycopg import sql

from oncely.testing.processes import await_that, owner_of, send_all, stop_all, tree

_GATE = 4711
_SETTLE = 0.005  # seconds; a stopped thread may still be leaving the kernel
_FUNCTION = f"""
CREATE OR REPLACE FUNCTION oncely_testing_gate() RETURNS trigger LANGUAGE plpgsql AS
'BEGIN PERFORM pg_advisory_xact_lock_shared({_GATE}); RETURN NULL; END'
"""
_TRIGGER = """
CREATE OR REPLACE TRIGGER oncely_testing_gate BEFORE INSERT ON {}
FOR EACH STATEMENT EXECUTE FUNCTION oncely_testing_gate()
"""
_WAITING = """
SELECT pid, client_port FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'oncely/%'
  AND wait_event = 'advisory'
"""


@dataclass(frozen=True)
class Moment:
    """An open transaction.

    Attributes:
        session: the process id of the session's server process.
        owner: the process at the other end of the connection, stopped.
    """

    session: int
    owner: psutil.Process


@contextlib.contextmanager
def inside_a_commit(
    url: str, table: str, pid: int, publish: Callable[[], object], timeout: float = 300.0
) -> Iterator[Moment]:
    """Stop a pipeline inside a COPY; processes that survive the block continue afterwards.

    Args:
        url: the URL of the PostgreSQL database.
        table: the pipeline's table, as an SQL name; waits until it exists.
        pid: the driver; all processes below it are stopped, too.
        publish: writes the records whose commit is stopped.
        timeout: seconds for the table, and again for the commit.

    Raises:
        AssertionError: there was no table, or no commit, in time.
    """
    stopped: list[psutil.Process] = []
    with psycopg.connect(url, autocommit=True) as database:
        await_that(lambda: _exists(database, table), f"the table {table}", timeout)
    try:
        with closed_gate(url, table) as database:
            publish()
            moment = await_that(lambda: _caught(database, pid, stopped), "a commit", timeout)
        yield moment
    finally:
        send_all(stopped, signal.SIGCONT)


@contextlib.contextmanager
def closed_gate(url: str, table: str) -> Iterator[psycopg.Connection[Any]]:
    """Within the block every new COPY into the table waits for the end of the block."""
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(_FUNCTION.encode())
        name = sql.Identifier(*table.split("."))
        database.execute(sql.SQL(_TRIGGER).format(name))
        database.execute(b"SELECT pg_advisory_lock(%s)", (_GATE,))
        try:
            yield database
        finally:
            database.execute(b"SELECT pg_advisory_unlock(%s)", (_GATE,))


def waiting(database: psycopg.Connection[Any]) -> list[tuple[int, int]]:
    """The sessions that wait at the gate: pid of the server process, and the client's port."""
    return database.execute(_WAITING.encode()).fetchall()


def _exists(database: psycopg.Connection[Any], table: str) -> bool:
    row = database.execute(b"SELECT to_regclass(%s)", (table,)).fetchone()
    return row is not None and row[0] is not None


def _caught(
    database: psycopg.Connection[Any], pid: int, stopped: list[psutil.Process]
) -> Moment | None:
    """Stop all processes if a COPY waits at the gate, and check that it still waits after that."""
    seen = waiting(database)
    if not seen:
        return None
    stopped[:] = tree(pid)
    stop_all(stopped)
    time.sleep(_SETTLE)
    for session, port in waiting(database):
        owner = owner_of(port, stopped)
        if owner is not None and (session, port) in seen:
            return Moment(session, owner)
    send_all(stopped, signal.SIGCONT)
    return None
