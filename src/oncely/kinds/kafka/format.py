"""The conversion of rows to records: the column of the key, the encoding of the value, also as
JSON, the topic.

Static problems are refused before a pipeline runs; problems of single rows (a missing topic, a size
above the topic's limit) are rejects.

As JSON, a row is an object (RFC 8259), one text, UTF-8, without spaces:

| Arrow                                   | JSON |
|-----------------------------------------|---|
| null value of any type                  | null |
| bool; all integers                      | true, false; number, all digits |
| float, double                           | number; "NaN", "Infinity", "-Infinity" as texts |
| decimal                                 | text, or a number, with all digits of its scale |
| string, and dictionaries of strings     | text |
| binary, fixed-size binary               | text, base64 (RFC 4648, with padding) |
| date                                    | text, 2024-01-31 |
| time                                    | text, 23:59:59.123456, with its unit's digits |
| timestamp with a zone                   | text, RFC 3339 in UTC: 2024-01-31T23:59:59.123456Z |
| timestamp without                       | the same without the Z |
| list of any kind; struct                | array; object |
| map with text keys                      | object; the last value of a repeated key |

Times outside of the years 1 to 9999, or of a day, are refused with their record.

All other types (durations, intervals, unions, maps with other keys) have no unique representation
in JSON, and are refused before a run.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import fastavro
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from fastavro.validation import ValidationError

from oncely.core.digest import Kind, Recipe
from oncely.decode.times import require_text
from oncely.errors import TableMismatch, check
from oncely.extras import native

_RAW = (
    pt.is_binary,
    pt.is_large_binary,
    pt.is_fixed_size_binary,
    pt.is_string,
    pt.is_large_string,
)

CONTENT = Recipe.of({"key": Kind("raw"), "value": Kind("raw")}, offset=False)
"""The content of a record in digests."""

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_SHOWN = 60  # characters
_INTERNAL = frozenset(
    {
        "__cluster_metadata", "__consumer_offsets", "__remote_log_metadata",
        "__share_group_state", "__transaction_state",
    }
)  # fmt: skip

SOURCE_HEADER = "oncely.source"
"""The header of ``keep_source``: topic, partition and offset of the source's record, as a JSON
array."""


@dataclass(frozen=True)
class RawValue:
    """The value is one column's bytes, or its text in UTF-8; a null is a tombstone."""

    column: str


