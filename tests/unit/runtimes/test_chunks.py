"""Chunks: what a task claims, where it cuts, and which record each row belongs to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncely.core.batch import Chunk, Formed, Rejection
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.decode.base import Decoded
from oncely.errors import InvariantViolation
from oncely.runtimes import chunks as module
from oncely.runtimes.chunks import ChunkBounds, Processing
from oncely.runtimes.row_transform import SqlTransform, Unchanged
from tests.sinktools import kept_values

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
ROW = pa.schema([("text", pa.string())])


def table(*records: tuple[TopicPartition, int, bytes | None]) -> pa.Table:
    return pa.table(
        {
            "topic": pa.array([tp.topic for tp, *_ in records], pa.string()),
            "partition": pa.array([tp.partition for tp, *_ in records], pa.int32()),
            "offset": pa.array([at for _, at, _ in records], pa.int64()),
            "value": pa.array([value for *_, value in records], pa.binary()),
        }
    )


def of(tp: TopicPartition, *offsets: int) -> pa.Table:
    return table(*[(tp, at, f"{tp}@{at}".encode()) for at in offsets])


def decode(records: pa.Table) -> Decoded:
    """Text; ``bad…`` is rejected, null is a tombstone."""
    values = records.column("value").to_pylist()
    good = [i for i, v in enumerate(values) if v is not None and not v.startswith(b"bad")]
    gone = [i for i, v in enumerate(values) if v is None]
    return Decoded(
        pa.table({"text": pa.array([values[i].decode() for i in good], pa.string())}),
        pa.array(good, pa.int64()),
        [Rejection(i, "decode", "bad") for i, v in enumerate(values) if v and v.startswith(b"bad")],
        pa.table({"key": pa.array(gone, pa.int64())}) if gone else None,
        pa.array(gone, pa.int64()),
    )


def cut(
    tables: Sequence[pa.Table],
    starts: dict[TopicPartition, int],
    bounds: ChunkBounds = ChunkBounds(),  # noqa: B008 - frozen
    **more: Any,
) -> list[Chunk]:
    transform = more.pop("transform", Unchanged())
    return list(
        Processing(more.pop("decode", decode), transform, kept_values).chunks(
            starts, tables, bounds
        )
    )


def texts(chunk: Chunk) -> list[str]:
    return list(chunk.rows.column("text").to_pylist())


def test_a_chunk_claims_from_the_start_to_the_last_record_read() -> None:
    [chunk] = cut([of(A0, 5, 6, 9)], {A0: 3, A1: 100})
    assert chunk.ranges == {A0: OffsetRange(3, 10)}
    assert texts(chunk) == ["a-0@5", "a-0@6", "a-0@9"]


def test_consecutive_chunks_leave_no_offset_between_them() -> None:
    found = cut([of(A0, 5, 6), of(A0, 9), of(A0, 20, 21)], {A0: 5}, ChunkBounds(records=2))
    ranges = [chunk.ranges[A0] for chunk in found]
    assert ranges[0].start == 5
    assert ranges[-1].end == 22
    assert all(a.end == b.start for a, b in itertools.pairwise(ranges))
    assert [text for chunk in found for text in texts(chunk)] == [
        "a-0@5", "a-0@6", "a-0@9", "a-0@20", "a-0@21",
    ]  # fmt: skip


def test_no_input_no_chunk() -> None:
    assert cut([], {A0: 0}) == []
    assert cut([of(A0), of(A0)], {A0: 0}) == []


def test_input_that_ends_early_claims_nothing_beyond() -> None:
    """The pipe closed between two Arrow messages; more had been planned."""
    [chunk] = cut([of(A0, 0, 1), of(A1, 0)], {A0: 0, A1: 0, B0: 0})
    assert chunk.ranges == {A0: OffsetRange(0, 2), A1: OffsetRange(0, 1)}


def test_partitions_are_sorted_and_records_find_theirs() -> None:
    [chunk] = cut([of(B0, 1), of(A1, 7, 8), of(A0, 3), of(B0, 2)], {A0: 0, A1: 0, B0: 0})
    assert chunk.partitions == (A0, A1, B0)
    found = [
        (chunk.partitions[p], int(o)) for p, o in zip(chunk.partition, chunk.offset, strict=True)
    ]
    assert found == [(B0, 1), (A1, 7), (A1, 8), (A0, 3), (B0, 2)]
    assert chunk.ranges == {A0: OffsetRange(0, 4), A1: OffsetRange(0, 9), B0: OffsetRange(0, 3)}


def test_a_topic_column_of_codes() -> None:
    """One topic only: its name is a dictionary of one."""
    plain = of(A0, 1, 2)
    topic = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), pa.array(["a"]))
    coded = plain.set_column(0, "topic", topic)
    [chunk] = cut([coded, coded.set_column(2, "offset", pa.array([3, 4]))], {A0: 0})
    assert chunk.ranges == {A0: OffsetRange(0, 5)}


def test_dictionaries_that_differ_between_batches() -> None:
    def coded(tp: TopicPartition, *offsets: int) -> pa.Table:
        plain = of(tp, *offsets)
        return plain.set_column(0, "topic", plain.column("topic").dictionary_encode())

    [chunk] = cut([coded(B0, 1), coded(A0, 1), coded(B0, 2)], {A0: 0, B0: 0})
    assert chunk.ranges == {A0: OffsetRange(0, 2), B0: OffsetRange(0, 3)}


def test_rows_tombstones_and_rejections_keep_their_records() -> None:
    records = [(A0, 0, b"x"), (A0, 1, b"bad"), (A0, 2, None), (A0, 3, b"y")]
    [chunk] = cut([table(*records[:3]), table(*records[3:], (A0, 4, b"bad too"))], {A0: 0})
    assert chunk.records == 5
    assert chunk.row_record.tolist() == [0, 3]
    assert chunk.delete_record.tolist() == [2]
    assert chunk.rejections == (Rejection(1, "decode", "bad"), Rejection(4, "decode", "bad"))
    kept = chunk.dead_letters(chunk.rejections)
    assert [(one.partition, one.offset, one.value) for one in kept] == [
        (A0, 1, b"bad"), (A0, 4, b"bad too"),
    ]  # fmt: skip


def test_a_transform_s_rows_and_rejections_keep_their_records() -> None:
    sql = SqlTransform("SELECT CAST(text AS INT) AS n FROM input WHERE text <> 'drop'")
    records = [(A0, at, value) for at, value in enumerate([b"1", b"drop", b"no", b"bad", b"4"])]
    [chunk] = cut([table(*records[:2]), table(*records[2:])], {A0: 0}, transform=sql)
    assert chunk.rows.column("n").to_pylist() == [1, 4]
    assert chunk.row_record.tolist() == [0, 4]
    assert sorted((one.record, one.stage) for one in chunk.rejections) == [
        (2, "transform"), (3, "decode"),
    ]  # fmt: skip
    [letter] = chunk.dead_letters([one for one in chunk.rejections if one.stage == "transform"])
    assert (letter.offset, letter.value) == (2, b"no")


class Inferring:
    """A transform whose result has the type of what happens to be in it."""

    def apply(self, rows: pa.Table, row_record: Any) -> Any:
        found = [None if text == "none" else text for text in rows.column("text").to_pylist()]
        return Formed(pa.table({"text": pa.array(found)}), row_record)


def test_parts_whose_columns_are_null_only() -> None:
    values = [b"none", b"x", b"none"]
    tables = [table((A0, at, value)) for at, value in enumerate(values)]
    [chunk] = cut(tables, {A0: 0}, transform=Inferring())
    assert texts(chunk) == [None, "x", None]


# -- bounds --------------------------------------------------------------------------------


def test_bounded_by_records() -> None:
    found = cut([of(A0, *range(100))], {A0: 0}, ChunkBounds(records=30))
    assert max(chunk.records for chunk in found) <= 30
    assert sum(chunk.records for chunk in found) == 100


def test_bounded_by_bytes_whatever_the_messages_sizes() -> None:
    records = [(A0, at, b"x" * 1000) for at in range(200)]
    found = cut([table(*records)], {A0: 0}, ChunkBounds(bytes=20_000))
    assert max(chunk.records for chunk in found) < 2 * 20
    found = cut([table(one) for one in records], {A0: 0}, ChunkBounds(bytes=20_000))
    assert max(chunk.records for chunk in found) <= 25


def test_one_record_greater_than_the_bound_is_a_chunk() -> None:
    records = [(A0, 0, b"x"), (A0, 1, b"y" * 100_000), (A0, 2, b"z")]
    found = cut([table(one) for one in records], {A0: 0}, ChunkBounds(bytes=1000))
    assert [chunk.ranges[A0] for chunk in found] == [OffsetRange(0, 2), OffsetRange(2, 3)]


def test_bounded_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 1.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    found = cut([of(A0, at) for at in range(12)], {A0: 0}, ChunkBounds(seconds=3))
    assert len(found) >= 3
    assert [at for chunk in found for at in chunk.offset] == list(range(12))


def test_bounds_smaller_than_a_record() -> None:
    found = cut([of(A0, 0, 1, 2)], {A0: 0}, ChunkBounds(records=1, bytes=1, seconds=0))
    assert [chunk.ranges[A0] for chunk in found] == [
        OffsetRange(0, 1), OffsetRange(1, 2), OffsetRange(2, 3),
    ]  # fmt: skip


# -- input that can't be -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ([of(A0, 1, 1)], "do not ascend"),
        ([of(A0, 2, 1)], "do not ascend"),
        ([of(A0, 2), of(A0, 1)], "do not ascend"),
        ([of(A0, 0)], "offset 0 was not requested"),
        ([of(A1, 5)], "not in this batch's plan"),
    ],
)
def test_input_that_was_not_planned_is_a_defect(tables: list[pa.Table], problem: str) -> None:
    with pytest.raises(InvariantViolation, match=problem):
        cut(tables, {A0: 1})


def test_offsets_that_go_back_in_a_later_chunk_are_a_defect() -> None:
    with pytest.raises(InvariantViolation, match="was not requested"):
        cut([of(A0, 5), of(A0, 4)], {A0: 0}, ChunkBounds(records=1))


def test_a_decoder_that_forgets_a_record_is_a_defect() -> None:
    def forgetful(records: pa.Table) -> Decoded:
        return decode(records.slice(1))

    with pytest.raises(InvariantViolation, match="exactly one outcome"):
        cut([of(A0, 1, 2)], {A0: 0}, decode=forgetful)


# -- laws ----------------------------------------------------------------------------------


@st.composite
def inputs(draw: st.DrawFn) -> list[pa.Table]:
    """Batches of records of three partitions, offsets ascending with holes."""
    at = {A0: 0, A1: 0, B0: 0}
    made = []
    for size in draw(st.lists(st.integers(0, 9), max_size=8)):
        records = []
        for _ in range(size):
            tp = draw(st.sampled_from([A0, A1, B0]))
            at[tp] += draw(st.integers(1, 3))
            value = draw(st.sampled_from([b"x", b"yy" * 50, b"bad", None]))
            records.append((tp, at[tp] - 1, value))
        made.append(table(*records))
    return made


@settings(deadline=None)
@given(inputs(), st.integers(1, 12), st.integers(1, 600))
def test_however_it_is_cut_every_record_is_in_one_chunk(
    tables: list[pa.Table], records: int, size: int
) -> None:
    wanted = [row for one in tables for row in one.to_pylist()]
    at = {A0: 0, A1: 0, B0: 0}
    found: list[Any] = []
    for chunk in cut(tables, dict(at), ChunkBounds(records=records, bytes=size)):
        for tp, range_ in chunk.ranges.items():
            assert range_.start == at[tp]
            at[tp] = range_.end
        for index, (code, offset) in enumerate(zip(chunk.partition, chunk.offset, strict=True)):
            tp = chunk.partitions[code]
            assert offset in chunk.ranges[tp]
            found.append((tp.topic, tp.partition, int(offset), outcome(chunk, index)))
    assert found == [
        (w["topic"], w["partition"], w["offset"], expected(w["value"])) for w in wanted
    ]
    last = {(w["topic"], w["partition"]): w["offset"] + 1 for w in wanted}
    assert at == {tp: last.get(tuple(tp), 0) for tp in at}


def outcome(chunk: Chunk, record: int) -> list[str]:
    """What became of a record, by what the chunk says of it."""
    rows = [texts(chunk)[i] for i in np.flatnonzero(chunk.row_record == record)]
    gone = ["gone" for _ in np.flatnonzero(chunk.delete_record == record)]
    bad = ["bad" for one in chunk.rejections if one.record == record]
    return [*rows, *gone, *bad]


def expected(value: bytes | None) -> list[str]:
    if value is None:
        return ["gone"]
    return ["bad"] if value == b"bad" else [value.decode()]


# -- keep ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(inputs(), st.data())
def test_keeping_ranges_of_a_chunk(tables: list[pa.Table], data: st.DataObject) -> None:
    chunks = cut(tables, {A0: 0, A1: 0, B0: 0})
    if not chunks:
        return
    [chunk] = chunks
    keep = {
        tp: [OffsetRange(start, start + data.draw(st.integers(0, 6)))]
        for tp in data.draw(st.sets(st.sampled_from([A0, A1, B0])))
        for start in [data.draw(st.integers(0, 10))]
    }
    kept = chunk.keep(keep)
    for index, (code, offset) in enumerate(zip(chunk.partition, chunk.offset, strict=True)):
        inside = any(int(offset) in one for one in keep.get(chunk.partitions[code], ()))
        assert outcome(kept, index) == (outcome(chunk, index) if inside else [])
        assert (kept.partition[index] >= 0) == inside
