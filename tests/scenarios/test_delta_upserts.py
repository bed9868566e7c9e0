"""`oncely audit` and `oncely repair` of a Delta table by upserts: of each key the newest row.

Records are committed by the pipeline's sink, as its tasks do, without Spark. Other writers are
delta-rs and the file system.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, write_deltalake

from oncely.audit import Report
from oncely.config import parse
from oncely.core.batch import Chunk
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import ConfigError
from oncely.kinds.delta.sink import DeltaSink
from oncely.pipeline import Pipeline
from oncely.pipeline.repair import Repaired
from oncely.testing.servers.kafka import Broker
from tests.audittools import BAD, found, parts_of
from tests.scenarios import repair_jobs
from tests.scenarios.commands import oncely_json
from tests.scenarios.test_audit_sinks import SinkWorld
from tests.scenarios.world import produce
from tests.scenarios.zygote import Zygote
from tests.sinktools import Rec, chunk, open_sink, rec

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("name", pa.string())])


@dataclass
class UpsertWorld(SinkWorld):
    """Records with the key ``{"id": n}``; a record without a value is a tombstone.

    Attributes:
        late: keys of records that a run rejects, and a replay does not.
    """

    late: tuple[int, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        decode = {
            "format": "json",
            "schema": "id BIGINT NOT NULL, v BIGINT, name STRING",
            "key": {"format": "json", "schema": "id BIGINT NOT NULL"},
        }
        return {**super().settings, "decode": decode}

    def put(self, *changes: tuple[int, int | None], partition: int = 0) -> None:
        """Records of (key, version), or tombstones."""
        records = [
            (
                partition,
                json.dumps({"id": key}).encode(),
                None if v is None else json.dumps(row(key, v)).encode(),
            )
            for key, v in changes
        ]
        produce(self.brokers, self.topic, records)

    def record(self, message: Any) -> Rec:
        if message.value() is None:
            return Rec(message.offset(), deletes=json.loads(message.key()), value=None)
        one = {} if message.value() == BAD else json.loads(message.value())
        if not one or one["id"] in self.late:
            kept = parts_of(message)
            return Rec(message.offset(), bad="no JSON", **kept)
        return rec(message.offset(), **one)

    def chunk(self, tp: TopicPartition, at: int, records: list[Rec]) -> Chunk:
        return chunk({tp: (at, records)}, SCHEMA, ["id"])

    # -- the table, as others see it -------------------------------------------------------

    @property
    def table(self) -> Any:
        return self.sink.tables.load()

    def rows(self) -> list[tuple[Any, ...]]:
        """Key, version and offset of each row."""
        every = pa.table(self.table.to_pyarrow_table()).to_pylist()
        assert all(one["name"] == f"{one['id']} at {one['v']}" for one in every)
        return sorted((one["id"], one["v"], one["kafka_offset"]) for one in every)

    def add(self, *rows: tuple[int, int, str, int | None]) -> None:
        """Rows of another writer: key, version, name, offset in partition 0."""
        lines = [
            {
                "id": key, "v": v, "name": name,
                "kafka_topic": None if at is None else self.topic,
                "kafka_partition": None if at is None else 0, "kafka_offset": at,
            }
            for key, v, name, at in rows
        ]  # fmt: skip
        schema = pa.schema(self.table.schema().to_arrow())
        write_deltalake(self.given["url"], pa.Table.from_pylist(lines, schema), mode="append")


def row(key: int, v: int) -> dict[str, Any]:
    return {"id": key, "v": v, "name": f"{key} at {v}"}


@pytest.fixture
def world(broker: Broker, make_topic: Callable[..., str], tmp_path: Path) -> Iterator[UpsertWorld]:
    """Keys 0 to 9 twice, key 3 deleted, key 4 deleted and there again, a dead letter."""
    sink = {
        "kind": "delta", "url": (tmp_path / "table").as_uri(), "mode": "upsert", "keys": ["id"],
        "version": "v", "keep_source": True,
    }  # fmt: skip
    world = UpsertWorld(broker.bootstrap, make_topic(partitions=2), sink, tmp_path)
    world.put(*((key, 1) for key in range(10)))  # offsets 0 to 9
    world.put((3, None), (4, None))  # 10, 11
    world.put(*((key, 2) for key in (4, 5, 6)))  # 12, 13, 14
    produce(world.brokers, world.topic, [(0, b'{"id": 1}', BAD)])  # 15
    world.put((5, 1))  # 16: older than what is there
    world.put(*((key, 1) for key in range(20, 25)), partition=1)
    world.run()
    yield world
    world.sink.close()


WHOLE = [(0, 1, 0), (1, 1, 1), (2, 1, 2), (4, 2, 12), (5, 2, 13), (6, 2, 14), (7, 1, 7),
         (8, 1, 8), (9, 1, 9), *((key, 1, key - 20) for key in range(20, 25))]  # fmt: skip


def damage(world: UpsertWorld) -> dict[str, list[tuple[int, int]]]:
    """Each kind, by other writers."""
    once = CommitProperties(custom_metadata={"userName": "mallory"})
    world.table.delete("id IN (7, 21)", commit_properties=once)
    world.table.update({"name": "'other'"}, predicate="id = 8")
    world.table.update({"id": "80"}, predicate="id = 9")  # another key
    world.table.update({"v": "99"}, predicate="id = 2")  # another version
    world.table.delete("id = 5")
    world.add((5, 1, "5 at 1", 5))  # the row of an older record
    world.add((3, 1, "3 at 1", 3))  # of a deleted key
    world.add((6, 2, "6 at 2", 14))  # a copy
    world.add((77, 1, "77 at 1", 99), (78, 1, "78 at 1", 15))  # of no record, of a dead letter
    return {
        "altered": [(0, 2), (0, 8), (0, 9), (0, 13)],
        "duplicated": [(0, 14)],
        "lost": [(0, 7), (1, 1)],
        "unexpected": [(0, 3), (0, 15), (0, 99)],
    }


def assert_whole(world: UpsertWorld) -> None:
    report = world.audit()
    assert report.verdict == "clean", report.as_json()
    assert world.rows() == WHOLE
    assert [one.offset for one in world.pipeline.rejects(10).listed] == [15]


def repair(world: UpsertWorld, report: Report) -> Repaired:
    return world.pipeline.repair(report.findings, execute=True)


def test_clean(world: UpsertWorld) -> None:
    report = world.audit()
    assert (report.verdict, report.found, report.undecided) == ("clean", {}, [])
    assert (report.records, report.accounted, report.limits) == (22, 22, [])
    world.table.optimize.compact()
    assert all(not one.differing for one in world.audit().partitions)


def test_each_kind_of_damage_is_named_and_repaired_beside_a_run(world: UpsertWorld) -> None:
    wanted = damage(world)
    report = world.audit()
    assert found(report) == wanted
    assert any("DELETE" in one and "mallory" in one for one in report.limits), report.limits
    shown = oncely_json("repair", world.file(), "--execute", expect=0)
    assert shown["impossible"] == []
    assert_whole(world)
    repair(world, report)  # the same findings again
    assert_whole(world)
    world.put((7, 5), (8, None))
    world.run()  # with the fence that it had
    after = [one for one in world.rows() if one[0] in (7, 8)]
    assert after == [(7, 5, 17)]
    repair(world, report)  # an old report replaces no newer row, and restores no deleted key
    assert [one for one in world.rows() if one[0] in (7, 8)] == after
    assert world.audit().verdict == "clean"


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_a_killed_repair_is_repeated(world: UpsertWorld, zygote: Zygote, when: str) -> None:
    wanted = damage(world)
    report = world.audit()
    told = [(one.partition, one.offset, one.kind) for one in report.findings]
    before = world.table.version()
    ended = zygote.run(repair_jobs.repair_delta, world.settings, told, 1, "commit", when)
    assert ended.signal == signal.SIGKILL, ended.error
    assert world.table.version() == before + (when == "after")
    left = {"lost": [(1, 1)], "unexpected": [(0, 99)]}  # of the transactions that follow
    assert found(world.audit()) == (wanted if when == "before" else left)
    assert repair(world, report).impossible == ()
    assert_whole(world)


def largest(world: UpsertWorld) -> Path:
    (found,) = [
        Path(one["path"])
        for one in pa.table(world.table.get_add_actions(flatten=True)).to_pylist()
        if one["num_records"] == 9
    ]
    return Path(world.given["url"].removeprefix("file://")) / found


def test_a_file_that_was_rewritten_in_place(world: UpsertWorld) -> None:
    """A merge reads all files by the sizes that the table names."""
    path = largest(world)
    rows = pq.ParquetFile(path).read()
    rows = pa.concat_tables([rows.slice(1, 1), rows.slice(1)])
    pq.write_table(rows, path, compression="none", write_page_index=True)
    report = world.audit()
    assert found(report).keys() == {"lost", "duplicated"}
    assert repair(world, report).impossible == ()
    assert_whole(world)


def test_with_a_file_of_other_bytes_nothing_is_merged(world: UpsertWorld) -> None:
    path = largest(world)
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(len(data) - 12) + data[-8:])
    report, before = world.audit(), world.table.version()
    done = repair(world, report)
    assert len(done.impossible) == report.found["lost"] > 0
    assert {path.name in one.reason for one in done.impossible} == {True}
    assert world.table.version() == before
    path.unlink()
    assert repair(world, report).impossible == ()
    assert_whole(world)


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_file_that_nobody_can_read(world: UpsertWorld, how: str) -> None:
    path = largest(world)
    path.write_bytes(path.read_bytes()[:-40]) if how == "cut" else path.unlink()
    report = world.audit()
    assert found(report) == {"lost": [(0, at) for at in (0, 1, 2, 7, 8, 9, 12, 13, 14)]}
    assert repair(world, report).impossible == ()
    assert_whole(world)


def test_a_run_and_another_repair_in_between(
    world: UpsertWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(world)
    report = world.audit()
    commit, acted = DeltaSink.commit, []

    def late(self: DeltaSink, *args: Any) -> None:
        if not acted:
            acted.append(True)
            world.put((8, 5))
            world.run()
            repair(UpsertWorld(world.brokers, world.topic, world.given, world.folder, world.name),
                   report)  # fmt: skip
        commit(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(DeltaSink, "commit", late)
        repair(world, report)
    assert acted
    kept = [one for one in WHOLE if one[0] != 8]
    assert world.rows() == sorted([*kept, (8, 5, 17)])
    assert world.audit().verdict == "clean"


def test_a_replayed_dead_letter_may_restore_a_deleted_key(world: UpsertWorld) -> None:
    world.late = (30,)
    world.put((30, 1), (30, None))
    world.run()
    assert world.audit().verdict == "clean"
    assert world.pipeline.replay() == (1, 1)
    report = world.audit()
    assert (report.verdict, report.found) == ("unknown", {})
    assert "replayed dead letters" in report.undecided[0].reason


def test_another_pipeline_of_the_same_topic(world: UpsertWorld) -> None:
    """Each is audited, and repaired, beside the rows of the other."""
    other = UpsertWorld(world.brokers, world.topic, world.given, world.folder)
    open_sink(other.sink, other.ends(), other.pipeline.source.identity())
    world.put((1, 0), (2, 9), (8, None), (50, 1))  # offsets 17 to 20
    other.run()
    after = sorted([*(one for one in WHOLE if one[0] not in (2, 8)), (2, 9, 18), (50, 1, 20)])
    assert other.rows() == after
    report = other.audit()
    assert (report.verdict, report.undecided) == ("clean", []), report.as_json()
    report = world.audit()
    assert (report.verdict, report.found) == ("unknown", {}), report.as_json()
    assert [one.range for one in report.undecided] == [OffsetRange(8, 9)]
    assert "may have deleted them" in report.undecided[0].reason
    world.table.delete("id = 50")
    report = other.audit()
    assert found(report) == {"lost": [(0, 20)]}  # nothing later may have deleted it
    repair(other, report)
    assert other.rows() == after
    other.sink.close()


def test_a_backfill(world: UpsertWorld) -> None:
    """Later versions and deleted keys stay."""
    sql = {"sql": "SELECT id, v, name || '!' AS name FROM input"}
    today = Pipeline(parse({**world.settings, "transform": sql}))
    wanted = {world.tp(0): OffsetRange(0, 10)}
    today.backfill(wanted, execute=True)
    names = [one["name"] for one in pa.table(world.table.to_pyarrow_table()).to_pylist()]
    assert sorted(one for one in names if one.endswith("!")) == [
        f"{key} at 1!" for key in (0, 1, 2, 7, 8, 9)
    ]
    world.pipeline.backfill(wanted, execute=True)
    assert_whole(world)


def test_what_is_needed(world: UpsertWorld) -> None:
    sink = {key: value for key, value in world.settings["sink"].items() if key != "version"}
    with pytest.raises(ConfigError, match=r"sink\.version"):
        Pipeline(parse({**world.settings, "sink": sink})).repair([])
