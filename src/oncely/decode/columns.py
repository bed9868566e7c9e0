"""Conversion of Python values, and of slices of bytes, to Arrow columns.

Converting a whole list to a column is fast, but a single bad value fails all of it. So a column
that fails names the values that it refuses, and :func:`fit` builds the rest without their rows.

:class:`BytesDecoder` cuts a column of bytes into slices, and collects their outcomes in record
order.

The decoders of the optional package ``oncely-native`` create columns only from records that they
read with certainty, by the rules of the decoders in Python. All other records are unsure, and left
to these; only they reject.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Rejection
from oncely.decode.base import Decoded, InvalidRecord
from oncely.decode.schema import is_json
from oncely.extras import native
from oncely.per_process import no_gc

Values = Sequence[Any]
Positions = npt.NDArray[np.int64]
Piece = tuple[Positions, pa.RecordBatch]
"""The positions of the rows' records (ascending), and the rows."""

_REFUSALS = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    OverflowError,
    ValueError,
)  # Arrow's errors for a refused value; any other error is a defect


class Misfits(Exception):
    """A column refuses some of its values.

    Attributes:
        positions: the positions of these values, ascending; empty if no single value is refused.
        why: the reason, beginning with the path below the column's name.
    """

    def __init__(self, positions: Positions, why: str) -> None:
        super().__init__(why)
        self.positions, self.why = positions, why

    def of(self, owner: Positions | None, step: str) -> Misfits:
        """The same error for the parent: ``owner`` maps positions to the parent's positions."""
        positions = self.positions if owner is None else np.unique(owner[self.positions])
        return Misfits(positions, f"{step}{self.why}")


class ColumnLeaf(NamedTuple):
    """The construction of a column whose type has no children.

    Attributes:
        make: creates a column from values; raises Arrow's errors.
        blame: positions of values that ``make`` refuses, ascending, called after it has failed. It
            need not return all of them at once: the rest is tried again. None: each value from
            which ``make`` alone cannot create a column.
    """

    make: Callable[[Values, pa.DataType], pa.Array]
    blame: Callable[[Values, pa.DataType], list[int]] | None = None

    def refused(self, values: Values, arrow: pa.DataType) -> Positions:
        """Positions of the values that the column refuses."""
        blame = self.blame or self.one_by_one
        return np.array(blame(values, arrow), np.int64)

    def one_by_one(self, values: Values, arrow: pa.DataType) -> list[int]:
        """Positions of the values that fail when converted alone."""
        return [at for at, value in enumerate(values) if not self._fits(value, arrow)]

    def _fits(self, value: Any, arrow: pa.DataType) -> bool:
        try:
            self.make([value], arrow)
        except _REFUSALS:
            return False
        return True


_PLAIN = ColumnLeaf(pa.array)


