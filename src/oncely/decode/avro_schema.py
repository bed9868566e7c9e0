"""Avro schemas to Arrow columns, and Arrow columns to the Avro schemas of files.

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

The bytes of an Avro file come from polars, which encodes every field and every item of a list as a
union of null and its type, null first, whether or not the column may be null. The schema of files
has the same unions, so that it can be the header of those bytes.

| Arrow                              | Avro                                                    |
|------------------------------------|---------------------------------------------------------|
| bool, int32, int64, float, double  | boolean, int, long, float, double                       |
| string, binary                     | string, bytes                                           |
| date32                             | int, date                                               |
| timestamp(us, UTC), timestamp(us)  | long, timestamp-micros; long, local-timestamp-micros    |
| decimal128(p, s)                   | bytes, decimal(p, s)                                    |
| list, struct                       | array, record                                           |

:func:`storable` converts other types to these, if the conversion loses nothing.

Avro's names are ``[A-Za-z_][A-Za-z0-9_]*`` (Avro 1.11, "Names"); JSON's names may be any text. A
character that is not allowed becomes ``_xHHHH_``, its code point in four to six upper-case hex
digits, as Excel and .NET's ``XmlConvert`` write names; different names stay different.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import fastavro.schema
import pyarrow as pa

from oncely.decode.schema import BEYOND_DOUBLE, LARGE_FIELD, SchemaKey, is_large, type_name
from oncely.errors import ConfigError, InvariantViolation, TableMismatch

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


_EMPTY = "_x_"
_ILLEGAL = re.compile(r"\A[0-9]|[^A-Za-z0-9_]|_(?=x[0-9A-F]{4,6}(?:_|[^A-Za-z0-9_]))")
"""The characters to escape: also an underscore that would begin an escape, at its own end or at the
next character's escape."""
_ESCAPE = re.compile(r"_x([0-9A-F]{4,6})_")
_LONGEST_NAME = 200  # characters of a record's name, with its namespace

