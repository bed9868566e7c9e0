"""Schemas and rows for properties, of the types that files have."""

from __future__ import annotations

from datetime import UTC
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from oncely.decode.avro_schema import avro_name

INT32, INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int32(), st.integers(*INT32)),
    (pa.int64(), st.integers(*INT64)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.timestamp("us"), st.datetimes()),
    (
        pa.decimal128(20, 4),
        st.integers(-(10**20) + 1, 10**20 - 1).map(lambda n: Decimal(n).scaleb(-4)),
    ),
]
NAMES = st.text(max_size=4) | st.sampled_from(
    ["", "_x_", "_x0041_", "_x0041", "a.b", "__proto__", "1st", "é", "😀", "string", "Record", "_"]
)


def types(leaves: list[pa.DataType] | None = None) -> st.SearchStrategy[pa.DataType]:
    chosen = leaves or [arrow for arrow, _ in LEAVES]
    return st.recursive(
        st.sampled_from(chosen),
        lambda inner: inner.map(pa.list_) | fields(inner).map(pa.struct),
        max_leaves=6,
    )


def fields(inner: st.SearchStrategy[pa.DataType], least: int = 1) -> st.SearchStrategy[Any]:
    return st.dictionaries(NAMES, inner, min_size=least, max_size=3).map(
        lambda found: [pa.field(name, arrow) for name, arrow in found.items()]
    )


def schemas(leaves: list[pa.DataType] | None = None) -> st.SearchStrategy[pa.Schema]:
    return fields(types(leaves)).map(pa.schema)


def values(arrow: pa.DataType) -> st.SearchStrategy[Any]:
    """What ``pyarrow.array`` takes for a type, nulls too."""
    if pa.types.is_list(arrow):
        some: st.SearchStrategy[Any] = st.lists(values(arrow.value_type), max_size=3)
    elif pa.types.is_struct(arrow):
        some = rows([arrow.field(i) for i in range(arrow.num_fields)])
    else:
        some = dict(LEAVES)[arrow]
    return st.none() | some


def rows(of: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({field.name: values(field.type) for field in of})


@st.composite
def tables(draw: st.DrawFn, leaves: list[pa.DataType] | None = None) -> pa.Table:
    schema = draw(schemas(leaves))
    return pa.Table.from_pylist(draw(st.lists(rows(schema), max_size=4)), schema)


def datums(value: Any) -> Any:
    """A value of a row as Avro has it: names are escaped."""
    if isinstance(value, dict):
        return {avro_name(name): datums(inner) for name, inner in value.items()}
    return [datums(item) for item in value] if isinstance(value, list) else value
