"""Faults of a commit: a process kills itself at a call to the database, or a pipeline is stopped
while its transaction is open.

A commit lasts a tenth of a second, so a fault at a fixed time rarely hits one. For
:func:`inside_a_commit` a trigger holds the first COPY into the table until the pipeline's processes
are stopped (SIGSTOP). Then the server continues, but its client is stopped, so the transaction is
open until the block ends.

``pipeline.replaced(connect=KillAt(n))`` has such sessions. Calls are counted over all sessions of
the process after :attr:`KillAt.armed_by` has occurred in enough statements.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import psycopg
from psycopg import sql

from oncely.stores.sql.connection import Connection, Dialect, connect
from oncely.testing.processes import await_that, kill_self, owner_of, send_all, stop_all, tree

LEND, FUNCTION, GIVE_BACK = "LEND", "a statement of the function", "GIVE BACK"
"""The calls of a transaction that is lent to a handler."""


@dataclass
class Counter:
    """The number of calls so far, in this process."""

    calls: int = 0
    met: int = 0
    seen: list[str] = field(default_factory=list)


@dataclass
class KillAt:
    """Opens sessions that count their calls.

    Attributes:
        call: kill at this call, counted from 0; -1 never kills and only counts.
        after: after the call instead of before it.
        armed_by: count from a statement that contains this text; empty: from the first.
        skip: the number of such statements to skip.
    """

    call: int
    after: bool = False
    armed_by: str = ""
    skip: int = 0
    counter: Counter = field(default_factory=Counter)

    def __call__(self, dialect: Dialect, application: str) -> Any:
        """Open a session that counts."""
        return _Killing(connect(dialect, application), self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"call": -1, "counter": Counter()}  # only in the driver

    def meet(self, what: str, *, after: bool) -> None:
        """Called around every call; kills the process at the chosen call."""
        counter = self.counter
        if not after and counter.met <= self.skip and self.armed_by in what:
            counter.met += 1
        if counter.met <= self.skip:
            return
        if not after:
            counter.calls += 1
            counter.seen.append(what)
        if after == self.after and counter.calls - 1 == self.call:
            kill_self()


class _Killing:
    """A session whose methods are a round trip each at most, so a crash can occur before or after
    each."""

    def __init__(self, inner: Connection, plan: KillAt) -> None:
        self._inner, self._plan = inner, plan

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        return method if name == "close" else partial(self._round, name, method)

    @contextmanager
    def lend(self, seconds: float) -> Iterator[Any]:
        """The loan's begin and end, and each statement of the function between them."""
        self._plan.meet(LEND, after=False)
        with self._inner.lend(seconds) as tx:
            self._plan.meet(LEND, after=True)
            tx.wait = partial(self._round, FUNCTION, tx.wait)
            yield tx
            self._plan.meet(GIVE_BACK, after=False)
        self._plan.meet(GIVE_BACK, after=True)

    def _round(self, name: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        what = _told(name, arguments)
        self._plan.meet(what, after=False)
        done = method(*arguments, **options)
        self._plan.meet(what, after=True)
        return done


def _told(name: str, arguments: tuple[Any, ...]) -> str:
    """A call as SQL text."""
    match name:
        case "query" | "execute" | "execute_many" | "defer":
            return str(arguments[0])
        case "execute_all":
            return "; ".join(one.sql for one in arguments[0])
        case "copy":
            return f"COPY {arguments[0]}"
        case "check_constraints":
            return "SET CONSTRAINTS"
        case _ if name == FUNCTION:
            return name
    return name.upper()


# -- a stop inside a commit -----------------------------------------------------------------

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
