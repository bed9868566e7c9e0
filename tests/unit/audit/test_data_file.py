"""Data files are read by the libraries' own readers, and counted by their metadata."""

from __future__ import annotations

import pyarrow as pa
import pytest

from oncely.audit.stored.manifest import Unreadable, row_count, rows_of
from oncely.kinds.data_file import AvroFiles, ParquetFiles

ROWS = pa.table(
    {"id": list(range(50_000)), "a b": [f"name {n}" for n in range(50_000)], "": [1.5] * 50_000}
)
FORMS = {"avro": AvroFiles, "parquet": ParquetFiles}


def _file(form: str) -> bytes:
    return bytes(FORMS[form](ROWS.schema).prepare(ROWS)(0, ROWS.num_rows))


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_names_of_columns_come_back(form: str) -> None:
    found = rows_of(_file(form), form)
    assert found.column_names == ROWS.column_names
    assert found.cast(ROWS.schema) == ROWS


@pytest.mark.parametrize("form", FORMS)
def test_metadata_have_the_number_of_rows(form: str) -> None:
    assert row_count(pa.BufferReader(_file(form)), form) == ROWS.num_rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", [0, 3, 0.5, -1])
def test_a_truncated_file_is_unreadable(form: str, kept: float) -> None:
    data = _file(form)
    cut = data[: int(len(data) * kept) if 0 < kept < 1 else int(kept)]
    with pytest.raises(Unreadable):
        row_count(pa.BufferReader(cut), form)
    with pytest.raises(Unreadable):
        rows_of(cut, form)
