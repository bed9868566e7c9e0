"""Merging of two schemas, or of a schema and a record, into one schema.

=====================================  ===========================================
missing here, known there              known; the field is null if it is missing
INT, BIGINT, DOUBLE; FLOAT, DOUBLE     the wider one; FLOAT and a whole number: DOUBLE
BIGINT with numbers beyond 2^53        so is BIGINT then; DOUBLE and FLOAT: a :class:`Conflict`
two structs                            field by field, the first one's fields first
two lists                              their items' types merged
null, an empty list, an empty struct   not known yet: the type is the other one's
any other difference                   a :class:`Conflict`
=====================================  ===========================================

These are the steps that "Schema Resolution" of Avro 1.11 takes from the writer's schema to the
reader's, so what was written by either schema can be read by the merged one. Up to the order of
fields, merging is commutative and associative. A record merges by the same rules, but its numbers
may fit a column by their values; see :class:`oncely.decode.infer.InferringJson`.

The schema of JSON records so far is a tree, which is immutable; extending it creates a new tree
that shares the unchanged branches. Besides the types of columns there are two types that are not
known yet: an empty array and an empty object have items and fields of no type. A null has no type
at all: it is ``None`` in place of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.avro_schema import DEEPEST, avro_name
from oncely.decode.base import InvalidRecord
from oncely.decode.reference import (
    EXACT,
    MOST_DIGITS,
    Number,
    Whole,
    parse_object,
    quote,
    read_value,
    show,
)
from oncely.decode.schema import is_large, large, same_schema, type_name
from oncely.errors import InvariantViolation, check


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
class Scalar:
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


Tree = Scalar | ListOf | Struct


def _named(name: str) -> int:
    return len(avro_name(name)) + 60


@lru_cache(maxsize=1024)
def leaf(arrow: pa.DataType) -> Scalar:
    """The leaf of a type; always the same object for the same type."""
    return _LEAVES.get(arrow) or Scalar(arrow)


BOOLEAN, INT, BIGINT = Scalar(pa.bool_()), Scalar(pa.int32()), Scalar(pa.int64())
FLOAT, DOUBLE, STRING = Scalar(pa.float32()), Scalar(pa.float64()), Scalar(pa.string())
LARGE = Scalar(pa.int64(), "BIGINT with numbers beyond 2^53")
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
    if tree is known or tree is None or isinstance(tree, Scalar):
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


_NUMBERS = {INT, BIGINT, LARGE, FLOAT, DOUBLE}
_INFERRED = (STRING, BOOLEAN, BIGINT, LARGE, DOUBLE)
_NATURAL: Mapping[type, Scalar] = {str: STRING, bool: BOOLEAN, Number: DOUBLE}
_SHORT = 15  # digits; so many are below 2^53


class CannotMerge(Exception):
    """Two schemas, or a schema and a record, cannot be merged; the text contains the reason."""


class Conflict(CannotMerge):
    """A field has two types without a common type.

    Attributes:
        path: the field's path, names joined by points, ``[]`` for the items of a list.
        known: the type in the schema, as Spark's DDL.
        found: the other type.
    """

    def __init__(self, path: str, known: str, found: str) -> None:
        super().__init__(f"{path}: it is {known}, found {found}")
        self.path, self.known, self.found = path, known, found


class TooMuch(CannotMerge):
    """The merged schema is larger than :class:`Caps` allow."""


@dataclass(frozen=True)
class Caps:
    """The largest schema that records may produce.

    Attributes:
        fields: number of fields, at all levels.
        depth: nesting of types; a plain column is 1. At most 32.
        name: number of characters of a field's name.
        text: approximate number of characters of the Avro schema, which must fit into a Kafka
            message.
    """

    fields: int = 2_000
    depth: int = DEEPEST
    name: int = 255
    text: int = 700_000

    def settle(self, grown: Struct, known: Struct) -> Struct:
        """The tree that extends ``known``, without unknown types, if the caps allow it.

        Fields of ``known`` are not measured.

        Raises:
            TooMuch: it exceeds a cap, or has a new name that is too long.
        """
        columns, names = settled(grown, known)
        if columns is known:
            return known
        longest = max(names, key=len, default="")
        if len(longest) > self.name:
            raise TooMuch(
                f"a name has {len(longest)} characters, it may have {self.name}: {longest[:20]}…"
            )
        after, before = columns.size, known.size
        sizes = (
            ("{} fields", after.fields, self.fields, before.fields),
            ("a depth of {}", after.depth - 1, self.depth, before.depth - 1),
            ("{} characters of Avro", after.text, self.text, before.text),
        )
        for words, size, most, had in sizes:
            if size > max(most, had):
                raise TooMuch(f"the schema would have {words.format(size)}; it may have {most}")
        return columns


CAPS = Caps()
"""For the records of a pipeline."""

NO_CAPS = Caps(fields=1 << 62, name=1 << 62, text=1 << 62)
"""For schemas that were checked against the caps before, such as ``known``."""


def merge(known: pa.Schema, found: pa.Schema, caps: Caps = NO_CAPS) -> pa.Schema:
    """The schema to which both resolve, with the fields of ``known`` first.

    Types that are not known yet are left out. If ``found`` adds nothing, the result is ``known``
    itself.

    Raises:
        Conflict: there is no such schema.
        TooMuch: it would be larger than the caps allow.
    """
    if known is found:
        return known
    columns = tree_of(known)
    merged = caps.settle(_members(columns, tree_of(found).fields, ""), columns)
    return known if merged is columns else schema_of(merged)


class Grown(NamedTuple):
    """The outcome of a record.

    Attributes:
        columns: the columns after it; the same object if the record has added nothing.
        row: name to a value that ``pyarrow.array`` accepts; members of unknown type are left out.
        members: the record itself, with numbers as texts.
    """

    columns: Struct
    row: dict[str, Any]
    members: dict[str, Any]


def grow(known: Struct, data: bytes | None, caps: Caps) -> Grown:
    """Read one record by the rules of :class:`oncely.decode.infer.InferringJson`.

    Raises:
        InvalidRecord: it is no row, and the columns do not change.
    """
    members = parse_object(data)
    try:
        columns = caps.settle(_members(known, members, ""), known)
    except CannotMerge as error:
        raise InvalidRecord(str(error)) from None
    if not columns.fields:
        raise InvalidRecord("no member has a value to make a column of, and no column is known yet")
    return Grown(columns, _row(columns, members, ""), members)


def type_of(values: Sequence[Any], name: str) -> pa.DataType | None:
    """The type of a column that all of some values fit, by the same rules; None if none has a type.

    Args:
        values: members of objects that :func:`oncely.decode.reference.parse_object` returns.
        name: the column's name, for errors.

    Raises:
        Conflict, InvalidRecord: a value does not fit the type of the values before it.
    """
    tree: Tree | None = None
    for value in values:
        tree = _join(tree, value, name)
    columns, _ = settled(Struct({} if tree is None else {name: tree}), NOTHING)
    for value in values:
        _value(columns.fields.get(name), value, name)
    return schema_of(columns).field(name).type if columns.fields else None


def _members(known: Struct, found: Mapping[str, Any], path: str) -> Struct:
    """A struct extended by the fields of another struct, or by the members of an object."""
    changed: dict[str, Tree] = {}
    for name, value in found.items():
        if value is None:
            continue
        before = known.fields.get(name)
        after = _join(before, value, _step(path, name))
        if after is not None and after is not before:
            changed[name] = after
    return Struct({**known.fields, **changed}, (known, changed)) if changed else known


def _join(known: Tree | None, found: Any, path: str) -> Tree | None:
    """A tree merged with another tree, or with a value of a record.

    Raises:
        Conflict: they cannot be merged.
        InvalidRecord: the value does not fit its column.
    """
    if found is None or found is known:
        return known
    kind = type(found)
    natural = _NATURAL.get(kind)
    if natural is None:
        if kind is dict or kind is Struct:
            if known is None or isinstance(known, Struct):
                return _members(known or NOTHING, found if kind is dict else found.fields, path)
            raise Conflict(path, str(known), str(NOTHING))
        if kind is list or kind is ListOf:
            if known is None or isinstance(known, ListOf):
                return _items(known, found, path)
            raise Conflict(path, str(known), "ARRAY")
        natural = found if kind is Scalar else _whole(found)
    if known is None or known is natural:
        return natural
    if isinstance(known, Scalar):
        return _leaves(known, natural, None if kind is Scalar else found, path)
    raise Conflict(path, str(known), str(natural))


def _items(known: ListOf | None, found: ListOf | list[Any], path: str) -> ListOf:
    before = item = known.item if known else None
    if isinstance(found, ListOf):
        item = _join(item, found.item, f"{path}[]")
    else:
        for index, value in enumerate(found):
            item = _join(item, value, f"{path}[{index}]")
    return known if known and item is before else ListOf(item)


def _leaves(known: Scalar, natural: Scalar, value: Any, path: str) -> Scalar:
    """A leaf merged with another leaf; ``value`` is the record's, or None between schemas."""
    if natural in _NUMBERS:
        fits = value is not None and _fits(known, natural, value)
        wider = known if fits else wider_number(known, natural)
        if wider is not None:
            return wider
        if value is not None and known is DOUBLE:
            raise InvalidRecord(f"{path}: {show(value)} does not fit DOUBLE exactly")
    if value is not None and known not in _INFERRED:
        # A type of a hand-written schema, from before columns were inferred.
        read_value(known.arrow, value, path)
        return known
    raise Conflict(path, str(known), str(natural))


