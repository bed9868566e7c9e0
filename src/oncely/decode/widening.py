"""Rows of an older schema as rows of the one that it has grown to."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.merging import wider_number
from oncely.decode.schema import same_schema
from oncely.decode.shapes import leaf
from oncely.errors import InvariantViolation, check


def widen(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The same rows with the columns of a schema that theirs resolves to.

    Fields that are missing are null, whole numbers become DOUBLE where that is the same number,
    and the order is the schema's; in structs and lists too.

    Raises:
        InvariantViolation: a column of the rows is not in ``schema``, has no way to its type, or
            holds a number that is not the same as a DOUBLE.
    """
    if same_schema(rows.schema, schema):
        return rows
    check(set(rows.schema.names) <= set(schema.names), "a column would get lost")
    columns = [
        _chunked(rows[field.name], field.type)
        if field.name in rows.schema.names
        else pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _chunked(column: pa.ChunkedArray, arrow: pa.DataType) -> pa.ChunkedArray:
    if column.type == arrow:
        return column
    return pa.chunked_array([_widen(chunk, arrow) for chunk in column.chunks], arrow)


def _widen(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    if values.type == arrow:
        return values
    if pa.types.is_struct(arrow) and pa.types.is_struct(values.type):
        return _struct(values, arrow)
    if pa.types.is_list(arrow) and pa.types.is_list(values.type):
        # Not `values.offsets` with a null's place in it: offsets and validity are kept apart.
        first, last = values.offsets[0].as_py(), values.offsets[-1].as_py()
        items = _widen(values.values.slice(first, last - first), arrow.value_type)
        offsets = pc.subtract(values.offsets, first)
        return pa.ListArray.from_arrays(offsets, items, type=arrow, mask=values.is_null())
    wider = leaf(arrow)
    check(wider_number(leaf(values.type), wider) is wider, f"{values.type} won't become {arrow}")
    try:
        return pc.cast(values, arrow)
    except pa.ArrowInvalid as error:  # a whole number beyond 2^53
        raise InvariantViolation(f"{values.type} won't become {arrow}: {error}") from None


def _struct(values: pa.StructArray, arrow: pa.StructType) -> pa.Array:
    known = {values.type.field(i).name: i for i in range(values.type.num_fields)}
    fields = [arrow.field(i) for i in range(arrow.num_fields)]
    check(known.keys() <= {field.name for field in fields}, "a field would get lost")
    children = [
        # values.field, unlike values.flatten, leaves a null struct's members as they are.
        _widen(values.field(known[field.name]), field.type)
        if field.name in known
        else pa.nulls(len(values), field.type)
        for field in fields
    ]
    return pa.StructArray.from_arrays(children, fields=fields, mask=values.is_null())
