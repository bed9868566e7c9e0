"""The schema of a scope replaced in one transaction: fenced, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.core.batch import Batch, Chunk
from oncely.core.claim import Counts, Fence
from oncely.core.ranges import OffsetRange
from oncely.decode.avro_schema import arrow_schema_of, avro_schema_of
from oncely.decode.schema import large
from oncely.errors import Fenced
from oncely.kinds.conform import conform, held_schema
from oncely.kinds.files.manifest import Contents
from oncely.kinds.files.sink import FilesSink
from oncely.testing.servers.kafka import Broker
from tests.filestools import FilesPlace, make_place, open_sink, publish_all
from tests.sinktools import T0

ANN = ("ann",)
ANEW = avro_schema_of(pa.schema({"name": pa.string(), "id": pa.int64()}))


@pytest.fixture
def place(broker: Broker, tmp_path: Path) -> FilesPlace:
    return make_place(broker, tmp_path)


def chunk(records: Sequence[Mapping[str, Any]], start: int) -> Chunk:
    values = pa.array([json.dumps({"name": "ann", **one}).encode() for one in records])
    numbers = np.arange(len(records))
    return Chunk(
        {T0: OffsetRange(start, start + len(records))}, (T0,), np.zeros(len(records), np.int32),
        numbers + start, pa.table({"value": values.cast(pa.binary())}), numbers, None,
        np.array([], np.int64), (), lambda _: [],
    )  # fmt: skip


def write(sink: FilesSink, fence: Fence, start: int, *records: Mapping[str, Any]) -> list[int]:
    """Stage and publish a batch; indices of the records that were refused."""
    task = sink.staging(fence, start, 0)
    refused = [one.record for one in task.add(chunk(records, start))]
    staged = task.finish()
    assert sink.agree(staged)
    ranges = {T0: OffsetRange(start, start + len(records))}
    written = {T0: Counts(len(records), staged.rows, 0, 0)}
    publish_all(sink, Batch(ranges, written, (), [staged]), fence)
    return refused


def published(place: FilesPlace) -> dict[str, Any] | None:
    found = place.world.schemas().get(ANN)
    return {one["name"]: one["type"] for one in found["fields"]} if found else None


def as_rows_hold(sink: FilesSink) -> Callable[[Contents], str | None]:
    def learned(contents: Contents) -> str | None:
        assert contents.files
        return ANEW

    return learned


def polluted(place: FilesPlace) -> FilesSink:
    sink = place.sink(None)
    fence = open_sink(sink).fence
    assert write(sink, fence, 0, {"id": 1}) == []
    # What versions before this one learned from a record that they rejected.
    wrong = avro_schema_of(
        pa.schema({"name": pa.string(), "id": pa.int64(), "amount": pa.string()})
    )
    sink.replace_schema(ANN, lambda _: wrong, fence)
    return sink


def test_a_run_that_opens_afterwards_learns_anew(place: FilesPlace) -> None:
    with_wrong = polluted(place)
    fence = open_sink(with_wrong).fence
    assert write(with_wrong, fence, 1, {"id": 2, "amount": 5}) == [0]
    command = place.sink(None)
    command.replace_schema(ANN, as_rows_hold(command), open_sink(command).fence)
    assert published(place) == {"name": ["null", "string"], "id": ["null", "long"]}
    run = place.sink(None)
    fence = open_sink(run).fence
    assert write(run, fence, 2, {"id": 3, "amount": 5}) == []
    assert published(place) is not None
    assert (published(place) or {})["amount"] == ["null", "long"]
    assert place.ids() == [1, 3]
    for one in (with_wrong, command, run):
        one.close()


def test_a_run_that_was_open_is_fenced_and_undoes_nothing(place: FilesPlace) -> None:
    run = polluted(place)
    old = open_sink(run).fence
    command = place.sink(None)
    command.replace_schema(ANN, as_rows_hold(command), open_sink(command).fence)
    with pytest.raises(Fenced):
        write(run, old, 1, {"id": 2, "amount": "text"})
    assert "amount" not in (published(place) or {})
    run.close()
    command.close()


@pytest.mark.parametrize("at", ["before", "within"])
def test_a_run_that_opens_meanwhile_wins(place: FilesPlace, at: str) -> None:
    polluted(place).close()
    command, run = place.sink(None), place.sink(None)
    fence = open_sink(command).fence
    if at == "before":
        open_sink(run)

    def learned(_: Contents) -> str | None:
        if at == "within":
            open_sink(run)
        return ANEW

    def settled() -> None:
        for attempt in attempts(Backoff()):
            with attempt:
                command.replace_schema(ANN, learned, fence)

    with pytest.raises(Fenced):
        settled()
    assert "amount" in (published(place) or {})
    run.close()
    command.close()


def test_a_scope_without_files_begins_anew(place: FilesPlace) -> None:
    sink = polluted(place)
    sink.replace_schema(ANN, lambda _: None, open_sink(sink).fence)
    assert published(place) is None
    sink.close()


def test_what_rows_hold() -> None:
    rows = pa.table(
        {
            "a": pa.array([None, None], pa.string()),
            "n": pa.array([1, None], pa.int64()),
            "big": pa.array([2**53 + 1, None], pa.int64()),
            "s": pa.array([{"x": None, "y": 1}, None], pa.struct({"x": BIG, "y": BIG})),
            "e": pa.array([{"x": None}, None], pa.struct({"x": BIG})),
            "l": pa.array([[], [None]], pa.list_(BIG)),
            "m": pa.array(
                [[{"x": None, "y": "t"}], []], pa.list_(pa.struct({"x": BIG, "y": TEXT}))
            ),
        }
    )
    found = held_schema(rows)
    assert found == pa.schema(
        [("n", BIG), large("big"), ("s", pa.struct({"y": BIG})),
         ("m", pa.list_(pa.struct({"y": TEXT})))]
    )  # fmt: skip
    assert "beyond_double" in avro_schema_of(found)
    # What is forgotten may come back as another type; files that hold nothing of it resolve.
    other = pa.schema([("a", BIG), *found, ("e", TEXT), ("l", TEXT)])
    kept = conform(rows, arrow_schema_of(avro_schema_of(other)))
    assert kept.select(["a", "e", "l"]).to_pylist() == [{"a": None, "e": None, "l": None}] * 2
    assert kept["m"].to_pylist() == [[{"y": "t"}], []]


BIG, TEXT = pa.int64(), pa.string()