def _whole(value: Whole) -> Scalar:
    if len(value) <= _SHORT:
        return BIGINT
    number = _number(value)
    return BIGINT if number is not None and abs(number) <= EXACT else LARGE


def _number(value: Number) -> int | None:
    return int(value) if len(value) <= MOST_DIGITS else None


def wider_number(known: Scalar, found: Scalar) -> Scalar | None:
    """The narrowest number type that holds the numbers of both; None if there is none."""
    if known is found:
        return known
    pair = {known, found}
    if not pair <= _NUMBERS:
        return None
    if pair <= {INT, BIGINT, LARGE}:
        return LARGE if LARGE in pair else BIGINT
    return None if LARGE in pair else DOUBLE


def _fits(known: Scalar, natural: Scalar, value: Number) -> bool:
    """True if a number keeps its value in a column of a known type of numbers."""
    if natural is DOUBLE:
        return known in (FLOAT, DOUBLE)
    number = _number(value)
    if known is INT:
        return number is not None and -(1 << 31) <= number < 1 << 31
    if known not in (FLOAT, DOUBLE) or number is None:
        return False
    try:
        return int(np.float32(number) if known is FLOAT else float(number)) == number
    except OverflowError:
        return False


def _step(path: str, name: str) -> str:
    """The path of a field below ``path``: ``who.tags``, ``who."first name"``."""
    shown = name if name.isidentifier() else quote(name)
    return f"{path}.{shown}" if path else shown


