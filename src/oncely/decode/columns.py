"""Python values to Arrow columns, and what to do when a column doesn't take one of them.

Whoever decodes record by record ends with lists of Python values. Turning a whole list into a
column is the fast way, but one bad value fails all of it. So a column that fails says which of
its values it doesn't take, and :func:`fit` builds the rest without their records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Values = Sequence[Any]
Positions = npt.NDArray[np.int64]
Pick = Callable[[int, str], Callable[[Any], Any]]
"""How to get a member out of a struct's value, by its index and its name; missing is None."""

_REFUSALS = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    OverflowError,
    ValueError,
)  # what Arrow raises for a value that a column doesn't take; anything else is a defect


class Misfits(Exception):
    """A column doesn't take some of its values.

    Attributes:
        positions: which of the values, ascending; empty when it is none of them alone.
        why: what is wrong with them, beginning with the way down from the column's name.
    """

    def __init__(self, positions: Positions, why: str) -> None:
        super().__init__(why)
        self.positions, self.why = positions, why

    def of(self, owner: Positions | None, step: str) -> Misfits:
        """The same, seen from one level up: ``owner`` maps positions to the parent's."""
        positions = self.positions if owner is None else np.unique(owner[self.positions])
        return Misfits(positions, f"{step}{self.why}")


class Leaf(NamedTuple):
    """How to make a column of a type without children.

    Attributes:
        make: values to a column; raises what Arrow raises.
        blame: positions of values that ``make`` doesn't take, ascending, asked after it has
            failed. It need not name all of them at once: what is left is tried again.
    """

    make: Callable[[Values, pa.DataType], pa.Array]
    blame: Callable[[Values, pa.DataType], list[int]]


def leaf(make: Callable[[Values, pa.DataType], pa.Array]) -> Leaf:
    """A leaf that is to blame for every value of which it can't make a column alone."""

    def fits(value: Any, arrow: pa.DataType) -> bool:
        try:
            make([value], arrow)
        except _REFUSALS:
            return False
        return True

    def blame(values: Values, arrow: pa.DataType) -> list[int]:
        return [position for position, value in enumerate(values) if not fits(value, arrow)]

    return Leaf(make, blame)


_PLAIN = leaf(pa.array)


@dataclass(frozen=True)
class Columns:
    """Builds columns of any type, nested ones from their members' columns.

    Attributes:
        pick: takes structs apart; a list is an iterable with a length, a map has keys and values.
        leaves: by Arrow type id, where :func:`pyarrow.array` alone won't do.
    """

    pick: Pick
    leaves: Mapping[int, Leaf] = field(default_factory=dict)

    def batch(self, schema: pa.Schema, values: Sequence[Values]) -> pa.RecordBatch:
        """One batch of the columns' values, ``values[i]`` for ``schema``'s column i.

        Raises:
            Misfits: some don't fit; positions are rows.
        """
        columns = []
        for column, column_values in zip(schema, values, strict=True):
            try:
                columns.append(self.build(column.type, column_values))
            except Misfits as misfits:
                raise misfits.of(None, column.name) from None
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def build(self, arrow: pa.DataType, values: Values) -> pa.Array:
        """One column.

        Raises:
            Misfits: some values don't fit.
        """
        if pa.types.is_struct(arrow):
            return self._struct(arrow, values)
        if pa.types.is_map(arrow):
            return self._map(arrow, values)
        if pa.types.is_list(arrow):
            return self._list(arrow, values)
        leaf = self.leaves.get(arrow.id, _PLAIN)
        try:
            return leaf.make(values, arrow)
        except _REFUSALS as error:
            positions = np.array(leaf.blame(values, arrow), np.int64)
            raise Misfits(positions, f": {error}") from None

    def _struct(self, arrow: pa.StructType, values: Values) -> pa.Array:
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        children = []
        for index, child in enumerate(fields):
            get = self.pick(index, child.name)
            members = [None if value is None else get(value) for value in values]
            try:
                children.append(self.build(child.type, members))
            except Misfits as misfits:
                raise misfits.of(None, f".{child.name}") from None
        nulls = pa.array([value is None for value in values], pa.bool_())
        return pa.StructArray.from_arrays(children, fields=fields, mask=nulls)

    def _list(self, arrow: pa.ListType, values: Values) -> pa.Array:
        items = self._items(arrow.value_type, values, values)
        return pa.ListArray.from_arrays(_offsets(values), items, type=arrow)

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
    """Where each value's items begin; a null there makes the value null."""
    ends = list(accumulate((0 if v is None else len(v) for v in values), initial=0))
    starts = [None if v is None else start for v, start in zip(values, ends, strict=False)]
    return pa.array([*starts, ends[-1]], pa.int32())


@dataclass(frozen=True)
class Fitted:
    """What :func:`fit` made of some rows: each is in one piece or among the misfits.

    Attributes:
        pieces: positions of the rows, ascending, and their columns; ascending as a whole.
        misfits: position of a row to why it is none, ascending.
    """

    pieces: list[tuple[Positions, pa.RecordBatch]]
    misfits: dict[int, str]


def fit(rows: Sequence[Any], build: Callable[[Sequence[Any]], pa.RecordBatch]) -> Fitted:
    """Build columns of as many rows as possible.

    Rows that are named as misfits are left out, and the rest is built again: at most once for
    each column and level. When no row alone is to blame (a column of more bytes than Arrow's
    offsets reach), the rows are halved.
    """
    pieces: list[tuple[Positions, pa.RecordBatch]] = []
    misfits: dict[int, str] = {}
    todo = [np.arange(len(rows))] if len(rows) else []
    while todo:
        positions = todo.pop()
        chosen = rows if len(positions) == len(rows) else [rows[at] for at in positions.tolist()]
        try:
            pieces.append((positions, build(chosen)))
        except Misfits as found:
            blamed = found.positions if len(positions) > 1 else np.array([0])
            if len(blamed):
                misfits.update(dict.fromkeys(positions[blamed].tolist(), found.why))
                rest = np.delete(positions, blamed)
                todo += [rest] if len(rest) else []
            else:
                middle = len(positions) // 2
                todo += [positions[middle:], positions[:middle]]
    return Fitted(pieces, dict(sorted(misfits.items())))
