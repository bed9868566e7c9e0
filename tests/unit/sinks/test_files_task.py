"""What one task of the files sink learns from its records, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from oncely.core.offsets import TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.decode.avro_form import arrow_schema_of
from oncely.sinks.base import Chunk, Fence
from oncely.sinks.files.avro_file import read
from oncely.sinks.files.form import Form
from oncely.sinks.files.partitions import parse_partition_by
from oncely.sinks.files.store import Store
from oncely.sinks.files.task import FilesTask
from oncely.sinks.files.words import Scope, WrittenFile, read_receipt

T0 = TopicPartition("events", 0)
BY = ("user", "date(ts)")
NOON = 1_700_000_000_000
LARGE = 9_007_199_254_740_993


class Done(NamedTuple):
    """The outcome of a task: rows by offset, reasons by offset, grown schemas, files."""

    rows: dict[int, dict[str, Any]]
    refused: dict[int, str]
    grown: dict[Scope, pa.Schema]
    files: list[WrittenFile]


def chunk(records: Sequence[Any], start: int) -> Chunk:
    values = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in records]
    count = len(values)
    return Chunk(
        {T0: OffsetRange(start, start + count)},
        (T0,),
        np.zeros(count, np.int32),
        np.arange(start, start + count),
        pa.table({"value": pa.array(values, pa.binary())}),
        np.arange(count),
        None,
        np.array([], np.int64),
        (),
        lambda _: [],
    )


def done(
    folder: Path,
    *chunks: Sequence[Any],
    by: Sequence[str] = BY,
    known: Mapping[Scope, pa.Schema] | None = None,
    schema: pa.Schema | None = None,
) -> Done:
    """One task that is given its records chunk by chunk."""
    store = Store(folder.as_uri())
    form = Form("avro", parse_partition_by(by), schema)
    task = FilesTask(store, form, known or {}, Fence("events", 1), 0, 0)
    refused: dict[int, str] = {}
    start = 0
    for records in chunks:
        for one in task.add(chunk(records, start)):
            refused[start + one.record] = one.reason
        start += len(records)
    receipt = read_receipt(task.finish().name or "")
    rows = {
        int(row["offset"]): row
        for file in receipt.files
        for row in read((folder / file.path).read_bytes()).to_pylist()
    }
    grown = {scope: arrow_schema_of(receipt.schemas[id_]) for scope, id_ in receipt.grown}
    return Done(rows, refused, grown, receipt.files)


def events(*more: Mapping[str, Any], user: Any = "ann", start: int = 0) -> list[dict[str, Any]]:
    """Records that say which offset they have."""
    found = ({"user": user, "ts": NOON, **one} for one in more)
    return [{**one, "offset": start + at} for at, one in enumerate(found)]


def test_a_column_that_holds_a_large_number_is_grown(tmp_path: Path) -> None:
    first = done(tmp_path / "1", events({"n": 1}))
    again = done(tmp_path / "2", events({"n": LARGE}), known=first.grown)
    assert again.rows[0]["n"] == LARGE
    assert [*again.grown] == [("ann",)]  # so that the driver publishes it
    assert "beyond_double" in str(again.grown[("ann",)].field("n").metadata)
    last = done(tmp_path / "3", events({"n": 0.5}, {"n": LARGE}), known=again.grown)
    assert [*last.rows] == [1]
    assert "beyond 2^53" in last.refused[0]
    assert last.grown == {}