@dataclass(frozen=True)
class RecordFormat:
    """The contents of a record.

    Attributes:
        schema: the rows' columns.
        value: ``"json"``: an object of all columns except those below; Avro; or a column.
        topic: the topic of every record; None with ``topic_column``.
        topic_column: a text column that names each record's topic.
        key: the key's column: bytes, a text (UTF-8), a whole number or a bool (as JSON writes it);
            None: records without a key.
        keep_source: add the header :data:`SOURCE_HEADER` with the origin of each record.
        decimals: the form of decimals in JSON.
        source_timestamp: keep the timestamp of the source's record; else it is that of the write.
        own_topics: the topics of the pipeline's own state, to which no row may go.
    """

    schema: pa.Schema
    value: Literal["json"] | AvroValue | RawValue = "json"
    topic: str | None = None
    topic_column: str | None = None
    key: str | None = None
    keep_source: bool = False
    decimals: Decimals = "text"
    source_timestamp: bool = False
    own_topics: frozenset[str] = frozenset()

    @property
    def target(self) -> str:
        """The destination, as stored in the ledger."""
        return self.topic if self.topic is not None else f"column {self.topic_column}"

    @property
    def value_columns(self) -> list[str]:
        """The columns of a JSON or Avro value; it includes the key."""
        return [n for n in self.schema.names if n != self.topic_column]

    @property
    def recipe(self) -> Recipe:
        """Of its digest: the content, its topic if that is a column's, and its origin."""
        named = {} if self.topic_column is None else {"topic": Kind("text")}
        return Recipe.of(dict(CONTENT.columns) | named, offset=self.keep_source)

    def bind(self) -> None:
        """Refuse columns that cannot be written.

        Raises:
            TableMismatch: a column is missing or has an unsupported type.
        """
        if (self.topic is None) == (self.topic_column is None):
            raise TableMismatch("one of topic and topic_column, and not both", key="sink")
        self._column("topic_column", self.topic_column, (pt.is_string, pt.is_large_string))
        self._column("key", self.key, (*_RAW, pt.is_integer, pt.is_boolean))
        if isinstance(self.value, RawValue):
            self._column("value", self.value.column, _RAW)
            return
        columns = pa.schema([self.schema.field(name) for name in self.value_columns])
        if isinstance(self.value, AvroValue):
            self.value.bind(columns)
        elif misfits := unfit(columns):
            name, reason = next(iter(misfits.items()))
            raise TableMismatch(
                f"column {name!r} can't be written as JSON: {reason}",
                key="sink.value",
                way_out="cast it in the transform, or leave it out",
            )

    def values(self, rows: pa.Table) -> pa.LargeBinaryArray:
        """The value of each row."""
        if isinstance(self.value, RawValue):
            return as_bytes(rows.column(self.value.column))
        shown = rows.select(self.value_columns)
        if isinstance(self.value, AvroValue):
            return pa.array(self.value.encoded(shown), pa.large_binary())
        return encoded(shown, self.decimals)

    def keys(self, rows: pa.Table) -> pa.LargeBinaryArray:
        """The key of each row, or of each deleted key."""
        if self.key is None:
            return pa.nulls(rows.num_rows, pa.large_binary())
        return as_bytes(rows.column(self.key))

    def topics(self, rows: pa.Table) -> list[str | None]:
        """The topic of each row; None if the column is null."""
        if self.topic_column is None:
            return [self.topic] * rows.num_rows
        found: list[str | None] = rows.column(self.topic_column).to_pylist()
        return found

    def refused_topic(self, name: str | None) -> str:
        """The reason for which ``topic_column`` may not name this topic; empty if it may."""
        if not name:
            return f"sink.topic_column is {'null' if name is None else 'empty'}"
        if not _TOPIC.fullmatch(name) or name in (".", ".."):
            return f"sink.topic_column is not the name of a topic: {name[:_SHOWN]!r}"
        if name in _INTERNAL or name in self.own_topics:
            whose = "Kafka" if name in _INTERNAL else "the pipeline"
            return f"sink.topic_column names {name}, a topic of {whose} itself"
        return ""

    def _column(self, setting: str, name: str | None, kinds: Any) -> None:
        if name is None:
            return
        if self.schema.names.count(name) != 1:
            raise TableMismatch(
                f"the rows have no column {name!r}",
                key=f"sink.{setting}",
                way_out=f"they have: {', '.join(self.schema.names)}",
            )
        type_ = self.schema.field(name).type
        if not any(kind(type_) for kind in kinds):
            raise TableMismatch(
                f"column {name!r} is {type_}",
                key=f"sink.{setting}",
                way_out="cast it in the transform",
            )


def as_bytes(column: pa.ChunkedArray) -> pa.LargeBinaryArray:
    """Bytes unchanged, texts in UTF-8, numbers and bools as JSON writes them."""
    if not any(kind(column.type) for kind in _RAW):
        column = column.cast(pa.string())
    elif pt.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    # Cast to a type with wider offsets first: then the parts fit together at any size.
    parts = column.cast(pa.large_binary()).chunks
    return parts[0] if len(parts) == 1 else pa.concat_arrays([_NONE, *parts])


def header_lists(column: pa.ChunkedArray) -> list[list[tuple[str, bytes | None]]]:
    """Headers in the form of Spark's source, in order; a name may repeat."""
    return [[(one["key"], one["value"]) for one in of or ()] for of in column.to_pylist()]


# -- values in Avro ------------------------------------------------------------------------


_MAGIC = b"\0"


@dataclass(frozen=True)
class AvroValue:
    """The value is an Avro record (1.11).

    Attributes:
        schema: the writer's schema, as JSON; a record with a field for each column.
        schema_id: its id in a registry, for Confluent's framing (a zero byte and the id in four
            bytes before the data); None: the data alone.
    """

    schema: str
    schema_id: int | None = None

    def bind(self, columns: pa.Schema) -> None:
        """Compare the columns with the schema's fields.

        Raises:
            TableMismatch: it is not a record, or fields and columns differ.
        """
        try:
            parsed = json.loads(self.schema)
            _parsed(self.schema)
        except (ValueError, KeyError, TypeError, fastavro.schema.SchemaParseException) as error:
            raise TableMismatch(f"not an Avro schema: {error!r}", key="sink.value") from None
        if not isinstance(parsed, dict) or parsed.get("type") != "record":
            raise TableMismatch("the Avro schema is not a record", key="sink.value")
        fields = {f["name"] for f in parsed["fields"]}
        if extra := sorted(set(columns.names) - fields):
            raise TableMismatch(f"the Avro schema has no field for {extra}", key="sink.value")
        bare = {f["name"] for f in parsed["fields"] if "default" not in f}
        if missing := sorted(bare - set(columns.names)):
            raise TableMismatch(f"no column for the Avro fields {missing}", key="sink.value")

    def encoded(self, rows: pa.Table) -> list[bytes]:
        """One record for each row.

        Raises:
            ValueError, TypeError: a value that does not fit the schema.
        """
        parsed = _parsed(self.schema)
        head = b"" if self.schema_id is None else _MAGIC + self.schema_id.to_bytes(4, "big")
        done = []
        for row in rows.to_pylist():
            buffer = io.BytesIO()
            buffer.write(head)
            # The writer alone would write a number of any size into an int.
            try:
                fastavro.validate(row, parsed, raise_errors=True)
            except ValidationError as error:
                raise ValueError(" ".join(str(error).split())) from None
            fastavro.schemaless_writer(buffer, parsed, row, strict_allow_default=True)
            done.append(buffer.getvalue())
        return done


