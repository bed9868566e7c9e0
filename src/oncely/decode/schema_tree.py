"""Columns as an extensible tree: the schema of JSON records so far.

A tree is immutable; extending it creates a new tree that shares the unchanged branches. Besides the
types of columns there are two types that are not known yet: an empty array and an empty object have
items and fields of no type. A null has no type at all: it is ``None`` in place of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import pyarrow as pa

from oncely.decode.avro_names import avro_name, is_large, large
from oncely.decode.schema import type_name


class Size(NamedTuple):
    """The size of a tree.

    Attributes:
        depth: nesting of types.
        fields: number of fields, at all levels.
        text: upper bound of the characters of the tree's Avro schema.
    """

    depth: int
    fields: int
    text: int


@dataclass(frozen=True, eq=False)
class Leaf:
    """A type without nested types; one object for each type, see :func:`leaf`."""

    arrow: pa.DataType
    words: str = ""
    size = Size(1, 0, 70)  # the longest text, that of a decimal, has 63

    def __str__(self) -> str:
        return self.words or type_name(self.arrow)


@dataclass(frozen=True, eq=False)
class ListOf:
    """A list; ``item`` is None if the type of the items is not known."""

    item: Tree | None

    def __str__(self) -> str:
        return "ARRAY"

    @cached_property
    def size(self) -> Size:
        """See :class:`Size`."""
        depth, fields, text = self.item.size if self.item else (0, 0, 0)
        return Size(1 + depth, fields, 40 + text)


@dataclass(frozen=True, eq=False)
class Struct:
    """An object; all columns together are a Struct, too.

    Attributes:
        fields: by name, in order.
        grown: during the processing of a record or a schema: the struct that this one extends, and
            the fields that are new or changed. The cost depends on the changes, not on the size.
    """

    fields: Mapping[str, Tree]
    grown: tuple[Struct, Mapping[str, Tree]] | None = None

    def __str__(self) -> str:
        return "STRUCT"

    @cached_property
    def size(self) -> Size:
        """See :class:`Size`."""
        return NOTHING.extended(self.fields).size if self.fields else Size(1, 0, 300)

    def extended(self, changed: Mapping[str, Tree]) -> Struct:
        """A copy with these fields added or replaced; the size follows from theirs."""
        new = Struct({**self.fields, **changed})
        depth, fields, text = self.size
        for name, field in changed.items():
            before = self.fields.get(name)
            size = field.size
            depth = max(depth, 1 + size.depth)
            fields += size.fields - before.size.fields if before else 1 + size.fields
            text += size.text - before.size.text if before else _named(name) + size.text
        vars(new)["size"] = Size(depth, fields, text)
        return new


Tree = Leaf | ListOf | Struct


def _named(name: str) -> int:
    return len(avro_name(name)) + 60


@lru_cache(maxsize=1024)
def leaf(arrow: pa.DataType) -> Leaf:
    """The leaf of a type; always the same object for the same type."""
    return _LEAVES.get(arrow) or Leaf(arrow)


BOOLEAN, INT, BIGINT = Leaf(pa.bool_()), Leaf(pa.int32()), Leaf(pa.int64())
FLOAT, DOUBLE, STRING = Leaf(pa.float32()), Leaf(pa.float64()), Leaf(pa.string())
LARGE = Leaf(pa.int64(), "BIGINT with numbers beyond 2^53")
"""A BIGINT column that has contained a number beyond 2^53. Not every such number equals a DOUBLE,
so this column never becomes a DOUBLE; any other BIGINT column may, and each of its numbers keeps
its value."""
_LEAVES = {each.arrow: each for each in (BOOLEAN, INT, BIGINT, FLOAT, DOUBLE, STRING)}
NOTHING = Struct({})


def tree_of(fields: Iterable[pa.Field]) -> Struct:
    """Columns or fields as a tree; those of type null are left out."""
    trees = ((field.name, _tree(field)) for field in fields)
    return Struct({name: tree for name, tree in trees if tree is not None})


def _tree(field: pa.Field) -> Tree | None:
    arrow = field.type
    if is_large(field):
        return LARGE
    if pa.types.is_struct(arrow):
        return tree_of(arrow)
    if pa.types.is_list(arrow):
        return ListOf(_tree(arrow.value_field))
    return None if pa.types.is_null(arrow) else leaf(arrow)


def schema_of(columns: Struct) -> pa.Schema:
    """The columns of a tree without unknown types, all of them nullable."""
    return pa.schema([_field(name, field) for name, field in columns.fields.items()])


def _field(name: str, tree: Tree | None) -> pa.Field:
    if tree is LARGE:
        return large(name)
    if isinstance(tree, Struct):
        return pa.field(name, pa.struct([_field(*each) for each in tree.fields.items()]))
    if isinstance(tree, ListOf):
        return pa.field(name, pa.list_(_field("item", tree.item)))
    return pa.field(name, pa.null() if tree is None else tree.arrow)


def settled(grown: Struct, known: Struct) -> tuple[Struct, list[str]]:
    """Leave out the types that are not known yet: empty arrays, objects without a known field.

    Args:
        grown: a tree that extends ``known``.
        known: a tree without unknown types.

    Returns:
        The tree, ``known`` itself if nothing was added; and the names of the new fields, at all
            levels.
    """
    names: list[str] = []
    found = _settled(grown, known, names)
    return found if isinstance(found, Struct) else known, names


def _settled(tree: Tree | None, known: Tree | None, names: list[str]) -> Tree | None:
    if tree is known or tree is None or isinstance(tree, Leaf):
        return tree
    if isinstance(tree, ListOf):
        item = _settled(tree.item, known.item if isinstance(known, ListOf) else None, names)
        if isinstance(known, ListOf) and item is known.item:
            return known
        return None if item is None else ListOf(item)
    base = known if isinstance(known, Struct) else NOTHING
    grown_from, changed = tree.grown or (None, tree.fields)
    kept: dict[str, Tree] = {}
    for name, field in (changed if grown_from is base else tree.fields).items():
        before = base.fields.get(name)
        after = _settled(field, before, names)
        if after is not None and after is not before:
            kept[name] = after
            if before is None:
                names.append(name)
    if kept:
        return base.extended(kept)
    return base if base.fields else None
