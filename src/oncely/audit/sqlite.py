"""A table in SQLite: this process reads the rows, for there is no server that could sum them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.audit.evidence import Cell, Holder, IntArray, Keys, Span, Tally, among
from oncely.audit.layout import adjacent
from oncely.audit.stored.sql_ledger import REJECTS
from oncely.audit.tables import OF_ROWS, Tables, conditions
from oncely.audit.tally import Scanned, Tallies, added
from oncely.core.digest import KINDS, Kind, Recipe, kind_of, row_digests
from oncely.core.ranges import OffsetRange, TopicPartition

_Rows = tuple[IntArray, npt.NDArray[np.uint64] | None]
_OFFSETS = 500_000  # whose rows are read at once


def begin(tables: Tables) -> SqliteReader:
    """Begin the snapshot: the first read takes it.

    Raises:
        WrongInput: a table is missing.
    """
    tables.session.execute("BEGIN")
    tables.require_tables()
    return SqliteReader(tables)


@dataclass
class SqliteReader:
    """Statements that read the table."""

    tables: Tables

    def unable(self, recipe: str) -> str:
        """The reason why digests of the recipe can't be computed; empty if they can."""
        return self._columns(recipe)[1]

    def tallies(self, cells: Sequence[Cell]) -> tuple[list[Tally], bool]:
        """One tally for each cell."""
        sums = Tallies(cells)
        for some in adjacent(sorted(cells), _OFFSETS):
            tp = some[0].span.partition
            start, end = some[0].span.range.start, some[-1].span.range.end
            sums.add(tp, *self._read(tp, start, end, some[0].recipe))
            rejected = self.tables.session.query(
                f'SELECT "offset" FROM {self.tables.name(REJECTS)} WHERE pipeline = %s'
                ' AND topic = %s AND "partition" = %s AND "offset" >= %s AND "offset" < %s',
                (self.tables.pipeline, *tp, start, end),
            )
            sums.add(tp, np.array(rejected, dtype=np.int64).reshape(-1), rejects=True)
        return sums.result(), False

    def rows(self, cells: Sequence[Cell]) -> Iterable[pa.RecordBatch]:
        """Rows by offset, of these cells."""
        for some in adjacent(sorted(cells), _OFFSETS):
            tp = some[0].span.partition
            start, end = some[0].span.range.start, some[-1].span.range.end
            offsets, digests = self._read(tp, start, end, some[0].recipe)
            yield from Scanned(tp, offsets, digests).only(np.ones(len(offsets), np.bool_))

    def total(self, recipe: str) -> tuple[int, int | None]:
        """The number of rows, and the sum of their digests; None without a recipe."""
        offsets, digests = self._rows("0", recipe, "", ())
        return len(offsets), None if digests is None else added(digests)

    def digests(self, recipe: str) -> Iterator[npt.NDArray[np.uint64]]:
        """The digest of each row."""
        _, digests = self._rows("0", recipe, "", ())
        if digests is not None:
            yield digests

    def holders(self, keys: Keys) -> Iterator[Holder]:
        """The rows that have one of some keys."""
        recipe, version = Recipe.parse(keys.recipe), keys.version
        kinds = dict(recipe.columns)
        if version is not None and keys.versions is not None:
            kinds[version] = kind_of(keys.versions.type) or Kind("text")
        names = [*OF_ROWS, *map(self.tables.dialect.quote, kinds)]
        rows = self.tables.session.query(f"SELECT {', '.join(names)} FROM {self.tables.rows}")
        topic, number, at, *values = zip(*rows, strict=True) if rows else [()] * len(names)
        arrays = [as_written(v, kind) for v, kind in zip(values, kinds.values(), strict=True)]
        table = pa.table(arrays, names=list(kinds))
        places = pa.table({"topic": topic, "partition": number, "offset": at})
        versions = table.column(version) if version in kinds else pa.nulls(len(rows))
        yield from among(keys, row_digests(table, None, recipe), places, versions)

    def _read(self, tp: TopicPartition, start: int, end: int, recipe: str) -> _Rows:
        """The offsets of rows, and their digests."""
        ((where, params),) = conditions([Span(tp, OffsetRange(start, end))], OF_ROWS)
        return self._rows(OF_ROWS[2], recipe, f" WHERE {where}", params)

    def _rows(self, offset: str, recipe: str, where: str, params: tuple[object, ...]) -> _Rows:
        columns, _ = self._columns(recipe)
        quote = self.tables.dialect.quote
        names = "".join(f", {quote(name)}" for name, _ in columns)
        rows = self.tables.session.query(
            f"SELECT {offset}{names} FROM {self.tables.rows}{where}", params
        )
        offsets, *values = zip(*rows, strict=True) if rows else [()] * (1 + len(columns))
        at = np.array(offsets, dtype=np.int64)
        if not recipe or self.unable(recipe):
            return at, None
        arrays = [as_written(v, kind) for v, (_, kind) in zip(values, columns, strict=True)]
        table = pa.table(arrays, names=[name for name, _ in columns])
        if not columns:
            table = pa.table({"": at})
        return at, row_digests(table, at, Recipe.parse(recipe))

    def _columns(self, recipe: str) -> tuple[Sequence[tuple[str, Kind]], str]:
        """The covered columns, or the reason why there are none."""
        if not recipe:
            return (), ""
        try:
            columns = Recipe.parse(recipe).columns
        except ValueError as error:
            return (), f"the digests of the rows can't be recomputed: {error}"
        gone = {name for name, _ in columns} - self.tables.columns(self.tables.table)
        if gone:
            return (), f"the digests of the rows can't be recomputed: no column {min(gone)!r}"
        return columns, ""


def as_written(values: Sequence[object], kind: Kind) -> pa.Array:
    """Values of SQLite as those that were written: times and decimals are stored as text.

    A value that no value of the kind equals is null.
    """
    wanted = KINDS[kind.name].arrow(kind.scale)
    try:
        return _plain(values, kind).cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return pa.array([_value(one, kind) for one in values], wanted)


def _value(value: object, kind: Kind) -> object:
    wanted = KINDS[kind.name].arrow(kind.scale)
    try:
        return _plain([value], kind).cast(wanted)[0].as_py()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None


def _plain(values: Sequence[object], kind: Kind) -> pa.Array:
    if kind.name in ("decimal", "numeric", "date", "time", "timestamp", "instant"):
        return pa.array(values, pa.string())
    if kind.name == "boolean":
        return pa.array([one if one in (0, 1, None) else None for one in values], pa.int64())
    return pa.array(values, KINDS[kind.name].arrow(kind.scale))