@lru_cache(maxsize=16)
def _parsed(schema: str) -> Any:
    return fastavro.parse_schema(json.loads(schema))


# -- values in JSON -------------------------------------------------------------------------

Decimals = Literal["text", "number"]
_ENCODERS: dict[Decimals, Callable[[Any], bytes]] = {
    "text": msgspec.json.Encoder(decimal_format="string").encode_lines,
    "number": msgspec.json.Encoder(decimal_format="number").encode_lines,
}
_NONE = pa.nulls(0, pa.large_binary())
_LINE_FEED = 10
_ROWS = 20_000  # rows at a time: twice as fast as 100,000, in the processor's cache
_SPECIAL = {math.inf: "Infinity", -math.inf: "-Infinity"}
_TEMPORAL = (pt.is_date, pt.is_time, pt.is_timestamp)
_PLAIN = (pt.is_null, pt.is_boolean, pt.is_integer, pt.is_floating, pt.is_decimal)
_TEXTS = (pt.is_string, pt.is_large_string, pt.is_string_view)
_SIMPLE = (
    pt.is_boolean, pt.is_integer, pt.is_float32, pt.is_float64, pt.is_string, pt.is_large_string,
    *_TEMPORAL,
)  # fmt: skip
"""Types of which oncely-native writes the values; those of time as texts."""
_BYTES = (pt.is_binary, pt.is_large_binary, pt.is_fixed_size_binary, pt.is_binary_view)
_LISTS = (pt.is_list, pt.is_large_list, pt.is_fixed_size_list)


def unfit(schema: pa.Schema) -> dict[str, str]:
    """Columns without a JSON representation, with the reason."""
    found = {f.name: reason for f in schema if (reason := _unfit(f.type))}
    return found | {
        name: "two columns have this name" for name in schema.names if schema.names.count(name) > 1
    }


def encoded(rows: pa.Table, decimals: Decimals = "text") -> pa.LargeBinaryArray:
    """One JSON object for each row; fields in the columns' order.

    Args:
        rows: columns that :func:`unfit` does not name.
        decimals: the form of decimals, nested ones included.
    """
    found = _native(rows)
    if found is None:
        ats = range(0, rows.num_rows, _ROWS)
        found = [_part(rows.slice(at, _ROWS), decimals) for at in ats]
    return found[0] if len(found) == 1 else pa.concat_arrays([_NONE, *found])


def _native(rows: pa.Table) -> list[pa.LargeBinaryArray] | None:
    """By oncely-native; None: it is not there, or does not write a column."""
    module = native()
    if module is None or not len(rows.schema) or not all(_is(f.type, _SIMPLE) for f in rows.schema):
        return None
    texts = [
        pa.chunked_array([_temporal(part) for part in column.chunks], pa.string())
        if _is(column.type, _TEMPORAL)
        else column
        for column in rows.columns
    ]
    shown = pa.table(texts, names=rows.column_names).combine_chunks()
    return [pa.record_batch(module.json_objects(one))["value"] for one in shown.to_batches()]


def _part(rows: pa.Table, decimals: Decimals) -> pa.LargeBinaryArray:
    columns = [values(column) for column in rows.columns]
    make = _maker(tuple(rows.column_names))
    return _lines(_ENCODERS[decimals](list(map(make, *columns))), rows.num_rows)


def _lines(text: bytes, number: int) -> pa.LargeBinaryArray:
    """The lines of a text, without their ends; in JSON a line feed is never part of a value."""
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == _LINE_FEED)
    check(len(ends) == number, "rows and lines of JSON are not as many")
    # Values of an array are contiguous: the line feeds must be removed.
    packed = text.translate(None, b"\n")
    bounds = np.zeros(number + 1, np.int64)
    bounds[1:] = ends - np.arange(number)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), number, [None, pa.py_buffer(bounds), pa.py_buffer(packed)]
    )


