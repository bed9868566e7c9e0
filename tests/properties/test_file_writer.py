"""Whatever comes in whatever order: each row is in one file, of its partition, once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from filetools import Shelf, check_files, covers
from hypothesis import given, settings
from hypothesis import strategies as st

from oncely.errors import TableMismatch
from oncely.kinds.file_format import Format, Scope
from oncely.kinds.partitions import FileNames, directory, parse_partition_by
from oncely.kinds.staged_files import FileWriter, Origin

COLUMNS = parse_partition_by(("user", "date(ts)", "hour(ts)"))
HOUR = 3_600_000
USERS = st.sampled_from([None, "", ".", "../../etc", "é😀", "a", "b", "x" * 300])
TIMES = st.sampled_from([None, 0, 1, HOUR, 25 * HOUR, -1, 10**18])
BEYOND = 10**18  # milliseconds: the year 31 million


@dataclass
class Record:
    partition: int
    user: str | None
    ts: int | None
    rows: int


records = st.builds(Record, st.integers(0, 2), USERS, TIMES, st.integers(1, 3))


def table(rows: list[tuple[int, int, str | None, int | None, int]], grown: bool) -> pa.Table:
    columns = {
        "user": pa.array([user for _, _, user, _, _ in rows], pa.string()),
        "ts": pa.array([ts for _, _, _, ts, _ in rows], pa.int64()),
        "partition": pa.array([p for p, _, _, _, _ in rows], pa.int64()),
        "offset": pa.array([o for _, o, _, _, _ in rows], pa.int64()),
        "n": pa.array([n for *_, n in rows], pa.float64() if grown else pa.int64()),
    }
    if grown:
        more = pa.struct({"n": pa.int64()})
        columns["more"] = pa.array([{"n": n} for *_, n in rows], more)
    return pa.table(columns)


def values(user: str | None, ts: int | None) -> tuple[str | None, ...]:
    if ts is None:
        return user, None, None
    at = np.datetime64(ts, "ms")
    return user, str(at.astype("datetime64[D]")), f"{int(ts // HOUR % 24):02d}"


@settings(deadline=None)
@given(
    adds=st.lists(st.lists(records, max_size=12), max_size=5),
    grows=st.integers(0, 5),
    target=st.sampled_from([1, 300, 10_000]),
    memory=st.sampled_from([1, 500, 1_000_000]),
    format=st.sampled_from(["avro", "parquet"]),
    scope=st.sampled_from([(), None]),
    mixed=st.booleans(),
)
def test_each_row_is_in_one_file_of_its_partition(
    adds: list[list[Record]],
    grows: int,
    target: int,
    memory: int,
    format: Format,
    scope: Scope | None,
    mixed: bool,
) -> None:
    shelf = Shelf()
    store = shelf.store()
    writer = FileWriter(store, format, COLUMNS, target, memory, FileNames(3, 7, "t1"))
    wanted: dict[tuple[str | None, ...], list[tuple[int, int, int]]] = defaultdict(list)
    following = [0, 0, 0]
    for number, added in enumerate(adds):
        rows = []
        refused = []
        for record in added:
            offset = following[record.partition]
            following[record.partition] += 2  # transaction markers leave holes
            for n in range(record.rows):
                if record.ts == BEYOND:
                    refused.append(len(rows))
                else:
                    of = wanted[values(record.user, record.ts)]
                    of.append((record.partition, offset, n))
                rows.append((record.partition, offset, record.user, record.ts, n))
        origin = Origin(
            [("logs", p) for p in range(3)],
            np.array([row[0] for row in rows], np.int32),
            np.array([row[1] for row in rows], np.int64),
        )
        told = writer.add(table(rows, number >= grows), None if mixed else origin, scope)
        assert [row for row, _ in told] == refused
    receipt = writer.finish()
    found: dict[tuple[str | None, ...], list[tuple[int, int, int]]] = defaultdict(list)
    by_path = check_files(store, receipt)
    for file in receipt.files:
        partition = tuple(file.partition.values())
        assert file.path.startswith(directory(COLUMNS, partition) + "/")
        assert file.scope == (() if scope == () else (partition[0],))
        here = [(row["partition"], row["offset"], int(row["n"])) for row in by_path[file.path]]
        found[partition] += here
        for row in by_path[file.path]:
            assert values(row["user"], row["ts"]) == partition
        times = [row["ts"] * 1000 for row in by_path[file.path] if row["ts"] is not None]
        assert file.event_time == ((min(times), max(times)) if times else None)
        if mixed:
            assert file.ranges == []
        else:
            assert all(covers(file, "logs", p, offset) for p, offset, _ in here)
            assert sum(r.start < 0 for r in file.ranges) == 0
            assert here == sorted(here)
    assert {k: sorted(v) for k, v in found.items()} == {k: sorted(v) for k, v in wanted.items()}
    if not mixed:
        in_order_of_names(by_path)


def in_order_of_names(by_path: dict[str, list[dict[str, Any]]]) -> None:
    """Within a partition value, files of one topic-partition alone have its order by name."""
    last: dict[tuple[str, int], int] = {}
    for path in sorted(by_path):
        sources = {row["partition"] for row in by_path[path]}
        offsets = [row["offset"] for row in by_path[path]]
        key = (path.rpartition("/")[0], min(sources))
        if len(sources) == 1:
            # Not equal either: the rows of a record are in one file.
            assert last.get(key, -1) < offsets[0]
            last[key] = offsets[-1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), max_size=40, unique=True))
def test_a_shuffle_is_put_in_order(rows: list[tuple[int, int]]) -> None:
    shelf = Shelf()
    writer = FileWriter(shelf.store(), "avro", (), 10**6, 10**6, FileNames(1, 1, "t"))
    for row in rows:
        data = pa.table({"partition": [row[0]], "offset": [row[1]]})
        origin = Origin([("logs", row[0])], np.zeros(1, np.int32), np.array([row[1]]))
        assert writer.add(data, origin, ()) == []
    receipt = writer.finish()
    by_path = check_files(shelf.store(), receipt)
    assert len(by_path) == bool(rows)
    for here in by_path.values():
        for partition in range(3):
            of = [row["offset"] for row in here if row["partition"] == partition]
            assert of == sorted(offset for p, offset in rows if p == partition)
        assert {(r.partition, r.start) for file in receipt.files for r in file.ranges} == {
            (p, min(o for q, o in rows if q == p)) for p, _ in rows
        }


def test_a_group_is_written_when_it_is_full() -> None:
    shelf = Shelf()
    writer = FileWriter(shelf.store(), "avro", (), 100_000, 10**9, FileNames(1, 1, "t"))
    rng = np.random.default_rng(1)
    for _ in range(40):
        writer.add(pa.table({"n": rng.integers(0, 2**60, 1000)}), None, ())
    early = len(shelf.stored)
    receipt = writer.finish()
    assert early >= 2
    assert sum(file.rows for file in receipt.files) == 40_000
    assert all(50_000 < file.bytes < 150_000 for file in receipt.files[:early])


def test_the_largest_groups_make_room() -> None:
    shelf = Shelf()
    columns = parse_partition_by(("k",))
    writer = FileWriter(shelf.store(), "avro", columns, 10**9, 100_000, FileNames(1, 1, "t"))
    for _ in range(20):
        writer.add(pa.table({"k": ["large"] * 900 + ["small"] * 100}), None, ())
    files = writer.finish().files
    assert sum(file.rows for file in files) == 20_000
    by_key = {k: [f.rows for f in files if f.partition["k"] == k] for k in ("large", "small")}
    assert len(by_key["small"]) < len(by_key["large"])


def test_what_has_no_place_in_a_file_is_refused_at_once() -> None:
    shelf = Shelf()
    writer = FileWriter(shelf.store(), "avro", (), 1, 1, FileNames(1, 1, "t"))
    with pytest.raises(TableMismatch, match="'t'"):
        writer.add(pa.table({"t": pa.array([1], pa.time64("us"))}), None, ())
    assert shelf.stored == {}


def test_abandoned_files_are_deleted() -> None:
    shelf = Shelf()
    writer = FileWriter(shelf.store(), "avro", (), 1, 1, FileNames(1, 1, "t"))
    writer.add(pa.table({"a": [1, 2, 3]}), None, ())
    assert shelf.stored
    writer.abandon()
    assert shelf.stored == {}