@dataclass(frozen=True)
class Columns:
    """Builds columns of any type, nested columns from their members' columns.

    Attributes:
        pick: makes a getter of a struct's member from its index and name; a missing member is None.
            A list is an iterable with a length, a map has keys and values.
        leaves: by Arrow type id, for types that :func:`pyarrow.array` does not convert as required.
    """

    pick: Callable[[int, str], Callable[[Any], Any]]
    leaves: Mapping[int, ColumnLeaf] = field(default_factory=dict)

    def batch(self, schema: pa.Schema, values: Sequence[Values]) -> pa.RecordBatch:
        """One batch of the columns' values, ``values[i]`` for ``schema``'s column i.

        Raises:
            Misfits: some values do not fit; positions are rows.
        """
        columns = [
            self._child(column, column_values, column.name)
            for column, column_values in zip(schema, values, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def build(self, arrow: pa.DataType, values: Values) -> pa.Array:
        """One column.

        Raises:
            Misfits: some values do not fit.
        """
        if pa.types.is_struct(arrow):
            return self._struct(arrow, values)
        if pa.types.is_map(arrow):
            return self._map(arrow, values)
        if pa.types.is_list(arrow):
            items = self._items(arrow.value_type, values, values)
            return pa.ListArray.from_arrays(_offsets(values), items, type=arrow)
        leaf = self.leaves.get(arrow.id, _PLAIN)
        try:
            return leaf.make(values, arrow)
        except _REFUSALS as error:
            raise Misfits(leaf.refused(values, arrow), f": {error}") from None

    def _child(
        self, child: pa.Field, values: Values, step: str, parents: Values | None = None
    ) -> pa.Array:
        try:
            made = self.build(child.type, values)
        except Misfits as misfits:
            raise misfits.of(None, step) from None
        if made.null_count and not child.nullable:
            nulls = [at for at, one in enumerate(values) if one is None]
            if missing := [at for at in nulls if parents is None or parents[at] is not None]:
                raise Misfits(np.array(missing), f"{step}: found null, but it is NOT NULL")
        return made

    def _struct(self, arrow: pa.StructType, values: Values) -> pa.Array:
        children = []
        for index, child in enumerate(arrow):
            get = self.pick(index, child.name)
            members = [None if value is None else get(value) for value in values]
            children.append(self._child(child, members, f".{child.name}", values))
        nulls = pa.array([value is None for value in values], pa.bool_())
        return pa.StructArray.from_arrays(children, fields=list(arrow), mask=nulls)

    def _map(self, arrow: pa.MapType, values: Values) -> pa.Array:
        keys = [None if value is None else value.keys() for value in values]
        inside = [None if value is None else value.values() for value in values]
        return pa.MapArray.from_arrays(
            _offsets(values),
            self._items(arrow.key_type, keys, values),
            self._items(arrow.item_type, inside, values),
            type=arrow,
        )

    def _items(self, arrow: pa.DataType, groups: Values, values: Values) -> pa.Array:
        flat = list(chain.from_iterable(group for group in groups if group is not None))
        try:
            return self.build(arrow, flat)
        except Misfits as misfits:
            lengths = [0 if value is None else len(value) for value in values]
            raise misfits.of(np.repeat(np.arange(len(values)), lengths), "[]") from None


def _offsets(values: Values) -> pa.Array:
    """The offset of each value's first item; a null there makes the value null."""
    ends = list(accumulate((0 if v is None else len(v) for v in values), initial=0))
    starts = [None if v is None else start for v, start in zip(values, ends, strict=False)]
    return pa.array([*starts, ends[-1]], pa.int32())


def _double(values: Values, arrow: pa.DataType) -> pa.Array:
    # An int may precede the change of an inferred column to DOUBLE, or be too large for Arrow.
    return pa.array([None if value is None else float(value) for value in values], arrow)


_BY_NAME = Columns(
    pick=lambda _, name: lambda members: members.get(name),
    leaves={pa.float64().id: ColumnLeaf(_double)},
)


def from_dicts(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Columns of rows whose values fit; a missing value is null."""
    return _BY_NAME.batch(schema, [[row.get(name) for row in rows] for name in schema.names])


def fit(
    rows: Sequence[Any], records: Positions, build: Callable[[Sequence[Any]], pa.RecordBatch]
) -> tuple[list[Piece], dict[int, str]]:
    """Build columns of as many rows as possible.

    Rows that are reported as misfits are left out, and the rest is built again: at most once for
    each column and level. If no single row is refused (a column with more bytes than Arrow's
    offsets can address), the rows are halved.

    Args:
        rows: values that ``build`` accepts.
        records: the position of each row's record, ascending.
        build: creates columns from rows.

    Returns:
        Pieces, ascending as a whole; and the refused rows' records and reasons.
    """
    pieces: list[Piece] = []
    misfits: dict[int, str] = {}
    todo = [np.arange(len(rows))] if len(rows) else []
    while todo:
        at = todo.pop()
        chosen = rows if len(at) == len(rows) else [rows[position] for position in at.tolist()]
        try:
            pieces.append((records[at], build(chosen)))
        except Misfits as found:
            blamed = found.positions if len(at) > 1 else np.array([0])
            if len(blamed):
                misfits.update(dict.fromkeys(records[at[blamed]].tolist(), found.why))
                rest = np.delete(at, blamed)
                todo += [rest] if len(rest) else []
            else:
                middle = len(at) // 2
                todo += [at[middle:], at[:middle]]
    return pieces, misfits


SLICE_ROWS = 32_768
SLICE_BYTES = 16 * 1024 * 1024
"""The values of a slice exist a second time as Python objects; this bounds their size, unless a
single record is larger."""

_LONGEST_REASON = 400  # characters


class Slice(NamedTuple):
    """Consecutive records: the index of the first, and their bytes (binary or large_binary)."""

    first: int
    values: pa.Array


def slices(
    column: pa.ChunkedArray, *, rows: int = SLICE_ROWS, size: int = SLICE_BYTES
) -> Iterator[Slice]:
    """Cut a column of bytes into slices of at most ``rows`` records and about ``size`` bytes."""
    first = 0
    for chunk in column.chunks:
        is_bytes = pa.types.is_binary(chunk.type) or pa.types.is_large_binary(chunk.type)
        values = chunk if is_bytes else pc.cast(chunk, pa.large_binary())
        at = 0
        while at < len(values):
            count = min(rows, len(values) - at)
            while count > 1 and values.slice(at, count).nbytes > size:
                count //= 2
            yield Slice(first + at, values.slice(at, count))
            at += count
        first += len(values)


def read_each(
    values: Iterable[Any],
    read: Callable[[Any], Any],
    refusal: type[Exception] = InvalidRecord,
) -> tuple[list[Any], Positions, dict[int, str]]:
    """Read each value separately.

    Returns:
        The decoded values, their positions, and the reasons of the others by position.
    """
    found: list[Any] = []
    good: list[int] = []
    refused: dict[int, str] = {}
    for position, value in enumerate(values):
        try:
            found.append(read(value))
            good.append(position)
        except refusal as error:
            refused[position] = str(error)
    return found, np.array(good, np.int64), refused


class RowCollector:
    """Collects rows and rejections slice by slice."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._pieces: list[Piece] = []
        self._rejections: list[Rejection] = []

    def add(self, first: int, pieces: Sequence[Piece], refused: Mapping[int, str]) -> None:
        """Add a slice whose first record is ``first``; each record is in one piece or refused.

        Pieces ascend, but may overlap. Sorting here, slice by slice, avoids a copy of the whole
        table.
        """
        pieces = [(first + records, batch) for records, batch in pieces if len(records)]
        ascending = all(a[-1] < b[0] for (a, _), (b, _) in pairwise(pieces))
        self._pieces += pieces if ascending else _sorted(pieces)
        self._rejections += (
            Rejection(first + at, "decode", shortened(refused[at])) for at in sorted(refused)
        )

    def decoded(self) -> Decoded:
        """The outcome of all slices."""
        return Decoded(
            rows=pa.Table.from_batches([batch for _, batch in self._pieces], self.schema),
            row_record=as_arrow(records for records, _ in self._pieces),
            rejections=self._rejections,
        )


def _sorted(pieces: Sequence[Piece]) -> list[Piece]:
    records = np.concatenate([piece for piece, _ in pieces])
    order = np.argsort(records)
    together = pa.Table.from_batches([batch for _, batch in pieces]).combine_chunks()
    (batch,) = together.take(pa.array(order)).combine_chunks().to_batches()
    return [(records[order], batch)]


def as_arrow(records: Iterable[Positions]) -> pa.Int64Array:
    """Record indices as the int64 array that :class:`Decoded` holds."""
    return pa.array(np.concatenate([np.empty(0, np.int64), *records]), pa.int64())


def shortened(reason: str) -> str:
    """A reason of bounded length."""
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"


@dataclass(frozen=True)
class BytesDecoder(ABC):
    """A decoder of one column of bytes; a subclass decodes a slice of it.

    Attributes:
        schema: the columns of the rows.
        column: the column of the records that is read, ``value`` or ``key``.
    """

    schema: pa.Schema
    column: str = "value"

    @property
    def needs(self) -> frozenset[str]:
        """The column that the decoder reads."""
        return frozenset({self.column})

    def decode(self, records: pa.Table) -> Decoded:
        """Decode every record: a row or a rejection."""
        rows = RowCollector(self.schema)
        with no_gc():
            for part in slices(records[self.column]):
                rows.add(part.first, *self._decode_slice(part.values))
        return rows.decoded()

    @abstractmethod
    def _decode_slice(self, values: pa.Array) -> tuple[list[Piece], dict[int, str]]:
        """Rows in pieces that each ascend, and the reasons of the other records by position."""

    def __getstate__(self) -> dict[str, Any]:
        # Compiled readers cannot be pickled; each process creates its own.
        return {field.name: getattr(self, field.name) for field in fields(self)}


_KINDS = {
    pa.bool_().id: "bool",
    **dict.fromkeys([pa.int8().id, pa.int16().id, pa.int32().id, pa.int64().id], "int"),
    **dict.fromkeys([pa.float32().id, pa.float64().id], "float"),
    pa.decimal128(1).id: "decimal",
    pa.string().id: "text",
    pa.binary().id: "binary",
    pa.date32().id: "date",
    pa.timestamp("us").id: "timestamp",
    pa.time64("us").id: "time",
    pa.list_(pa.null()).id: "list",
    pa.struct([]).id: "struct",
    pa.map_(pa.string(), pa.null()).id: "map",
}


def read_native(
    schema: pa.Schema, values: pa.Array, choose: Callable[[Any], Any], *options: Any
) -> tuple[list[Piece], Positions]:
    """Call a decoder of the package.

    Args:
        schema: the columns.
        values: an array of binary or large_binary.
        choose: the decoder, of the package's module.
        options: its arguments after the values and the columns.

    Returns:
        Rows in at most one piece, and the positions of unsure records, ascending.
    """
    rows, columns, left = choose(native())(values, layout_of(schema), *options)
    unsure = np.frombuffer(left, np.int64)
    arrays = [_array(field.type, *made) for field, made in zip(schema, columns, strict=True)]
    good = np.delete(np.arange(len(values)), unsure)
    return [(good, pa.RecordBatch.from_arrays(arrays, schema=schema))] if rows else [], unsure


def layout_of(schema: pa.Schema) -> Any:
    """The columns for the package."""
    return _layout("", pa.struct(list(schema)), nullable=False)


def _layout(name: str, arrow: pa.DataType, *, nullable: bool, json: bool = False) -> Any:
    """A column for the package: kind, name, nullable, two numbers of the kind, children."""
    numbers, children = (0, 0), []
    kind = "json" if json else _KINDS[arrow.id]
    if kind in ("int", "float"):
        numbers = arrow.bit_width // 8, 0
    elif kind == "decimal":
        numbers = arrow.precision, arrow.scale
    elif kind == "timestamp":
        numbers = int(arrow.tz is not None), 0
    elif kind == "struct":
        children = [_layout(f.name, f.type, nullable=f.nullable, json=is_json(f)) for f in arrow]
    else:
        children = [_layout("", inner, nullable=True) for inner in _inside(kind, arrow)]
    return kind, name, nullable, *numbers, children


def _inside(kind: str, arrow: pa.DataType) -> list[pa.DataType]:
    if kind == "list":
        return [arrow.value_type]
    return [arrow.key_type, arrow.item_type] if kind == "map" else []


def _array(
    arrow: pa.DataType, length: int, nulls: int, buffers: list[bytes | None], children: list[Any]
) -> pa.Array:
    inside: list[pa.DataType] = []
    if pa.types.is_struct(arrow):
        inside = [field.type for field in arrow]
    elif pa.types.is_map(arrow):
        inside = [pa.struct([arrow.key_field, arrow.item_field])]
    elif pa.types.is_list(arrow):
        inside = [arrow.value_type]
    made = [_array(child, *parts) for child, parts in zip(inside, children, strict=True)]
    held = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(arrow, length, held, nulls, 0, made)