@lru_cache(maxsize=16)
def _maker(names: tuple[str, ...]) -> Callable[..., Any]:
    """The constructor of an object to encode: a class with these names is faster than a dict."""
    fields = [f"f{at}" for at in range(len(names))]
    try:
        return msgspec.defstruct(
            "Row", fields, rename=dict(zip(fields, names, strict=True)), gc=False
        )
    except ValueError:  # a name that must be escaped
        return lambda *row: dict(zip(names, row, strict=True))


def values(array: Any) -> list[Any]:
    """The array as values that msgspec writes in the form above."""
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    type_ = array.type
    if pt.is_dictionary(type_):
        return values(array.dictionary_decode())
    if _is(type_, _TEMPORAL):
        texts: list[Any] = _temporal(array).to_pylist()
        return texts
    if pt.is_floating(type_):
        return [_number(one) for one in array.to_pylist()] if _special(array) else array.to_pylist()
    if pt.is_struct(type_):
        return _structs(array)
    if pt.is_map(type_) or _is(type_, _LISTS):
        return _lists(array)
    found: list[Any] = array.to_pylist()
    return found


def _is(type_: pa.DataType, kinds: Iterable[Callable[[pa.DataType], bool]]) -> bool:
    return any(kind(type_) for kind in kinds)


def _unfit(type_: pa.DataType) -> str:
    if pt.is_dictionary(type_):
        return _unfit(type_.value_type)
    if _is(type_, (*_PLAIN, *_TEXTS, *_BYTES, *_TEMPORAL)):
        return ""
    if _is(type_, _LISTS):
        return _unfit(type_.value_type)
    if pt.is_struct(type_):
        names = [f.name for f in type_]
        if len(set(names)) < len(names):
            return f"{type_} has two fields of one name"
        return next((reason for f in type_ if (reason := _unfit(f.type))), "")
    if pt.is_map(type_):
        if not _is(type_.key_type, _TEXTS):
            return f"the keys of {type_} are no texts"
        return _unfit(type_.item_type)
    return f"{type_} has no one meaning in JSON"


def _special(array: Any) -> bool:
    return not pc.all(pc.is_finite(array.cast(pa.float64()))).as_py() and len(array) > 0


def _number(one: float | None) -> float | str | None:
    if one is None or math.isfinite(one):
        return one
    return _SPECIAL.get(one, "NaN")


def _temporal(array: Any) -> pa.StringArray:
    """Dates, times and timestamps as texts in the form above.

    Raises:
        ValueError: one has no such text.
    """
    require_text(array)
    type_ = array.type
    if pt.is_date(type_):
        return array.cast(pa.date32()).cast(pa.string())
    if pt.is_time(type_):
        return array.cast(pa.string())
    zone = type_.tz is not None
    # Remove the zone first: Arrow would write the zone's own digits, and a date with a space.
    plain = (
        array.cast(pa.timestamp(type_.unit, "UTC")).cast(pa.timestamp(type_.unit))
        if zone
        else array
    )
    text = pc.replace_substring(plain.cast(pa.string()), " ", "T", max_replacements=1)
    return pc.binary_join_element_wise(text, "Z", "") if zone else text


def _structs(array: Any) -> list[Any]:
    names = [f.name for f in array.type]
    fields = [values(array.field(at)) for at in range(array.type.num_fields)]
    rows = zip(*fields, strict=True) if fields else (() for _ in range(len(array)))
    there = array.is_valid().to_pylist()
    return [
        dict(zip(names, row, strict=True)) if valid else None
        for row, valid in zip(rows, there, strict=True)
    ]


def _lists(array: Any) -> list[Any]:
    """Arrays, and objects of maps: the values of all rows at once, then split by row."""
    lengths: Sequence[int | None] = _lengths(array)
    if pt.is_map(array.type):
        flat = pa.concat_arrays([row.values for row in array if row.is_valid] or [_no_items(array)])
        pairs = list(zip(values(flat.field(0)), values(flat.field(1)), strict=True))
        return _cut(pairs, lengths, dict)
    return _cut(values(array.flatten()), lengths, list)


def _lengths(array: Any) -> list[int | None]:
    if pt.is_map(array.type):
        return [len(row) if row.is_valid else None for row in array]
    found: list[int | None] = pc.list_value_length(array).to_pylist()
    return found


def _no_items(array: Any) -> Any:
    return pa.array([], pa.struct([array.type.key_field, array.type.item_field]))


def _cut(
    flat: list[Any], lengths: Sequence[int | None], make: Callable[[list[Any]], Any]
) -> list[Any]:
    cut, at = [], 0
    for length in lengths:
        cut.append(None if length is None else make(flat[at : at + length]))
        at += length or 0
    return cut
