"""The evidence of a table in PostgreSQL or SQLite, with the ledger's tables beside it.

All statements are SELECT, in one transaction that sees one snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from oncely.audit import postgres, sqlite
from oncely.audit.evidence import Cell, Span, Tally
from oncely.audit.holders import Holder, Keys
from oncely.audit.report import Proof
from oncely.audit.sql_content import OfTable, SqlContent, TableReader
from oncely.audit.tables import OFFSET, PARTITION, TOPIC, Tables, present
from oncely.clients.sql.connection import Connect, Dialect, TableName, connect
from oncely.core.ranges import OffsetRange, TopicPartition, grouped, normalize


@dataclass
class SqlEvidence(OfTable):
    """One snapshot of a table and its ledger; use :func:`open_evidence`."""

    reader: Reader
    proof: Proof = "offsets"
    limits: Sequence[str] = ()
    _all_in_cells: bool = field(default=False, init=False)

    def tallies(self, cells: Sequence[Cell]) -> Sequence[Tally]:
        """Grouped by the server, or by this process for SQLite."""
        found, self._all_in_cells = self.reader.tallies(cells)
        return found

    def unable(self, recipe: str) -> str:
        """The columns' types may have changed since, or the recipe is of a later version."""
        return self.reader.unable(recipe)

    def outside(self, whole: Mapping[TopicPartition, OffsetRange]) -> Iterable[pa.RecordBatch]:
        """Dead letters that are not in these ranges, and rows that are not in those of another
        pipeline either."""
        spans = [Span(*one) for one in sorted(whole.items())]
        accounted = grouped([*whole.items(), *((tp, one) for _, tp, one in self.claims)])
        known = [Span(tp, one) for tp, own in sorted(accounted.items()) for one in normalize(own)]
        rows = [] if self._all_in_cells else self.tables.rows_outside(known)
        letters = self.tables.rejects_outside(spans)
        lines = [(*one, None) for one in (*rows, *letters)]
        if lines:
            yield present(lines)

    def rows(self, cells: Sequence[Cell]) -> Iterable[pa.RecordBatch]:
        """Rows by offset."""
        return self.reader.rows(cells)

    def holders(self, keys: Keys) -> Iterable[Holder]:
        """By the digests of the keys of all rows."""
        return self.reader.holders(keys)


def open_evidence(
    pipeline: str,
    dialect: Dialect,
    table: TableName,
    *,
    offsets: bool = True,
    recipe: str = "",
    connect: Connect = connect,
) -> SqlEvidence | SqlContent:
    """Begin a snapshot of a table and the ledger beside it.

    Args:
        pipeline: the ledger's key.
        dialect: the database.
        table: the destination.
        offsets: its rows contain their offsets, if it has the columns.
        recipe: of today's rows, where the history has no digest.
        connect: opens the session.

    Raises:
        WrongInput: there is no table or no ledger of the pipeline, or no permission to read them.
        Unavailable: no answer.
    """
    tables, reader = _begun(pipeline, dialect, table, connect)
    try:
        ledger = tables.ledger()
        if offsets and {TOPIC, PARTITION, OFFSET} <= tables.columns(table):
            return SqlEvidence(ledger, tables, reader)
        return SqlContent(ledger, tables, reader, recipe)
    except BaseException:
        tables.close()
        raise


def open_ledger(
    pipeline: str, dialect: Dialect, table: TableName, connect: Connect = connect
) -> Tables:
    """Begin a snapshot of the ledger beside a table, whose rows need not name their records.

    Takes the arguments of :func:`open_evidence`, and raises its errors.
    """
    return _begun(pipeline, dialect, table, connect)[0]


def _begun(
    pipeline: str, dialect: Dialect, table: TableName, connect: Connect
) -> tuple[Tables, Reader]:
    session = connect(dialect, "oncely-audit")
    try:
        tables = Tables(session, dialect, table, pipeline)
        return tables, (postgres.begin if dialect.name == "postgresql" else sqlite.begin)(tables)
    except BaseException:
        session.close()
        raise


class Reader(TableReader, Protocol):
    """The differences between the databases."""

    def tallies(self, cells: Sequence[Cell]) -> tuple[list[Tally], bool]:
        """One tally for each cell; true if there are no other rows, false if that is not known."""

    def rows(self, cells: Sequence[Cell]) -> Iterable[pa.RecordBatch]:
        """Rows by offset, of these cells."""

    def holders(self, keys: Keys) -> Iterable[Holder]:
        """The rows that have one of some keys."""
