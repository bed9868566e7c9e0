"""What one task of the files sink learns from its records, writes and refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from oncely.core.batch import Chunk
from oncely.core.claim import Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.decode.avro_schema import arrow_schema_of
from oncely.errors import OlderFormat
from oncely.kinds.data_file import FileFormat, Scope, WrittenFile, encode, read_avro, read_receipt
from oncely.kinds.files.records import read_schema, schema_key
from oncely.kinds.files.topics import ScopeSchemas
from oncely.kinds.partitions import parse_partition_by
from oncely.kinds.staged_files import FilesTask
from oncely.stores.objects.store import Store

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
    form = FileFormat("avro", parse_partition_by(by), schema)
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
        for row in read_avro((folder / file.path).read_bytes()).to_pylist()
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


def test_event_times_are_judged_value_by_value(tmp_path: Path) -> None:
    """A number with a fraction is a reject; it takes no other record of its scope with it."""
    found = done(
        tmp_path,
        events({}, {"ts": NOON + 0.5}, {"ts": float(NOON)}, {}, {"ts": 1e300}),
        events({"ts": NOON + 0.5}, {}, start=5),
    )
    assert {at: row["ts"] for at, row in found.rows.items()} == dict.fromkeys((0, 2, 3, 6), NOON)
    assert "event time 'ts': 1700000000000.5 is no whole number" in found.refused[1]
    assert [*found.refused] == [1, 4, 5]
    assert {file.partition["date"] for file in found.files} == {"2023-11-14"}


def test_what_a_rejected_record_holds_is_not_learned(tmp_path: Path) -> None:
    bad = [
        {"ts": "yesterday", "amount": "n/a"},
        {"ts": NOON + 0.5, "amount": "n/a"},
        {"ts": True, "amount": "n/a"},
        {"ts": {"a": 1}, "amount": "n/a"},
        {"ts": 10**17, "amount": "n/a"},
        {"ts": 10**30, "amount": "n/a"},
        {"ts": [NOON], "amount": "n/a"},
    ]
    good = [{"amount": 5}] * 40
    found = done(tmp_path, events(*bad), events(*good, {"amount": 0.5}, start=len(bad)))
    assert sorted(found.refused) == [*range(len(bad))]
    assert found.refused.pop(5) == f"ts: {10**30} is out of range of BIGINT"
    assert all("event time 'ts'" in reason for reason in found.refused.values())
    assert len(found.rows) == 41
    assert found.grown[("ann",)].field("amount").type == pa.float64()
    assert found.grown[("ann",)].field("ts").type == pa.int64()


def test_a_record_that_is_rejected_alone_leaves_no_schema(tmp_path: Path) -> None:
    found = done(tmp_path, events({"ts": "yesterday", "amount": "n/a"}))
    assert found.grown == {}
    assert found.files == []


def test_a_value_too_long_for_the_manifest_teaches_nothing(tmp_path: Path) -> None:
    long = "ü" * 3_000  # fewer than 4,096 characters, and more bytes
    found = done(tmp_path, events({"x": 1}, user=long), by=("user",))
    assert found.grown == {}
    assert "4,096 bytes" in found.refused[0]


def test_values_of_different_types_share_no_schema(tmp_path: Path) -> None:
    """User 1 and user "1" stand in one directory, and have files and schemas of their own."""
    mixed = [*events({"x": 5}, user=1), *events({"x": "five"}, user="1", start=1)]
    mixed += events({"x": [5]}, user=True, start=2) + events({"x": {"y": 5}}, user="true", start=3)
    mixed += events({"x": True}, user="1::BIGINT", start=4)
    found = done(tmp_path, mixed)
    assert found.refused == {}
    assert [found.rows[at]["user"] for at in range(5)] == [1, "1", True, "true", "1::BIGINT"]
    scopes = [("1::BIGINT",), ("1::STRING",), ("true::BOOLEAN",), ("true::STRING",)]
    assert [*found.grown] == [*scopes, ("1::BIGINT::STRING",)]
    assert {file.scope for file in found.files} == {*found.grown}
    assert {file.partition["user"] for file in found.files} == {"1", "true", "1::BIGINT"}


@pytest.mark.parametrize("value", ["1", "true"])
def test_a_scope_whose_values_have_no_types_is_refused(value: str) -> None:
    """As versions before the first release wrote it."""
    record = ScopeSchemas({(value,): pa.schema([("x", pa.string())])}).record((value,))
    with pytest.raises(OlderFormat, match=r"schema topic's message .* before 0\.1\.0"):
        read_schema(schema_key((value,)), encode(record))
    typed = msgspec.structs.replace(record, scope=(f"{value}::STRING",))
    assert read_schema(schema_key(typed.scope), encode(typed)) == typed
