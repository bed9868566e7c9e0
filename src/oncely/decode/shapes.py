"""Types as trees that can grow: what is known of the columns of JSON records so far.

A shape is immutable; growing makes a new one that shares what has not changed. Besides the types
that columns have there are two that are not known yet: an empty array or object says what it is,
but not of what. A null says nothing at all: it is no shape, ``None``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import pyarrow as pa

from oncely.decode.avro_form import avro_name, is_large, large
from oncely.decode.reference import quote
from oncely.decode.schema import type_name


@dataclass(frozen=True, eq=False)
class Leaf:
    """A type without others inside; one object for one type, see :func:`leaf`."""

    arrow: pa.DataType
    words: str = ""
    depth = 1
    count = 0
    text = 70  # the longest, a decimal, has 63

    def __str__(self) -> str:
        return self.words or type_name(self.arrow)


@dataclass(frozen=True, eq=False)
class ListOf:
    """A list; of nothing that is known, when ``item`` is None."""

    item: Shape | None

    def __str__(self) -> str:
        return "ARRAY"

    @cached_property
    def depth(self) -> int:
        """How many types lie in one another."""
        return 1 + (self.item.depth if self.item else 0)

    @cached_property
    def count(self) -> int:
        """How many fields there are, at all levels."""
        return self.item.count if self.item else 0

    @cached_property
    def text(self) -> int:
        """At most how many characters this is as an Avro schema."""
        return 40 + (self.item.text if self.item else 0)


@dataclass(frozen=True, eq=False)
class Struct:
    """An object; the columns as a whole are one too.

    Attributes:
        fields: by name, in order.
        grown: while a record or a schema is being looked at: what this grew from, and the fields
            that are new or other ones. Growing costs what has changed, not what is there.
    """

    fields: Mapping[str, Shape]
    grown: tuple[Struct, Mapping[str, Shape]] | None = None

    def __str__(self) -> str:
        return "STRUCT"

    @cached_property
    def depth(self) -> int:
        """How many types lie in one another."""
        return 1 + max((field.depth for field in self.fields.values()), default=0)

    @cached_property
    def count(self) -> int:
        """How many fields there are, at all levels."""
        return len(self.fields) + sum(field.count for field in self.fields.values())

    @cached_property
    def text(self) -> int:
        """At most how many characters this is as an Avro schema."""
        return 300 + sum(_named(name) + field.text for name, field in self.fields.items())

    def extended(self, changed: Mapping[str, Shape]) -> Struct:
        """The same with other fields; its sizes follow from those of what has changed."""
        new = Struct({**self.fields, **changed})
        depth, count, text = self.depth, self.count, self.text
        for name, field in changed.items():
            before = self.fields.get(name)
            depth = max(depth, 1 + field.depth)
            count += field.count - before.count if before else 1 + field.count
            text += field.text - before.text if before else _named(name) + field.text
        vars(new).update(depth=depth, count=count, text=text)
        return new


Shape = Leaf | ListOf | Struct


def _named(name: str) -> int:
    return len(avro_name(name)) + 60


@lru_cache(maxsize=1024)
def leaf(arrow: pa.DataType) -> Leaf:
    """The shape of a type without others inside; always the same object for the same type."""
    return _LEAVES.get(arrow) or Leaf(arrow)


BOOLEAN, INT, BIGINT = Leaf(pa.bool_()), Leaf(pa.int32()), Leaf(pa.int64())
FLOAT, DOUBLE, STRING = Leaf(pa.float32()), Leaf(pa.float64()), Leaf(pa.string())
LARGE = Leaf(pa.int64(), "BIGINT with numbers beyond 2^53")
"""A BIGINT column that has held a number beyond 2^53. Not every such number equals a DOUBLE, so
this column does not become one; any other BIGINT column may, and each of its numbers stays."""
_LEAVES = {each.arrow: each for each in (BOOLEAN, INT, BIGINT, FLOAT, DOUBLE, STRING)}
NOTHING = Struct({})
EXACT = 1 << 53
"""Every whole number up to this one, and down to its negative, equals a DOUBLE."""


def step(path: str, name: str) -> str:
    """The path of a field in what ``path`` leads to: ``who.tags``, ``who."first name"``."""
    shown = name if name.isidentifier() else quote(name)
    return f"{path}.{shown}" if path else shown


def shape_of(schema: pa.Schema) -> Struct:
    """The columns as a shape; columns of type null are left out."""
    return _struct(schema)


def _struct(fields: Iterable[pa.Field]) -> Struct:
    shapes = ((field.name, _of(field)) for field in fields)
    return Struct({name: shape for name, shape in shapes if shape is not None})


def _of(field: pa.Field) -> Shape | None:
    arrow = field.type
    if is_large(field):
        return LARGE
    if pa.types.is_struct(arrow):
        return _struct(arrow.field(i) for i in range(arrow.num_fields))
    if pa.types.is_list(arrow):
        return ListOf(_of(arrow.value_field))
    return None if pa.types.is_null(arrow) else leaf(arrow)


class Settled(NamedTuple):
    """A shape without what is not known yet.

    Attributes:
        columns: the shape; the known one itself when nothing else is left.
        names: of the fields that are new, at all levels.
    """

    columns: Struct
    names: list[str]


def settled(shape: Struct, known: Struct) -> Settled:
    """Leave out what is not known yet: empty arrays, objects without a known field.

    Args:
        shape: what ``known`` has grown to.
        known: it has nothing of that kind.
    """
    names: list[str] = []
    found = _settled(shape, known, names)
    return Settled(found if isinstance(found, Struct) else known, names)


def _settled(shape: Shape | None, known: Shape | None, names: list[str]) -> Shape | None:
    if shape is known or shape is None:
        return shape
    if isinstance(shape, ListOf):
        item = _settled(shape.item, known.item if isinstance(known, ListOf) else None, names)
        if isinstance(known, ListOf) and item is known.item:
            return known
        return None if item is None else ListOf(item)
    if not isinstance(shape, Struct):
        return shape
    base = known if isinstance(known, Struct) else NOTHING
    grown_from, changed = shape.grown or (None, shape.fields)
    kept: dict[str, Shape] = {}
    for name, field in (changed if grown_from is base else shape.fields).items():
        before = base.fields.get(name)
        after = _settled(field, before, names)
        if after is not None and after is not before:
            kept[name] = after
            if before is None:
                names.append(name)
    if kept:
        return base.extended(kept)
    return base if base.fields else None


def schema_of(shape: Struct) -> pa.Schema:
    """The columns of a settled shape, all of them nullable."""
    return pa.schema([_field(name, field) for name, field in shape.fields.items()])


def _field(name: str, shape: Shape | None) -> pa.Field:
    if shape is LARGE:
        return large(name)
    if isinstance(shape, Struct):
        return pa.field(name, pa.struct([_field(*each) for each in shape.fields.items()]))
    if isinstance(shape, ListOf):
        return pa.field(name, pa.list_(_field("item", shape.item)))
    return pa.field(name, pa.null() if shape is None else shape.arrow)
