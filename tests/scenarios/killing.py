"""A database session that kills its own process at the n-th call, before or after it.

``KillAt(n)`` is a ``connect`` for a sink. Calls are counted over all sessions of the process
from the moment that :attr:`KillAt.armed_by` has been seen in a statement often enough.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from oncely.clients.sql.connection import Connection, Dialect, Params, Row, TableName, connect


@dataclass
class Counter:
    """Calls so far, in this process."""

    calls: int = 0
    met: int = 0
    seen: list[str] = field(default_factory=list)


@dataclass
class KillAt:
    """Opens sessions that count.

    Attributes:
        call: kill at this call, counted from 0; -1 never kills and only counts.
        after: after the call instead of before it.
        armed_by: count from a statement that holds this text; empty for at once.
        skip: so many such statements pass before.
    """

    call: int
    after: bool = False
    armed_by: str = ""
    skip: int = 0
    counter: Counter = field(default_factory=Counter)

    def __call__(self, dialect: Dialect, application: str) -> Connection:
        return _Killing(connect(dialect, application), self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"call": -1, "counter": Counter()}  # only in the driver

    def meet(self, what: str, *, after: bool) -> None:
        """Called round every call; dies here when it is the one."""
        counter = self.counter
        if not after and counter.met <= self.skip and self.armed_by in what:
            counter.met += 1
        if counter.met <= self.skip:
            return
        if not after:
            counter.calls += 1
            counter.seen.append(what)
        if after == self.after and counter.calls - 1 == self.call:
            os.kill(os.getpid(), signal.SIGKILL)


class _Killing:
    """Every method is one round trip, so round each of them is where a crash can fall."""

    def __init__(self, inner: Connection, plan: KillAt) -> None:
        self._inner, self._plan = inner, plan

    def _round(self, what: str, work: Any) -> Any:
        self._plan.meet(what, after=False)
        done = work()
        self._plan.meet(what, after=True)
        return done

    def begin(self) -> None:
        self._round("BEGIN", self._inner.begin)

    def commit(self) -> None:
        self._round("COMMIT", self._inner.commit)

    def rollback(self) -> None:
        self._round("ROLLBACK", self._inner.rollback)

    def query(self, sql: str, params: Params = ()) -> list[Row]:
        return self._round(sql, lambda: self._inner.query(sql, params))

    def execute(self, sql: str, params: Params = ()) -> int:
        return self._round(sql, lambda: self._inner.execute(sql, params))

    def execute_many(self, sql: str, rows: Iterable[Params]) -> None:
        self._round(sql, lambda: self._inner.execute_many(sql, rows))

    def copy(self, table: TableName, rows: pa.Table) -> None:
        self._round(f"COPY {table}", lambda: self._inner.copy(table, rows))

    def check_constraints(self) -> None:
        self._round("SET CONSTRAINTS", self._inner.check_constraints)

    def close(self) -> None:
        self._inner.close()
