"""Conversion of rows to the newest schema of their scope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.reference import EXACT
from oncely.decode.schema import large, type_name
from oncely.errors import InvariantViolation

_PAIR = ["key", "value"]


class Rounding(InvariantViolation):
    """A whole number differs from all numbers of its column's new type."""


def conform(rows: pa.Table, schema: pa.Schema, *, rounding: bool = False) -> pa.Table:
    """The rows with the columns of ``schema``, in its order; it contains all of their columns.

    Missing columns are null, whole numbers become floating-point numbers if the schema has these,
    structs are converted by field and lists by item, maps become lists of key and value.

    Args:
        rows: the rows.
        schema: the new columns.
        rounding: allow a whole number to become the nearest floating-point number.

    Raises:
        Rounding: a whole number would be rounded, and ``rounding`` is false.
        InvariantViolation: the schema lacks a column of the rows, or has another kind of type.
    """
    if rows.schema.equals(schema):
        return rows
    names, have = set(schema.names), set(rows.schema.names)
    for field in rows.schema:
        if field.name not in names and not pa.types.is_null(field.type):
            raise InvariantViolation(f"the schema has lost the column {field.name!r}")
    columns = [
        recast(rows.column(f.name), f.type, f.name, rounding=rounding)
        if f.name in have
        else pa.nulls(rows.num_rows, f.type)
        for f in schema
    ]
    return pa.table(columns, schema=schema)


def recast(
    column: pa.ChunkedArray,
    to: pa.DataType,
    path: str,
    found_by: Callable[[str], str] = str,
    *,
    rounding: bool = False,
) -> pa.ChunkedArray:
    """Convert one column.

    Args:
        column: the values.
        to: the new type.
        path: the column's name, for messages.
        found_by: returns the name in ``column`` of a field of ``to``; by default the same.
        rounding: allow a whole number to become the nearest floating-point number.

    Raises:
        Rounding: a whole number would be rounded, and ``rounding`` is false.
        InvariantViolation: another kind of type, or a field that ``to`` lacks.
    """
    if column.type.equals(to):
        return column
    step = _Recast(path, found_by, rounding)
    return pa.chunked_array([step.array(chunk, to) for chunk in column.chunks], to)