_AVRO_PLAIN: dict[pa.DataType, Any] = {
    pa.bool_(): "boolean",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.timestamp("us", "UTC"): {"type": "long", "logicalType": "timestamp-micros"},
    pa.timestamp("us"): {"type": "long", "logicalType": "local-timestamp-micros"},
}
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_WIDER: dict[pa.DataType, pa.DataType] = {
    pa.int8(): pa.int32(),
    pa.int16(): pa.int32(),
    pa.uint8(): pa.int32(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
}


def avro_name(name: str) -> str:
    """The Avro name of a column or field; :func:`column_name` is the inverse."""
    if name in ("", _EMPTY):
        return "_x005F_x_" if name else _EMPTY
    return _ILLEGAL.sub(lambda found: f"_x{ord(found[0]):04X}_", name)


def column_name(name: str) -> str:
    """The column or field of an Avro name."""
    return "" if name == _EMPTY else _ESCAPE.sub(_unescaped, name)


def _unescaped(found: re.Match[str]) -> str:
    code = int(found[1], 16)
    # avro_name never writes a code point that no text contains: then it is no escape.
    is_text = code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
    return chr(code) if is_text else found[0]


def storable(schema: pa.Schema) -> pa.Schema:
    """The columns of a file: types that Avro has, everything nullable.

    ==========================  =======================================
    int8, int16, uint8, uint16  int32
    uint32                      int64
    float16                     float
    timestamp(s, ms)            timestamp(us), with any zone as UTC
    large and view types        string, binary, list
    dictionary<..., T>          T
    map<K, V>                   list<struct<key: K, value: V>>
    ==========================  =======================================

    Raises:
        TableMismatch: a column has none of these types, or is a struct without fields, or is null.
    """
    return pa.schema([pa.field(f.name, _storable(f.type, f.name)) for f in schema])


def _storable(arrow: pa.DataType, path: str) -> pa.DataType:
    arrow = _WIDER.get(arrow, arrow)
    if arrow in _AVRO_PLAIN or _is_decimal(arrow):
        return arrow
    if pa.types.is_timestamp(arrow) and arrow.unit != "ns":
        return pa.timestamp("us", arrow.tz and "UTC")
    if pa.types.is_dictionary(arrow):
        return _storable(arrow.value_type, path)
    if any(is_kind(arrow) for is_kind in _LISTS):
        return pa.list_(_storable(arrow.value_type, f"{path}[]"))
    if pa.types.is_map(arrow):
        key = _storable(arrow.key_type, f"{path}.key")
        return pa.list_(
            pa.struct({"key": key, "value": _storable(arrow.item_type, f"{path}.value")})
        )
    if pa.types.is_struct(arrow) and arrow.num_fields:
        return pa.struct({f.name: _storable(f.type, f"{path}.{f.name}") for f in arrow})
    raise TableMismatch(
        f"column {path!r}: {type_name(arrow)} can't be stored in a file",
        way_out="cast it in the transform, for example to VARCHAR, BIGINT or TIMESTAMP, or "
        "leave it out",
    )


def _is_decimal(arrow: pa.DataType) -> bool:
    # Avro: the scale is between zero and the precision.
    return bool(pa.types.is_decimal128(arrow) and 0 <= arrow.scale <= arrow.precision)


def avro_schema_of(schema: pa.Schema) -> str:
    """The Avro schema of columns that are :func:`storable`, as JSON; the same text each time.

    Every field is a union of null and its type with null as its default, so that a reader with more
    fields than a file can read it. The record of the field ``a.b`` is called ``b_record`` in the
    namespace ``Record.a``: Avro resolves records by name, so a name must not change when other
    fields are added.

    Raises:
        InvariantViolation: a column is not storable as it is.
    """
    return _avro_schema_of(SchemaKey(schema))


@lru_cache(maxsize=4096)
def _avro_schema_of(key: SchemaKey) -> str:
    record = _record(key.schema, ("Record",), {"name": "Record"})
    return json.dumps(record, separators=(",", ":"))


def _record(
    fields: Iterable[pa.Field], path: tuple[str, ...], head: dict[str, str]
) -> dict[str, Any]:
    inside = [
        {"name": name, "type": ["null", _avro_type(field, (*path, name))], "default": None}
        for field, name in ((field, avro_name(field.name)) for field in fields)
    ]
    return {"type": "record", **head, "fields": inside}


def _avro_type(field: pa.Field, path: tuple[str, ...]) -> Any:
    arrow = field.type
    if is_large(field):
        return {"type": "long", BEYOND_DOUBLE: True}
    if arrow in _AVRO_PLAIN:
        return _AVRO_PLAIN[arrow]
    if _is_decimal(arrow):
        decimal = {"precision": arrow.precision, "scale": arrow.scale}
        return {"type": "bytes", "logicalType": "decimal", **decimal}
    if pa.types.is_list(arrow):
        return {"type": "array", "items": ["null", _avro_type(arrow.value_field, path)]}
    if pa.types.is_struct(arrow) and arrow.num_fields:
        return _record(arrow, path, _record_name(path))
    raise InvariantViolation(f"{'.'.join(path[1:])}: {arrow} is not a type of files")


def _record_name(path: tuple[str, ...]) -> dict[str, str]:
    """The name of a nested record, unique in the schema and different from the names of Avro's
    types.

    A field has at most one record directly below it, so its path is a unique name. A long path is
    hashed, or names inside names would let the schema grow quadratically.
    """
    *space, last = path
    if sum(map(len, path)) + len(path) <= _LONGEST_NAME:
        return {"name": f"{last}_record", "namespace": ".".join(space)}
    digest = hashlib.sha256(".".join(path).encode()).hexdigest()
    return {"name": f"record_{digest}", "namespace": path[0]}


def schema_id(avro: str) -> str:
    """The id of a schema: the first 16 hex digits of its text's SHA-256."""
    return hashlib.sha256(avro.encode()).hexdigest()[:16]


@lru_cache(maxsize=4096)
def arrow_schema_of(avro: str) -> pa.Schema:
    """The columns of a schema that :func:`avro_schema_of` wrote.

    Raises:
        InvariantViolation: it is no Avro schema, or it has no columns.
    """
    try:
        found = to_arrow(AvroSchema.parse(Definition(avro)), key="schema")
    except (NoSchema, ConfigError) as error:
        raise InvariantViolation(f"this is no schema of a file: {error}") from None
    return pa.schema([_named(field) for field in found])


def _named(field: pa.Field) -> pa.Field:
    name = column_name(field.name)
    return pa.field(name, _with_names(field.type), field.nullable, field.metadata)


def _with_names(arrow: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(arrow):
        return pa.struct([_named(field) for field in arrow])
    if pa.types.is_list(arrow):
        item = arrow.value_field
        return pa.list_(item.with_type(_with_names(item.type)))
    return arrow
