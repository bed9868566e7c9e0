"""``oncely.files.read`` on Spark: the manifest's rows, and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from oncely import files
from oncely.errors import ConfigError
from oncely.kinds.files.compact import compact
from oncely.kinds.files.maintenance import vacuum
from oncely.testing.servers.kafka import Broker
from tests.laketools import COLUMNS, T0, Lake, events, lake


@pytest.fixture
def own(broker: Broker, tmp_path: Path) -> Lake:
    return lake(broker, tmp_path)


def ids(frame: Any) -> list[int]:
    return sorted(row.id for row in frame.collect())


def test_rows_of_the_manifest(spark: Any, own: Lake) -> None:
    own.batch_of(events("ann", 0, 3), events("bob", 3, 2))
    own.batch_of(events("ann", 5, 2), form="parquet")
    own.file(events("ann", 100, 5))  # nobody names it
    own.topics.reader().settled()
    frame = files.read(spark, own.table)
    assert sorted(row.asDict()["id"] for row in frame.collect()) == list(range(7))
    assert ids(files.read(spark, own.table, where={"user": "ann"})) == [0, 1, 2, 5, 6]
    assert ids(files.read(spark, own.table, where={"user": "nobody"})) == []
    only = files.read(spark, own.table, columns=["user", "id"])
    assert only.columns == ["user", "id"]
    assert only.groupBy("user").count().orderBy("user").collect() == [("ann", 5), ("bob", 2)]
    with pytest.raises(ConfigError, match="no partition column"):
        files.read(spark, own.table, where={"id": "1"})


def test_types_and_columns_that_grew(spark: Any, own: Lake) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
    more = {"n": 1.5, "at": at, "local": at.replace(tzinfo=None), "day": at.date(), "raw": b"\0x",
            "deep": {"list": ["x", None]}}  # fmt: skip
    grown = pa.schema([
        *COLUMNS, ("n", pa.float64()), ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")), ("day", pa.date32()), ("raw", pa.binary()),
        ("deep", pa.struct({"list": pa.list_(pa.string())})),
    ])  # fmt: skip
    own.batch_of(events("ann", 0, 1))
    own.publish([own.file([{"id": 1, "user": "ann", "ts": T0, **more}], grown)], [grown])
    own.topics.reader().settled()
    frame = files.read(spark, own.table).orderBy("id")
    assert [kind for _, kind in frame.dtypes[3:]] == [
        "double", "timestamp", "timestamp_ntz", "date", "binary", "struct<list:array<string>>",
    ]  # fmt: skip
    first, second = (row.asDict(recursive=True) for row in frame.collect())
    assert all(first[name] is None for name in more)
    assert frame.where("at = timestamp'2026-01-02 03:04:05.000006Z'").count() == 1
    assert {name: second[name] for name in more if name != "at"} == {
        name: value for name, value in more.items() if name != "at"
    }


def test_a_reading_under_way_outlives_compaction_and_vacuum(spark: Any, own: Lake) -> None:
    for i in range(4):
        own.batch_of(events("ann", i * 5, 5))
    own.topics.reader().settled()
    for path in own.paths():
        own.age(path, 100_000)
    under_way = files.read(spark, own.table)  # has looked at the manifest
    assert compact(own.table).outputs == 1
    assert vacuum(own.table).for_readers == 4
    assert ids(under_way) == ids(files.read(spark, own.table)) == list(range(20))


def test_a_file_that_was_changed_fails_the_job(spark: Any, own: Lake) -> None:
    (file,) = own.batch_of(events("ann", 0, 3))
    own.topics.reader().settled()
    with (own.root / file.path).open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(Exception, match="its SHA-256 is"):
        files.read(spark, own.table).collect()


def test_many_files(spark: Any, own: Lake) -> None:
    own.publish([own.file(events(f"user {i}", i * 10, 10)) for i in range(500)])
    own.topics.reader().settled()
    frame = files.read(spark, own.table)
    assert frame.rdd.getNumPartitions() > 1
    assert frame.selectExpr("count(*) n", "sum(id) s").first() == (5_000, sum(range(5_000)))
