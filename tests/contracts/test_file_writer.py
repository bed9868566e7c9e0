"""A task's files on real stores: what a receipt names is there, what goes wrong leaves nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from filetools import Shelf, check_files

from oncely.errors import Stopped, Unavailable
from oncely.kinds.data_file import Receipt
from oncely.kinds.partitions import FileNames, parse_partition_by
from oncely.kinds.staged_files import FileWriter, Origin
from oncely.stores.objects.store import S3Options, Store
from tests.s3tools import S3Proxy, S3Server

COLUMNS = parse_partition_by(("user", "hour(ts)"))
USERS = ["../../etc", "", ".", "..", None, "😀 emoji/slash", "x" * 300, "\0", "%2E", "plain"]
ROWS = 5000


def new_writer(store: Store) -> FileWriter:
    return FileWriter(store, "avro", COLUMNS, 1 << 20, 300_000, FileNames(1, 1, "t0"))


def feed(writer: FileWriter, rows: int = ROWS) -> None:
    for start in range(0, rows, 500):
        offsets = np.arange(start, start + 500)
        table = pa.table(
            {
                "user": pa.array([USERS[n % len(USERS)] for n in offsets.tolist()], pa.string()),
                "ts": pa.array(offsets * 7_200_000),
                "n": pa.array(offsets),
            }
        )
        origin = Origin([("logs", 0)], np.zeros(500, np.int32), offsets)
        assert writer.add(table, origin, None) == []


def whole(writer: FileWriter) -> Receipt:
    feed(writer)
    return writer.finish()


def check(store: Store, receipt: Receipt, rows: int = ROWS) -> None:
    found = check_files(store, receipt)
    for file in receipt.files:
        for row in found[file.path]:
            assert row["user"] == USERS[row["n"] % len(USERS)] == file.partition["user"]
    assert sorted(row["n"] for here in found.values() for row in here) == list(range(rows))


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_hostile_users_on_a_real_store(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "folder":
        store = Store(f"file://{tmp_path}/lake/events")
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        store = Store(f"s3://{server.bucket()}/events", server.options())
    writer = new_writer(store)
    feed(writer)
    check(store, writer.finish())
    assert {path.name for path in tmp_path.iterdir()} <= {"lake"}


def test_an_s3_server_that_is_busy_now_and_then(s3_server: S3Server) -> None:
    with S3Proxy(s3_server) as proxy:
        options = s3_server.options(endpoint=proxy.endpoint, request_timeout=1.0)
        store = Store(f"s3://{s3_server.bucket()}", options)
        writer = new_writer(store)
        with proxy.fault("refuse", skip=5, times=20) as busy, proxy.fault(
            "cut request", skip=30, times=5
        ) as cut, proxy.fault("lose response", skip=50, times=5) as lost:  # fmt: skip
            feed(writer)
            receipt = writer.finish()
        assert all(fault.met.is_set() for fault in (busy, cut, lost))
        check(store, receipt)


def test_an_s3_server_that_stays_busy_fails_the_task(s3_server: S3Server) -> None:
    with S3Proxy(s3_server) as proxy:
        options = s3_server.options(endpoint=proxy.endpoint, retries=0)
        store = Store(f"s3://{s3_server.bucket()}", options)
        writer = new_writer(store)
        with proxy.fault("refuse", skip=20, times=10_000), pytest.raises(Unavailable):
            whole(writer)
        assert list(store.list())
        writer.abandon()
        assert list(store.list()) == []


@pytest.mark.parametrize("url", ["file:///shelf", "s3://bucket/x"])
def test_a_full_store_fails_the_task(url: str) -> None:
    full = OSError(28, "No space left on device")
    shelf = Shelf(fail={"write": [full]})
    store = shelf.store(url, S3Options() if url.startswith("s3") else None)
    writer = new_writer(store)
    with pytest.raises(Stopped, match="is full"):
        whole(writer)
    writer.abandon()
    assert shelf.stored == {}


def test_files_are_durable_before_they_are_told_of() -> None:
    shelf = Shelf()
    writer = new_writer(shelf.store())
    feed(writer)
    assert "sync" not in shelf.calls
    writer.finish()
    assert shelf.calls[-1] == "sync"


def test_a_lost_attempt_shares_no_name_with_the_next(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    lost, done = new_writer(store), new_writer(store)
    feed(lost)
    feed(done)
    receipt = done.finish()
    lost.finish()
    lost.abandon()
    check(store, receipt)


def test_the_last_file_that_fails_fails_the_task() -> None:
    shelf = Shelf(fail={"write": [OSError(28, "No space left on device")]})
    store = shelf.store("s3://bucket/x", S3Options())
    writer = FileWriter(store, "avro", (), 10**9, 10**9, FileNames(1, 1, "t"))
    writer.add(pa.table({"n": [1, 2]}), None, ())
    with pytest.raises(Stopped, match="is full"):
        writer.finish()


def test_a_record_of_which_a_row_is_rejected_is_not_written() -> None:
    shelf = Shelf()
    writer = FileWriter(shelf.store(), "avro", COLUMNS, 10**9, 10**9, FileNames(1, 1, "t"))
    rows = pa.table({"user": list("aabbc"), "ts": [0, 10**18, 0, 0, 0], "n": [0, 1, 2, 3, 4]})
    origin = Origin([("logs", 0)], np.zeros(5, np.int32), np.array([7, 7, 8, 8, 9]))
    assert [row for row, _ in writer.add(rows, origin, ())] == [1]
    found = check_files(shelf.store(), writer.finish())
    assert sorted(row["n"] for here in found.values() for row in here) == [2, 3, 4]
