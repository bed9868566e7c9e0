"""Columns from the optional package ``oncely-native``, ahead of the decoders in Python.

Its decoders create columns only from records that they read with certainty, by the rules of the
decoders in Python. All other records are unsure, and left to these; only they reject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.decode.columns import Piece, Positions
from oncely.decode.reference import JsonRules
from oncely.decode.schema import is_json
from oncely.extras import native

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


@dataclass(frozen=True)
class NativeJson:
    """Decodes slices of JSON records, as :class:`oncely.decode.typed.TypedJson` does."""

    schema: pa.Schema
    rules: JsonRules

    @classmethod
    def make(cls, schema: pa.Schema, rules: JsonRules) -> NativeJson | None:
        """A decoder for these columns, or None without the package."""
        return None if native() is None else cls(schema, rules)

    def decode(self, values: pa.Array) -> tuple[list[Piece], Positions]:
        """Decode a slice of binary or large_binary: rows, and the positions of unsure records."""
        return read(self.schema, values, lambda module: module.json_rows, *self.rules)


def read(
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