def _row(columns: Struct, members: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The members that are columns, in the record's order: it may have few of many columns."""
    fields = columns.fields
    return {
        name: _value(fields[name], value, _step(path, name))
        for name, value in members.items()
        if value is not None and name in fields
    }


def _value(tree: Tree | None, value: Any, path: str) -> Any:
    if value is None or tree is None:
        return None
    if isinstance(tree, Struct):
        return _row(tree, value, path)
    if isinstance(tree, ListOf):
        return [_value(tree.item, item, f"{path}[{i}]") for i, item in enumerate(value)]
    return read_value(tree.arrow, value, path)


def widen(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The same rows with the columns of a schema to which theirs resolves.

    Fields that are missing are null, whole numbers become DOUBLE if the value is the same, and the
    order is the schema's, also in structs and lists.

    Raises:
        InvariantViolation: a column of the rows is not in ``schema``, cannot be converted to its
            type, or contains a number that is different as a DOUBLE.
    """
    if same_schema(rows.schema, schema):
        return rows
    batches = [
        pa.RecordBatch.from_arrays(
            _fields(dict(zip(batch.schema.names, batch.columns, strict=True)), schema, len(batch)),
            schema=schema,
        )
        for batch in rows.to_batches()
    ]
    return pa.Table.from_batches(batches, schema)


def _fields(known: Mapping[str, pa.Array], fields: Iterable[pa.Field], rows: int) -> list[pa.Array]:
    fields = list(fields)
    check(known.keys() <= {field.name for field in fields}, "a field would be lost")
    return [
        _widen(known[field.name], field.type) if field.name in known else pa.nulls(rows, field.type)
        for field in fields
    ]


def _widen(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    if values.type == arrow:
        return values
    if pa.types.is_struct(arrow) and pa.types.is_struct(values.type):
        # values.field, unlike values.flatten, keeps the members of a null struct.
        known = {field.name: values.field(i) for i, field in enumerate(values.type)}
        children = _fields(known, arrow, len(values))
        return pa.StructArray.from_arrays(children, fields=list(arrow), mask=values.is_null())
    if pa.types.is_list(arrow) and pa.types.is_list(values.type):
        # `values.offsets` with nulls is not used: offsets and validity are kept apart.
        first, last = values.offsets[0].as_py(), values.offsets[-1].as_py()
        items = _widen(values.values.slice(first, last - first), arrow.value_type)
        offsets = pc.subtract(values.offsets, first)
        return pa.ListArray.from_arrays(offsets, items, type=arrow, mask=values.is_null())
    wider = leaf(arrow)
    check(wider_number(leaf(values.type), wider) is wider, f"{values.type} can't become {arrow}")
    try:
        return pc.cast(values, arrow)
    except pa.ArrowInvalid as error:  # a whole number beyond 2^53
        raise InvariantViolation(f"{values.type} can't become {arrow}: {error}") from None