@dataclass(frozen=True)
class _Recast:
    path: str
    found_by: Callable[[str], str]
    rounding: bool

    def array(self, array: pa.Array, to: pa.DataType) -> pa.Array:
        old = array.type
        if old.equals(to):
            return array
        if array.null_count == len(array):
            return pa.nulls(len(array), to)
        if pa.types.is_struct(to) and pa.types.is_struct(old):
            return self._struct(array, to)
        if pa.types.is_list(to) and (_is_list(old) or pa.types.is_map(old)):
            return self._list(array, to)
        if pa.types.is_nested(to) or pa.types.is_nested(old):
            if held("", array) is None:  # a column that a reset of the schema has dropped
                return pa.nulls(len(array), to)
            raise InvariantViolation(f"{self.path}: {old} can't become {to}")
        return self._leaf(array, to)

    def _leaf(self, array: pa.Array, to: pa.DataType) -> pa.Array:
        if pa.types.is_floating(to) and pa.types.is_integer(array.type):
            return self._floating(array, to)
        if pa.types.is_binary(to) and pa.types.is_decimal128(array.type):
            return _big_endian(array)
        try:
            return pc.cast(array, to)
        except pa.ArrowException as error:
            raise InvariantViolation(
                f"{self.path}: {array.type} can't become {to}: {error}"
            ) from None

    def _floating(self, array: pa.Array, to: pa.DataType) -> pa.Array:
        numbers = pc.cast(array, to, safe=False)
        if not self.rounding:
            # 2^63 - 1 becomes 2^63, whose conversion to int64 depends on the processor.
            other = pc.not_equal(pc.cast(numbers, array.type, safe=False), array)
            rounded = pc.indices_nonzero(pc.or_(other, pc.greater_equal(numbers, 2.0**63)))
            if len(rounded):
                number, type_ = array[rounded[0].as_py()], type_name(to)
                raise Rounding(f"{self.path}: {number} does not fit {type_} exactly")
        return numbers

    def _struct(self, array: pa.StructArray, to: pa.StructType) -> pa.Array:
        old = {array.type.field(i).name: i for i in range(array.type.num_fields)}
        fields = [to.field(i) for i in range(to.num_fields)]
        for name in set(old) - {self.found_by(f.name) for f in fields}:
            if held(name, array.flatten()[old[name]]) is not None:
                raise InvariantViolation(f"the schema has lost {self.path}.{name}")
        inside = [
            # field() returns the values below a null struct; the mask hides them.
            self._below(f".{f.name}").array(array.field(old[self.found_by(f.name)]), f.type)
            if self.found_by(f.name) in old
            else pa.nulls(len(array), f.type)
            for f in fields
        ]
        return pa.StructArray.from_arrays(inside, fields=fields, mask=_mask(array))

    def _list(self, array: pa.Array, to: pa.ListType) -> pa.Array:
        if pa.types.is_fixed_size_list(array.type):
            array = pc.cast(array, pa.list_(array.type.value_type))
        if pa.types.is_map(array.type):
            items: pa.Array = pa.StructArray.from_arrays([array.keys, array.items], _PAIR)
        else:
            items = array.values
        offsets, mask = pc.cast(array.offsets, pa.int32()), _mask(array)
        if mask is not None:  # from_arrays accepts no mask beside sliced offsets
            offsets = pa.array(offsets.to_numpy())
        items = self._below("[]").array(items, to.value_type)
        return pa.ListArray.from_arrays(offsets, items, to, mask=mask)

    def _below(self, step: str) -> _Recast:
        return _Recast(self.path + step, self.found_by, self.rounding)


def _mask(array: pa.Array) -> pa.Array | None:
    return pc.is_null(array) if array.null_count else None


def _is_list(arrow: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(arrow) for is_kind in kinds)


def _big_endian(array: pa.Array) -> pa.Array:
    """Decimals as 16 bytes, two's complement, big-endian: Avro accepts any length.

    polars cuts leading zeros regardless of the sign: it writes 32768 as two bytes, which read as
    -32768.
    """
    count = len(array)
    if not count:
        return pa.array([], pa.binary())
    data = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * 16 :][: count * 16]
    turned = np.ascontiguousarray(data.reshape(count, 16)[:, ::-1])
    offsets = np.arange(0, (count + 1) * 16, 16, dtype=np.int32)
    valid = pc.is_valid(array).buffers()[1] if array.null_count else None
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(turned)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


# -- columns with values -------------------------------------------------------------------


def held_schema(rows: pa.Table) -> pa.Schema:
    """The columns that have a value in some row, and the fields of structs and lists that do."""
    columns = (
        held(field.name, chunk)
        for field in rows.schema
        for chunk in [pa.concat_arrays(rows[field.name].chunks or [pa.nulls(0, field.type)])]
    )
    return pa.schema([field for field in columns if field is not None])


def held(name: str, values: pa.Array) -> pa.Field | None:
    """The field of a column; None if the column has no value."""
    arrow = values.type
    if values.null_count == len(values):
        return None
    if pa.types.is_struct(arrow):
        below = zip(arrow, values.flatten(), strict=True)
        inside = [held(field.name, own) for field, own in below]
        fields = [field for field in inside if field is not None]
        return pa.field(name, pa.struct(fields)) if fields else None
    if pa.types.is_list(arrow):
        item = held("item", values.flatten())
        return None if item is None else pa.field(name, pa.list_(item))
    if arrow == pa.int64():
        ends = pc.min_max(values).as_py()
        if not -EXACT <= ends["min"] <= ends["max"] <= EXACT:
            return large(name)
    return pa.field(name, arrow)
