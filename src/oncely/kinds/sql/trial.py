"""Tables in the trials of ``oncely semantics``: the connection to the database has the fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from oncely.kinds.trial import BEFORE, INSIDE, POSITION, RECORDS, STEPS, Killer, Place, Trial
from oncely.stores.sql.connection import (
    Connection,
    Dialect,
    RowByRow,
    Statement,
    StatementResult,
    TableName,
    connect,
)


@dataclass
class KillingSessions:
    """``Parts.connect`` for a SQL sink."""

    killer: Killer

    def __call__(self, dialect: Dialect, application: str) -> Any:
        """Open a session with the fault."""
        return _Session(connect(dialect, application), self.killer)


class _Session:
    """A database session that tracks the step."""

    def __init__(self, inner: Connection, killer: Killer) -> None:
        self._inner, self._first = inner, killer
        self._records = self._position = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def _killer(self) -> Killer:
        return self._first.now

    def begin(self) -> None:
        self._records = self._position = False
        self._inner.begin()

    def copy(
        self, table: TableName, rows: pa.Table, then: Sequence[str] = (), *, of_rows: bool = True
    ) -> Sequence[StatementResult]:
        if not self._killer.position_first:
            self._killer.at(BEFORE)
        if self._killer.wants(INSIDE):
            self._inner.copy(table, rows.slice(0, rows.num_rows // 2))
            self._killer.end()
        answers = self._inner.copy(table, rows, then, of_rows=of_rows)
        self._records = True
        if self._killer.together:
            self._killer.at(RECORDS)
        return answers

    def execute_all(self, statements: Sequence[Statement]) -> None:
        """Of a commit: the positions move, and the history is written."""
        if self._killer.position_first:
            self._killer.at(BEFORE)
        self._inner.execute_all(statements)
        self._position = True
        if self._killer.together:
            self._killer.at(POSITION)

    def commit(self) -> None:
        self._inner.commit()
        self._killer.committed(records=self._records, position=self._position)

    def insert_each(self, into: RowByRow, rows: pa.Table) -> list[tuple[int, str]]:
        """Insert rows separately."""
        self._records = True
        return self._inner.insert_each(into, rows)


def _found(place: Place, table: str) -> Counter[int]:
    import psycopg

    with psycopg.connect(place.url) as connection:
        rows = connection.execute(f'SELECT id, count(*) FROM "{table}" GROUP BY id').fetchall()
    return Counter({int(id_): int(count) for id_, count in rows})


TRIAL = Trial(
    title="Into PostgreSQL",
    points=STEPS,
    sink=lambda place, name: {"kind": "sql", "url": place.url, "table": name},
    faulty=lambda killer, _: {"connect": KillingSessions(killer)},
    found=_found,
)
