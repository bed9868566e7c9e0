"""The evidence of a table in PostgreSQL or SQLite, with the ledger's tables beside it.

All statements are SELECT, in one transaction that sees one snapshot.

If rows do not contain their offsets, the table's rows are one group. The digest of the whole table
is computed by the database, and compared with the sum of the history's. Only if they differ are the
rows' digests read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.audit import postgres, sqlite
from oncely.audit.content import Group, Rows
from oncely.audit.evidence import Cell, Committed, Holder, Keys, OfLedger, Span, Tally
from oncely.audit.layout import ENTRIES, parts
from oncely.audit.report import Finding, Proof
from oncely.audit.tables import OFFSET, PARTITION, TOPIC, Ledger, Tables, present
from oncely.core.claim import NO_RECORDS, Counts
from oncely.core.digest import Recipe
from oncely.core.ranges import OffsetRange, Position, TopicPartition, grouped, normalize
from oncely.stores.sql.connection import Connect, Dialect, TableName, connect

Digests = npt.NDArray[np.uint64]


class TableReader(Protocol):
    """Reads a whole table."""

    def unable(self, recipe: str) -> str:
        """The reason why digests of the recipe can't be computed; empty if they can."""

    def total(self, recipe: str) -> tuple[int, int | None]:
        """The number of rows, and the sum of their digests; None without a recipe."""

    def digests(self, recipe: str) -> Iterator[Digests]:
        """The digest of each row."""


@dataclass
class OfTable(OfLedger):
    """What both forms of evidence of a table have in common."""

    snapshot: Ledger
    tables: Tables

    def __post_init__(self) -> None:
        self.untold, self.claims = self.snapshot.untold, self.snapshot.claims

    @property
    def started(self) -> Mapping[TopicPartition, Position]:
        """The first offset of each partition that the pipeline was to read."""
        return self.snapshot.started

    def rejects(self, spans: Sequence[Span]) -> Sequence[tuple[TopicPartition, int]]:
        """The dead letters of these spans."""
        return list(self.tables.rejects_of(spans))

    def close(self) -> None:
        """End the snapshot and the session."""
        self.tables.close()


@dataclass
class SqlContent(OfTable):
    """One snapshot of a table and its ledger; use :func:`oncely.audit.sql.open_evidence`."""

    reader: TableReader
    recipe_of_today: str
    reads: bool = True
    unexpected: Sequence[Finding] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.whole(self.started)
        stated = _stated(self.committed, whole)
        recipe = stated.recipe if stated and stated.recipe else self.recipe_of_today
        unable = self.reader.unable(recipe) if recipe else "the history has no digest of the rows"
        self.recipe_of_all = "" if unable else recipe
        self.proof: Proof = "content" if self.recipe_of_all else "counts"
        self.limits: Sequence[str] = ["rows do not contain the offsets of their records"]
        if unable:
            self.limits = [*self.limits, unable]
            stated = stated and replace(stated, digest=None, recipe="")
        covered = (
            {name for name, _ in Recipe.parse(recipe).columns} if self.recipe_of_all else set()
        )
        if covered and (others := self.tables.columns(self.tables.table) - covered):
            self.limits = [*self.limits, f"no digest covers {', '.join(sorted(others))}"]
        rows, self._digest = self.reader.total(self.recipe_of_all)
        spans, name = self.read(self.started), f"table {self.tables.table}"
        self.groups = [Group(name, spans, rows, stated, others=bool(self.claims))]

    def recipe(self, group: Group) -> str:
        """The history's, or that of today's rows."""
        del group
        return self.recipe_of_all

    def digest_of(self, group: Group) -> int | None:
        """The sum that the database has computed."""
        del group
        return self._digest

    def contents(self, group: Group, recipe: str) -> Iterable[Rows]:
        """The digests of all rows."""
        for digests in self.reader.digests(recipe):
            yield Rows(digests, lambda _: group.name)


def _stated(
    committed: Sequence[Committed], whole: dict[TopicPartition, OffsetRange]
) -> Counts | None:
    """The sum of the history, with its amendments; None if it does not cover all offsets."""
    divided = parts([one for one in committed if one.kind in ENTRIES], whole)
    if any(not one.whole for one in divided):
        return None
    return sum((one.counts for one in committed), NO_RECORDS)


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
