"""Catching a job in the middle of a commit.

A commit lasts a tenth of a second, so a fault that is fired by the clock mostly hits nothing.
Here the job is stopped first (SIGSTOP, all of its processes) when the database shows a
transaction that is writing rows; then the database is asked again. What it shows now can't end by
itself, because its client stands still: the fault is fired into a transaction that is open for
certain. If the second look shows none, the job goes on and the next commit is waited for.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import psutil
import psycopg

from demo.job import Job
from oncely.testing.processes import owner_of, send_all, stop_all

_POLL = 0.003
_TREE_AGE = 0.25  # seconds that a list of the job's processes is good for
_SETTLE = 0.005  # a stopped thread may still be on its way out of the kernel
_OPEN = """
SELECT pid, application_name, %s, state, client_port,
       EXTRACT(EPOCH FROM clock_timestamp() - xact_start) * 1000, xact_start::text
FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE %s AND xact_start IS NOT NULL
      AND position(%s in query) > 0
ORDER BY xact_start
"""


class JobEnded(Exception):
    """The job was done before a commit could be caught."""


class Missed(Exception):
    """No commit could be caught in time."""


@dataclass(frozen=True)
class Transaction:
    """An open transaction that has written rows, as ``pg_stat_activity`` shows it.

    Attributes:
        session: the server process's pid.
        application: the session's application_name.
        statement: the first word of the one that writes rows, in its current or last message.
        state: ``active`` or ``idle in transaction``.
        client_port: the client's end of the TCP connection.
        open_ms: milliseconds since it began.
        began: the server's time of its begin; tells transactions of a session apart.
    """

    session: int
    application: str
    statement: str
    state: str
    client_port: int
    open_ms: float
    began: str

    def shown(self) -> dict[str, Any]:
        """What the report says about it."""
        told = asdict(self)
        told["open_ms"] = round(float(self.open_ms), 1)
        return {name: told[name] for name in ("application", "statement", "state", "open_ms")}


@dataclass(frozen=True)
class Caught:
    """The job, stopped inside a commit.

    Attributes:
        transaction: which is open, seen after everything stood still.
        owner: the process at the other end of its session.
        processes: all of the job's, stopped.
    """

    transaction: Transaction
    owner: psutil.Process
    processes: list[psutil.Process]


class Condition(Protocol):
    """What else must be true at the moment of a fault."""

    def observe(self) -> None:
        """Called again and again while the job runs."""

    def holds(self) -> bool:
        """Asked while the job stands still."""


class Anything:
    """No further condition."""

    def observe(self) -> None:
        """Nothing to look at."""

    def holds(self) -> bool:
        """Always."""
        return True


class Database:
    """A session for looking, opened again when the server has been restarted."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: psycopg.Connection[tuple[Any, ...]] | None = None

    def query(self, sql: str, *params: object) -> list[tuple[Any, ...]] | None:
        """Rows, or None when the database is away or the table is not there yet."""
        try:
            if self._session is None:
                self._session = psycopg.connect(
                    self._url, autocommit=True, connect_timeout=2, application_name="demo-watch"
                )
            return self._session.execute(sql.encode(), params).fetchall()
        except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
            self.close()
            return None

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            with contextlib.suppress(psycopg.Error):
                self._session.close()
            self._session = None


def open_transactions(database: Database, job: Job) -> list[Transaction]:
    """The job's transactions that are writing rows now, oldest first."""
    plan = job.plan
    rows = database.query(_OPEN, plan.statement, plan.applications, f"{plan.statement} ") or []
    return [Transaction(*row) for row in rows]


@contextlib.contextmanager
def caught(
    job: Job, database: Database, timeout: float, condition: Condition | None = None
) -> Iterator[Caught]:
    """Stop the job inside a commit; what the block has left of it goes on afterwards.

    Raises:
        JobEnded: the job was done first.
        Missed: no commit was caught in ``timeout`` seconds.
        JobFailed: it can't be kept running.
    """
    condition = condition or Anything()
    deadline = time.monotonic() + timeout
    tree: list[psutil.Process] = []
    listed = 0.0
    while time.monotonic() < deadline:
        if job.tend():
            raise JobEnded(job.plan.name)
        if time.monotonic() - listed > _TREE_AGE:
            tree, listed = job.tree(), time.monotonic()
        condition.observe()
        seen = open_transactions(database, job)
        if not seen:
            time.sleep(_POLL)
            continue
        with standing_still(tree):
            found = _certain(job, database, seen, tree)
            if found and condition.holds():
                yield found
                return
        time.sleep(_POLL)
    raise Missed(f"{job.plan.name}: no commit was caught in {timeout:.0f} s")


def _certain(
    job: Job, database: Database, seen: list[Transaction], tree: list[psutil.Process]
) -> Caught | None:
    """The transaction that was seen before and is still open, if its client stands still."""
    time.sleep(_SETTLE)
    before = {(one.session, one.began) for one in seen}
    for one in open_transactions(database, job):
        owner = owner_of(one.client_port, tree)
        if owner is not None and (one.session, one.began) in before:
            return Caught(one, owner, tree)
    return None


@contextlib.contextmanager
def standing_still(processes: list[psutil.Process]) -> Iterator[None]:
    """SIGSTOP for all, SIGCONT at the end for those that are still there."""
    try:
        stop_all(processes)
        yield
    finally:
        send_all(processes, signal.SIGCONT)
