"""Files that we write are read back alike by us, by fastavro and by polars."""

from __future__ import annotations

import io
import json
from typing import Any
from unittest import mock

import fastavro
import polars as pl
import pyarrow as pa
import pytest
from arrow_schemas import schemas, tables
from filetools import avro_of
from hypothesis import given, settings
from hypothesis import strategies as st
from properties.test_avro_names import datums

from oncely.decode.avro_schema import avro_schema_of, schema_id
from oncely.errors import InvariantViolation
from oncely.kinds import data_file
from oncely.kinds.data_file import (
    SCHEMA_ID,
    AvroFiles,
    ParquetFiles,
    header,
    read_avro,
    read_parquet,
)
from tests.conftest import examples


def by_fastavro(data: bytes) -> list[Any]:
    return list(fastavro.reader(io.BytesIO(data)))


@settings(max_examples=examples(40), deadline=None)
@given(tables())
def test_a_file_is_read_back_by_everyone(table: pa.Table) -> None:
    data = avro_of(table)
    assert read_avro(data).equals(table)
    assert by_fastavro(data) == datums(table.to_pylist())
    if table.num_rows:
        assert pl.read_avro(io.BytesIO(data)).height == table.num_rows
    meta = header(data)
    assert json.loads(meta["avro.schema"]) == json.loads(avro_schema_of(table.schema))
    assert meta[SCHEMA_ID].decode() == schema_id(avro_schema_of(table.schema))


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(tables(), min_size=1, max_size=1), st.data())
def test_any_part_of_any_chunks_in_any_blocks(found: list[pa.Table], data: st.DataObject) -> None:
    table = pa.concat_tables(found * 3)  # three chunks a column
    start = data.draw(st.integers(0, table.num_rows))
    rows = data.draw(st.integers(0, table.num_rows - start))
    with mock.patch.object(data_file, "_BLOCK", 20):
        prepared = AvroFiles(table.schema).prepare(table)
        written = prepared(start, rows)
        alone = [prepared(row, 1) for row in range(table.num_rows)]
    assert by_fastavro(written) == datums(table.slice(start, rows).to_pylist())
    assert [by_fastavro(one)[0] for one in alone] == datums(table.to_pylist())
    assert read_avro(written).equals(table.slice(start, rows).combine_chunks())
    part = ParquetFiles(table.schema).prepare(table)(start, rows)
    assert read_parquet(part).equals(table.slice(start, rows).combine_chunks())


@settings(max_examples=examples(40), deadline=None)
@given(schemas(), st.data())
def test_an_older_schema_is_brought_to_the_newest(schema: pa.Schema, data: st.DataObject) -> None:
    from arrow_schemas import rows

    newest = pa.Table.from_pylist(data.draw(st.lists(rows(schema), max_size=3)), schema)
    kept = data.draw(st.lists(st.sampled_from(schema.names), unique=True, min_size=1))
    older = newest.select(kept)
    written = AvroFiles(schema).prepare(older)(0, older.num_rows)
    read = read_avro(written)
    assert read.schema == schema
    assert read.select(kept).equals(older)
    for name in set(schema.names) - set(kept):
        assert read.column(name).null_count == read.num_rows


def test_two_files_have_sync_markers_of_their_own() -> None:
    table = pa.table({"a": [1]})
    one, other = avro_of(table), avro_of(table)
    assert one[-16:] != other[-16:]
    assert one[-16:] in one[:-16]


@pytest.mark.parametrize("rows", [0, 1, 3, 100_000])
def test_rows_without_a_column(rows: int) -> None:
    files = AvroFiles(pa.schema([]))
    data = files.prepare(pa.table({}))(0, rows)
    assert by_fastavro(data) == [{}] * rows
    assert read_avro(data).num_rows == rows


@pytest.mark.parametrize("cut", [1, 3, 16, 20, 60])
def test_a_damaged_file_is_no_file(cut: int) -> None:
    data = avro_of(pa.table({"a": list(range(100)), "b": ["x"] * 100}))
    with pytest.raises(InvariantViolation):
        read_avro(data[:-cut])
    with pytest.raises(InvariantViolation):
        read_avro(data[:cut])
