"""The schema of columns with values: columns in which no row has a value are left out."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.avro_names import large
from oncely.decode.reference import EXACT


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
