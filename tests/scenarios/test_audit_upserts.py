"""`oncely audit` of upserts on real servers: of each key the newest row, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from oncely.config import parse
from oncely.core.batch import Chunk
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import WrongInput
from oncely.kinds.sql.sink import SqlSink
from oncely.pipeline import Pipeline
from oncely.testing.servers.kafka import Broker
from tests.audittools import BAD, AuditWorld, Kept, Parts, found, parts_of
from tests.scenarios.commands import oncely_json
from tests.sinktools import Place, Rec, chunk, rec, sink_to

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("name", pa.string())])


@dataclass
class UpsertWorld(AuditWorld):
    """Records with the key ``{"id": n}``; a record without a value is a tombstone."""

    version: str | None = None

    @property
    def sink(self) -> SqlSink:
        return sink_to(
            self.place, SCHEMA, pipeline=self.pipeline, keys=["id"], version=self.version,
            keep_source=True,
        )  # fmt: skip

    def put(self, *changes: tuple[int, int | None], partition: int = 0) -> None:
        """Records of (key, version), or tombstones."""
        values = [None if v is None else self.row(key, v) for key, v in changes]
        keys = [json.dumps({"id": key}).encode() for key, _ in changes]
        self.produce([(partition, key, v) for key, v in zip(keys, values, strict=True)])

    @staticmethod
    def row(key: int, v: int) -> bytes:
        return json.dumps({"id": key, "v": v, "name": f"{key} at {v}"}).encode()

    def record(self, message: Any) -> Rec:
        if message.value() is None:
            return Rec(message.offset(), deletes=json.loads(message.key()), value=None)
        if message.value() == BAD:
            return Rec(message.offset(), bad="no JSON", **parts_of(message))
        return rec(message.offset(), **json.loads(message.value()))

    def chunk(self, tp: TopicPartition, at: int, records: Sequence[Rec]) -> Chunk:
        return chunk({tp: (at, records)}, SCHEMA, ["id"])

    def settings(self, **sections: Any) -> dict[str, Any]:
        own = {"mode": "upsert", "keys": ["id"]}
        if self.version:
            own["version"] = self.version
        decode = {
            "schema": "id BIGINT NOT NULL, v BIGINT, name STRING",
            "key": {"format": "json", "schema": "id BIGINT NOT NULL"},
        }
        return super().settings(**{"sink": own, "decode": decode, **sections})


def keys_twice(world: UpsertWorld) -> UpsertWorld:
    """Keys 0 to 9, some of them again, key 3 deleted, key 4 deleted and there again."""
    world.put(*((key, 1) for key in range(10)))  # offsets 0 to 9
    world.put((3, None), (4, None))  # 10, 11
    world.put(*((key, 2) for key in (4, 5, 6)))  # 12, 13, 14
    world.produce([(0, b'{"id": 1}', BAD)])  # 15
    world.put(*((key, 1) for key in range(20, 25)), partition=1)
    world.run()
    return world


@pytest.fixture(scope="module")
def committed(parts: Callable[..., Parts]) -> Kept[UpsertWorld]:
    return Kept(keys_twice(UpsertWorld(*parts(2))))


@pytest.fixture
def world(committed: Kept[UpsertWorld]) -> Iterator[UpsertWorld]:
    """:func:`keys_twice`; the test may change rows of all tables."""
    with committed as world:
        yield world


def test_clean(world: UpsertWorld) -> None:
    report = world.audit()
    assert (report.verdict, report.found, report.undecided) == ("clean", {}, [])
    assert (report.records, report.accounted, report.holes) == (21, 21, 0)
    assert [one.compared.end for one in report.partitions] == [16, 5]
    assert all(not one.differing for one in report.partitions)


def test_records_that_a_reset_passed_over_are_not_lost(
    broker: Broker, make_topic: Callable[..., str], on_sqlite: Place, tmp_path: Path
) -> None:
    world = UpsertWorld(broker.bootstrap, on_sqlite, make_topic(), tmp_path)
    world.put(*((key, 1) for key in range(5)))
    world.run()
    world.put((1, 2), (30, 1), (2, 2))  # offsets 5 to 7
    world.reset({world.tp(): 7})
    world.run()
    report = world.audit()
    assert (report.verdict, report.records, report.holes) == ("clean", 6, 0), report.as_json()


def test_a_lost_row(world: UpsertWorld) -> None:
    world.sql("DELETE FROM rows WHERE id IN (5, 8)")
    report = world.audit()
    assert found(report) == {"lost": [(0, 8), (0, 13)]}
    assert (report.records, report.accounted) == (21, 19)


def test_altered_values(world: UpsertWorld) -> None:
    world.sql("UPDATE rows SET name = 'other' WHERE id IN (8, 21)")
    assert found(world.audit()) == {"altered": [(0, 8), (1, 1)]}


def test_an_older_row_of_the_key(world: UpsertWorld) -> None:
    world.sql("UPDATE rows SET v = 1, name = '5 at 1', kafka_offset = 5 WHERE id = 5")
    report = world.audit()
    assert found(report) == {"altered": [(0, 13)]}
    assert "older record of the key, offset 5" in report.findings[0].detail


def test_a_deleted_key_that_is_there(world: UpsertWorld) -> None:
    topic = world.topic
    world.sql("INSERT INTO rows VALUES (3, 1, '3 at 1', ?, 0, 3)", topic)
    report = world.audit()
    assert found(report) == {"unexpected": [(0, 3)]}
    assert "offset 10 deletes its key" in report.findings[0].detail


def test_unexpected_rows(world: UpsertWorld) -> None:
    world.sql("INSERT INTO rows VALUES (77, 1, 'x', ?, 0, 99)", world.topic)
    world.sql("INSERT INTO rows VALUES (78, 1, 'x', ?, 0, 15)", world.topic)
    world.sql("INSERT INTO rows VALUES (79, 1, 'x', NULL, NULL, NULL)")
    assert sorted(found(world.audit())["unexpected"]) == [(-1, None), (0, 15), (0, 99)]


def test_a_lost_dead_letter(world: UpsertWorld) -> None:
    world.sql("DELETE FROM oncely_rejects")
    assert found(world.audit()) == {"lost": [(0, 15)]}


def test_versions(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path
) -> None:
    """A later record with a lower version has no effect."""
    world = UpsertWorld(broker.bootstrap, place, make_topic(), tmp_path, version="v")
    world.put((1, 5), (2, 5), (1, 3), (2, 7), (3, 1), (3, None), (3, 0))
    world.run(size=2)
    assert world.sql("SELECT id, kafka_offset FROM rows ORDER BY id") == [(1, 0), (2, 3), (3, 6)]
    assert world.audit().verdict == "clean"
    world.sql("UPDATE rows SET v = 3, name = '1 at 3', kafka_offset = 2 WHERE id = 1")
    assert found(world.audit()) == {"altered": [(0, 0)]}


def test_a_key_of_two_partitions(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path
) -> None:
    """Without a version it is not known which record is the newest."""
    world = keys_twice(UpsertWorld(broker.bootstrap, place, make_topic(partitions=2), tmp_path))
    world.put((21, 9), partition=0)
    world.run()
    report = world.audit()
    assert report.verdict == "unknown"
    assert "several partitions" in report.undecided[0].reason


@pytest.fixture
def alone(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path
) -> UpsertWorld:
    """Keys 0 to 6 with a version of 100."""
    world = UpsertWorld(broker.bootstrap, place, make_topic(), tmp_path, version="v")
    world.put(*((key, 100) for key in range(7)))
    world.run()
    return world


ROWS = "SELECT id, v FROM rows ORDER BY id"
LATER = (1, 50), (2, 200), (3, None), (10, 1)
AFTER_THEM = [(0, 100), (1, 100), (2, 200), (4, 100), (5, 100), (6, 100), (10, 1)]


def test_another_pipeline_of_the_same_topic(alone: UpsertWorld) -> None:
    """It was renamed, and began at the end: each is audited beside the rows of the other."""
    renamed = replace(alone, pipeline=f"{alone.pipeline}-new")
    renamed.open(renamed.ends())
    renamed.put(*LATER)
    renamed.run()
    assert alone.sql(ROWS) == AFTER_THEM
    report = renamed.audit()
    assert (report.verdict, report.undecided) == ("clean", []), report.as_json()
    report = alone.audit()
    assert (report.verdict, report.found) == ("unknown", {}), report.as_json()
    assert [one.range for one in report.undecided] == [OffsetRange(3, 4)]
    assert "another pipeline" in report.undecided[0].reason
    shown = oncely_json("repair", alone.file(), "--execute", expect=4)
    assert shown["impossible"] == []
    assert alone.sql(ROWS) == AFTER_THEM
    Pipeline(parse(alone.settings())).backfill({alone.tp(): OffsetRange(1, 4)}, execute=True)
    assert alone.sql(ROWS) == sorted([*AFTER_THEM, (3, 100)])  # the way back
    alone.sql("DELETE FROM rows WHERE id IN (0, 3, 10)")
    assert found(renamed.audit()) == {"lost": [(0, 10)]}  # nothing later may have deleted it
    report = alone.audit()
    assert [one.range for one in report.undecided] == [OffsetRange(0, 4)]


def test_another_pipeline_without_versions(
    broker: Broker, make_topic: Callable[..., str], on_sqlite: Place, tmp_path: Path
) -> None:
    """Of one partition the later record is the newer one."""
    first = UpsertWorld(broker.bootstrap, on_sqlite, make_topic(), tmp_path)
    first.put((1, 1), (2, 1), (3, 1))
    first.run()
    second = replace(first, pipeline=f"{first.pipeline}-new")
    second.open(second.ends())
    second.put((1, 0), (2, None))
    second.run()
    third = replace(first, pipeline=f"{first.pipeline}-3", topic=make_topic())
    third.put((3, 5))
    third.run()
    assert second.audit().verdict == "clean"
    report = first.audit()
    assert (report.verdict, report.found) == ("unknown", {}), report.as_json()
    places = [(one.range, "deleted them" in one.reason) for one in report.undecided]
    assert places == [(OffsetRange(1, 2), True), (OffsetRange(2, 3), False)]


def test_another_pipeline_of_another_topic(
    alone: UpsertWorld, make_topic: Callable[..., str]
) -> None:
    other = replace(alone, pipeline=f"{alone.pipeline}-2", topic=make_topic())
    other.put(*LATER, (4, None), (4, 60), (5, 100))
    other.run()
    alone.put((4, 55), (4, None), (4, 10))
    alone.run()
    for world in (alone, other):
        report = world.audit()
        assert not report.found, report.as_json()
    report = alone.audit()
    assert [one.range for one in report.undecided] == [OffsetRange(3, 4), OffsetRange(5, 6)]
    assert "nothing tells" in report.undecided[1].reason


def test_a_row_of_a_lower_version_after_a_deletion_of_another_pipeline(
    alone: UpsertWorld, make_topic: Callable[..., str]
) -> None:
    other = replace(alone, pipeline=f"{alone.pipeline}-2", topic=make_topic())
    other.put((1, None))
    other.run()
    alone.put((1, 50))
    alone.run()
    report = alone.audit()
    assert (report.verdict, report.found) == ("unknown", {}), report.as_json()


def test_rows_beside_a_history_without_its_beginning(alone: UpsertWorld) -> None:
    alone.put(*LATER)
    alone.run()
    alone.sql("DELETE FROM oncely_ranges WHERE range_start = 0")
    report = alone.audit()
    assert (report.verdict, report.found) == ("unknown", {}), report.as_json()
    alone.sql("DELETE FROM rows WHERE id = 10")
    assert found(alone.audit()) == {"lost": [(0, 10)]}


def test_a_row_that_was_there_before(alone: UpsertWorld) -> None:
    """It names no record, and a record of a lower version has rightly not replaced it."""
    alone.sql("INSERT INTO rows VALUES (20, 9, 'loaded', NULL, NULL, NULL)")
    alone.put((20, 5))
    alone.run()
    assert found(alone.audit()) == {"unexpected": [(-1, None)]}


def test_rows_beyond_a_position_that_went_back(alone: UpsertWorld) -> None:
    alone.put(*LATER)
    alone.run()
    alone.sql('UPDATE oncely_positions SET "position" = 7')
    report = alone.audit()
    assert (report.verdict, report.found) == ("unknown", {}), report.as_json()


def test_deleted_records(
    broker: Broker, make_topic: Callable[..., str], place: Place, tmp_path: Path
) -> None:
    world = keys_twice(UpsertWorld(broker.bootstrap, place, make_topic(partitions=2), tmp_path))
    broker.delete_records(world.topic, {0: 6})
    report = world.audit()
    assert (report.verdict, report.found) == ("unknown", {})
    assert "no longer holds" in " ".join(one.reason for one in report.undecided)


def test_a_transform_that_changed_since(world: UpsertWorld) -> None:
    sections = {"transform": {"sql": "SELECT id, v, name || '!' AS name FROM input"}}
    report = world.audit(sections=sections)
    assert (report.verdict, report.found) == ("unknown", {})


def test_up_to_a_time_is_refused(world: UpsertWorld) -> None:
    with pytest.raises(WrongInput, match="up to a time"):
        world.audit(until=datetime.now(UTC))
