"""Arrow rows as JSON objects (RFC 8259), one text a row, UTF-8, without spaces.

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
in JSON and are refused before a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from oncely.decode.times import require_text
from oncely.errors import check
from oncely.extras import native

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
