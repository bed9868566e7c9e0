"""Avro schemas: parsed, inspected, and turned into Arrow columns.

| Avro                                            | Arrow                                     |
|-------------------------------------------------|-------------------------------------------|
| boolean, int, long, float, double, string       | bool, int32, int64, float, double, string |
| bytes, fixed                                    | binary                                    |
| enum                                            | string                                    |
| array, map, record                              | list, map<string, ...>, struct            |
| union of null and one type                      | that type; NOT NULL without null          |
| date                                            | date32                                    |
| time-millis, time-micros                        | time64(us)                                |
| timestamp-millis, -micros, -nanos               | timestamp(us, UTC)                        |
| local-timestamp-millis, -micros, -nanos         | timestamp(us)                             |
| decimal(p, s), p up to 38                       | decimal128(p, s)                          |
| uuid                                            | string                                    |

Nanoseconds are truncated to microseconds. Other logical types are treated as their underlying type,
as the specification (Avro 1.11, "Logical Types") requires. A union of several types, a recursive
type, a record without fields and ``null`` alone have no column: a ConfigError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import fastavro.schema
import pyarrow as pa

from oncely.errors import ConfigError

_SCALES = {"millis": 1000, "micros": 1, "nanos": -1000}
UNITS = {
    "time-millis": 1000,
    "time-micros": 1,
    **{f"timestamp-{unit}": scale for unit, scale in _SCALES.items()},
    **{f"local-timestamp-{unit}": scale for unit, scale in _SCALES.items()},
}
"""Logical types of time: microseconds per unit, or minus the number of units per microsecond."""
_LOGICAL: dict[tuple[str, str], pa.DataType] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time64("us"),
    ("long", "time-micros"): pa.time64("us"),
    **{("long", f"timestamp-{unit}"): pa.timestamp("us", tz="UTC") for unit in _SCALES},
    **{("long", f"local-timestamp-{unit}"): pa.timestamp("us") for unit in _SCALES},
    ("string", "uuid"): pa.string(),
    ("fixed", "uuid"): pa.string(),
}
_PLAIN: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "enum": pa.string(),
}
_MOST_DIGITS = 38
DEEPEST = 32
"""Maximum nesting of types."""
MOST_TYPES = 16_384
"""Maximum number of types in a schema; a named type counts wherever it becomes a column."""
_RESERVED = {*_PLAIN, "null", "record", "error", "array", "map"}


class Definition(NamedTuple):
    """A schema as text, and before it the schemas of the types that it refers to, in order of
    dependency."""

    text: str
    references: tuple[str, ...] = ()


BEYOND_DOUBLE = "oncely.beyond_double"
"""An attribute of ``long``, and a key in the metadata of the Arrow field: the column has held
numbers beyond 2^53 (see :data:`oncely.decode.merging.LARGE`)."""
LARGE_FIELD = {BEYOND_DOUBLE: "true"}
"""The metadata of such an Arrow field."""


class NoSchema(Exception):
    """A text is not an Avro schema; the message contains the reason."""


@dataclass(frozen=True)
class AvroSchema:
    """A parsed schema: names are full, and looked up in ``names``. A walk through it is bounded by
    MOST_TYPES; each begins with a copy."""

    root: Any
    names: dict[str, Any]
    _visits: Iterator[int] = field(default_factory=count, init=False, repr=False, compare=False)

    @classmethod
    def parse(cls, definition: Definition) -> AvroSchema:
        """Parse the texts.

        Raises:
            NoSchema: one of them is no JSON or no Avro schema.
        """
        names: dict[str, Any] = {}
        root: Any = None
        for text in (*definition.references, definition.text):
            try:
                root = fastavro.schema.parse_schema(json.loads(text), names, _write_hint=False)
            except RecursionError:
                raise NoSchema("it is nested too deeply") from None
            except Exception as error:  # the parser assumes valid input
                raise NoSchema(f"{type(error).__name__}: {str(error)[:300]}") from None
        for name, named in names.items():
            if name in _RESERVED:
                raise NoSchema(f"{name} can't be the name of a type")
            size = named.get("size")
            if named["type"] == "fixed" and (type(size) is not int or size < 0):
                raise NoSchema(f"{name} has no valid size")
        return cls(root, names)

    def node(self, schema: Any) -> Node:
        """One schema as a node: resolve its name, and unwrap ``{"type": {...}}``.

        Raises:
            NoSchema: the walk has visited MOST_TYPES types.
        """
        if next(self._visits) >= MOST_TYPES:
            raise NoSchema(f"it has more than {MOST_TYPES:,} types, some of them by reference")
        attributes: dict[str, Any] = {}
        while True:
            if isinstance(schema, list):
                return Node("union", {"members": schema})
            if isinstance(schema, dict):
                attributes = {**schema, **attributes}
                if isinstance(schema["type"], str) and schema["type"] not in self.names:
                    kind = "record" if schema["type"] == "error" else schema["type"]
                    return Node(kind, attributes | {"type": kind})
                schema = schema["type"]
            elif schema in self.names:
                schema = self.names[schema]
            else:
                return Node(schema, attributes)

    def nullable(self, schema: Any) -> tuple[Node, bool]:
        """The type of a union with null, or of any other schema, and True if null is allowed.

        Raises:
            NoSchema: the union has several types, or none.
        """
        node = self.node(schema)
        if node.kind != "union":
            return node, False
        members = [self.node(member) for member in node.attributes["members"]]
        others = [member for member in members if member.kind != "null"]
        if len(others) != 1:
            kinds = ", ".join(member.kind for member in members)
            raise NoSchema(f"a union of {kinds} has no column")
        return others[0], len(others) < len(members)


@dataclass(frozen=True)
class Node:
    """One type of a schema.

    Attributes:
        kind: Avro's name of the type, ``union`` for a list.
        attributes: the members of its JSON object; of a union, ``members``.
    """

    kind: str
    attributes: dict[str, Any]

    @property
    def logical(self) -> str:
        """The logical type that is valid on this type, or an empty text."""
        name = self.attributes.get("logicalType")
        if name == "decimal" and self.kind in ("bytes", "fixed"):
            digits, scale = self.attributes.get("precision"), self.attributes.get("scale", 0)
            if isinstance(digits, int) and isinstance(scale, int):
                return name if digits > 0 and 0 <= scale <= digits else ""
            return ""
        if not isinstance(name, str) or (self.kind, name) not in _LOGICAL:
            return ""
        return name if self.kind != "fixed" or self.attributes["size"] == 16 else ""

    @property
    def name(self) -> str:
        """The full name of a record, enum or fixed."""
        return str(self.attributes["name"])


def to_arrow(schema: AvroSchema, *, key: str) -> pa.Schema:
    """The columns of a record.

    Raises:
        ConfigError: it is no record, or a type has no column; ``key`` names the setting.
    """
    schema = replace(schema)
    try:
        top, nullable = schema.nullable(schema.root)
        if top.kind != "record":
            raise NoSchema(f"it is no record but {top.kind}")
        if nullable:
            raise NoSchema("a union of null and a record is no table")
        return pa.schema(list(_struct(schema, top, ())))
    except NoSchema as error:
        raise ConfigError(
            key,
            f"this Avro schema can't become columns: {error}",
            way_out="give a reader schema (.avsc) with the required fields; fields that it "
            "leaves out are skipped",
        ) from None


def _field(schema: AvroSchema, name: str, of: Any, inside: tuple[str, ...]) -> pa.Field:
    try:
        node, nullable = schema.nullable(of)
        large = node.kind == "long" and node.attributes.get(BEYOND_DOUBLE) is True
        return pa.field(name, _type(schema, node, inside), nullable, LARGE_FIELD if large else None)
    except NoSchema as error:
        raise NoSchema(f"{name}: {error}") from None


def _type(schema: AvroSchema, node: Node, inside: tuple[str, ...]) -> pa.DataType:
    if node.kind in _PLAIN:
        logical = _logical(node)
        return _PLAIN[node.kind] if logical is None else logical
    if len(inside) > DEEPEST:
        raise NoSchema(f"it is nested more than {DEEPEST} deep")
    if node.kind == "record":
        return _struct(schema, node, inside)
    if node.kind == "array":
        return pa.list_(_field(schema, "item", node.attributes["items"], (*inside, "")))
    if node.kind == "map":
        value = _field(schema, "value", node.attributes["values"], (*inside, ""))
        return pa.map_(pa.string(), value)
    raise NoSchema(f"{node.kind} alone has no column")


def _struct(schema: AvroSchema, node: Node, inside: tuple[str, ...]) -> pa.StructType:
    if node.name in inside:
        raise NoSchema(f"{node.name} is recursive")
    fields = node.attributes["fields"]
    if not fields:
        raise NoSchema(f"{node.name} has no fields")
    inside = (*inside, node.name)
    return pa.struct([_field(schema, each["name"], each["type"], inside) for each in fields])


def _logical(node: Node) -> pa.DataType | None:
    if node.logical != "decimal":
        return _LOGICAL.get((node.kind, node.logical))
    digits, scale = node.attributes["precision"], node.attributes.get("scale", 0)
    if digits > _MOST_DIGITS:
        raise NoSchema(f"a decimal of {digits} digits; columns hold up to {_MOST_DIGITS}")
    return pa.decimal128(digits, scale)
