"""The Avro schema of files, and column names as Avro names.

The bytes of a file come from polars, which encodes every field and every item of a list as a union
of null and its type, null first, whether or not the column may be null. The schema has the same
unions, so that it can be the header of those bytes.

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
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import pyarrow as pa

from oncely.decode.avro_schema import (
    BEYOND_DOUBLE,
    LARGE_FIELD,
    AvroSchema,
    Definition,
    NoSchema,
    to_arrow,
)
from oncely.decode.schema import SchemaKey, type_name
from oncely.errors import ConfigError, InvariantViolation, TableMismatch

_EMPTY = "_x_"
_ILLEGAL = re.compile(r"\A[0-9]|[^A-Za-z0-9_]|_(?=x[0-9A-F]{4,6}(?:_|[^A-Za-z0-9_]))")
"""The characters to escape: also an underscore that would begin an escape, at its own end or at the
next character's escape."""
_ESCAPE = re.compile(r"_x([0-9A-F]{4,6})_")
_LONGEST_NAME = 200  # characters of a record's name, with its namespace

_PLAIN: dict[pa.DataType, Any] = {
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
    if arrow in _PLAIN or _is_decimal(arrow):
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
        {"name": name, "type": ["null", _type(field, (*path, name))], "default": None}
        for field, name in ((field, avro_name(field.name)) for field in fields)
    ]
    return {"type": "record", **head, "fields": inside}


def _type(field: pa.Field, path: tuple[str, ...]) -> Any:
    arrow = field.type
    if is_large(field):
        return {"type": "long", BEYOND_DOUBLE: True}
    if arrow in _PLAIN:
        return _PLAIN[arrow]
    if _is_decimal(arrow):
        decimal = {"precision": arrow.precision, "scale": arrow.scale}
        return {"type": "bytes", "logicalType": "decimal", **decimal}
    if pa.types.is_list(arrow):
        return {"type": "array", "items": ["null", _type(arrow.value_field, path)]}
    if pa.types.is_struct(arrow) and arrow.num_fields:
        return _record(arrow, path, _record_name(path))
    raise InvariantViolation(f"{'.'.join(path[1:])}: {arrow} is not a type of files")


def is_large(field: pa.Field) -> bool:
    """True if a BIGINT column has contained numbers beyond 2^53, according to its metadata."""
    return bool(field.metadata) and BEYOND_DOUBLE.encode() in field.metadata


def large(name: str) -> pa.Field:
    """A BIGINT column that has contained numbers beyond 2^53."""
    return pa.field(name, pa.int64(), metadata=LARGE_FIELD)


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
