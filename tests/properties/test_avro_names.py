"""Our schema is the one of the bytes that polars writes, and leads back to the columns."""

from __future__ import annotations

import io
import json
import re
from decimal import Decimal
from typing import Any

import fastavro
import polars
import pyarrow as pa
from arrow_schemas import LEAVES, NAMES, datums, schemas, tables
from filetools import avro_of
from hypothesis import given
from hypothesis import strategies as st

from oncely.decode.avro_schema import (
    arrow_schema_of,
    avro_name,
    avro_schema_of,
    column_name,
    storable,
)


@given(NAMES, NAMES)
def test_names_are_legal_and_lead_back(one: str, other: str) -> None:
    for name in (one, other, one + other, avro_name(one), avro_name(one) + other):
        assert re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", avro_name(name))
        assert column_name(avro_name(name)) == name


@given(st.text(alphabet="_x0041AF.é", max_size=14))
def test_names_that_look_escaped_lead_back(name: str) -> None:
    assert re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", avro_name(name))
    assert column_name(avro_name(name)) == name


@given(schemas())
def test_columns_lead_to_avro_and_back(schema: pa.Schema) -> None:
    text = avro_schema_of(schema)
    fastavro.parse_schema(json.loads(text))
    assert arrow_schema_of(text) == schema == storable(schema)


def bare(node: Any) -> Any:
    """A schema without what says nothing about bytes: names and defaults."""
    if isinstance(node, list):
        return [bare(each) for each in node]
    if isinstance(node, dict):
        return {k: bare(v) for k, v in node.items() if k not in ("name", "namespace", "default")}
    return node


def without_zone(arrow: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(arrow):
        return pa.timestamp("us")
    if pa.types.is_list(arrow):
        return pa.list_(without_zone(arrow.value_type))
    if pa.types.is_struct(arrow):
        inside = [arrow.field(i) for i in range(arrow.num_fields)]
        return pa.struct([pa.field(f.name, without_zone(f.type)) for f in inside])
    return arrow


DECIMAL = pa.decimal128(20, 4)


@given(tables([arrow for arrow, _ in LEAVES if arrow != DECIMAL]))
def test_polars_bytes_are_ours(table: pa.Table) -> None:
    naive = pa.schema([pa.field(f.name, without_zone(f.type)) for f in table.schema])
    # Column by column by number: polars has its own idea of an empty name.
    numbered = [f"c{index}" for index in range(len(naive))]
    out = io.BytesIO()
    polars.from_arrow(table.cast(naive).rename_columns(numbered)).write_avro(out)  # type: ignore[union-attr]
    theirs = fastavro.reader(io.BytesIO(out.getvalue())).writer_schema
    ours = json.loads(avro_schema_of(table.schema))
    local = json.loads(avro_schema_of(naive))
    assert bare(local) == bare(theirs)
    # Their bytes, read by our schema, are the rows.
    header = {"avro.schema": json.dumps(ours).encode(), "avro.codec": b"null"}
    read = list(fastavro.reader(io.BytesIO(with_header(out.getvalue(), header))))
    assert read == datums(table.to_pylist())


def test_polars_still_writes_some_decimals_wrong() -> None:
    """Why decimals are given to it as bytes: it drops the byte that holds nothing but the sign."""
    out = io.BytesIO()
    frame = polars.from_arrow(pa.table({"x": pa.array([Decimal("3.2768")], DECIMAL)}))
    frame.write_avro(out)  # type: ignore[union-attr]
    (read,) = fastavro.reader(io.BytesIO(out.getvalue()))
    assert read == {"x": Decimal("-3.2768")}
    ours = avro_of(pa.table({"x": pa.array([Decimal("3.2768")], DECIMAL)}))
    assert list(fastavro.reader(io.BytesIO(ours))) == [{"x": Decimal("3.2768")}]


HEADER = {
    "type": "record",
    "name": "Header",
    "fields": [
        {"name": "magic", "type": {"type": "fixed", "name": "magic", "size": 4}},
        {"name": "meta", "type": {"type": "map", "values": "bytes"}},
        {"name": "sync", "type": {"type": "fixed", "name": "sync", "size": 16}},
    ],
}


def with_header(data: bytes, meta: dict[str, bytes]) -> bytes:
    source = io.BytesIO(data)
    header: Any = fastavro.schemaless_reader(source, HEADER, None)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(HEADER), {**header, "meta": meta})
    return out.getvalue() + source.read()
