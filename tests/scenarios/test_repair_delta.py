"""`oncely repair` and `oncely backfill` of Delta tables: each kind of damage, rivals, and kills.

Records are committed by the pipeline's sink, as its tasks do, without Spark.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from oncely.audit import Report, audit
from oncely.config import parse
from oncely.core.ranges import OffsetRange
from oncely.errors import Stopped, WrongInput
from oncely.kinds.delta.sink import DeltaSink
from oncely.pipeline import Pipeline
from oncely.pipeline.repair import Repaired
from tests.scenarios import repair_jobs
from tests.scenarios.commands import oncely_json
from tests.scenarios.test_audit_sinks import SinkWorld, world_of
from tests.scenarios.zygote import Zygote
from tests.sinktools import open_sink

__all__ = ["world_of"]

IDS = sorted([*range(20), *range(100, 110)])


@pytest.fixture
def world(world_of: Callable[[str], SinkWorld]) -> SinkWorld:
    """Four commits: two of partition 0, the second one with a reject, and two of partition 1."""
    return world_of("delta with sources")


def table(world: SinkWorld) -> Any:
    return world.sink.tables.load()


def rows(world: SinkWorld) -> pa.Table:
    return pa.table(table(world).to_pyarrow_table())


def ids(world: SinkWorld) -> list[int]:
    return sorted(rows(world)["id"].to_pylist())


def assert_whole(world: SinkWorld) -> None:
    report = world.audit()
    assert report.verdict == "clean", report.as_json()
    assert ids(world) == IDS
    assert len(world.pipeline.rejects(10).listed) == 1


def damage(world: SinkWorld) -> Counter[str]:
    """Each kind by another writer, and a file that is gone."""
    every = rows(world)
    root = world.given["url"]
    table(world).delete("id IN (3, 104)")
    write_deltalake(root, every.filter(pc.field("id") == 5), mode="append")
    strange = every.filter(pc.field("id") == 6)
    offset = every.schema.get_field_index("kafka_offset")
    beyond = strange.set_column(offset, "kafka_offset", pa.array([900], pa.int64()))
    write_deltalake(root, beyond, mode="append")
    table(world).update({"name": "'other'"}, predicate="id = 7")
    return Counter(lost=2, duplicated=1, unexpected=1, altered=1)


def repair(world: SinkWorld, report: Report, *, execute: bool = True) -> Repaired:
    return world.pipeline.repair(report.findings, execute=execute)


def test_a_table_is_repaired_to_clean_beside_a_run(world: SinkWorld) -> None:
    wanted = damage(world)
    report = world.audit()
    assert Counter(one.kind for one in report.findings) == wanted
    before = table(world).version()
    assert repair(world, report, execute=False).offsets == dict(wanted)
    assert table(world).version() == before
    shown = oncely_json("repair", world.file(), "--execute", expect=0)
    assert shown["impossible"] == []
    assert_whole(world)
    repair(world, report)  # the same findings again
    assert_whole(world)
    world.publish(range(300, 301))
    world.run()  # with the fence that it had
    assert ids(world) == [*IDS, 300]
    assert world.audit().verdict == "clean"


def test_a_position_that_was_moved_back(world: SinkWorld) -> None:
    """The rows beyond it are those of their records: it is the ledger that is wrong."""
    (number,) = {table(world).transaction_version(f"oncely/{world.name}")}
    root = Path(world.given["url"].removeprefix("file://"))
    document = root / "_oncely" / f"ledger-{world.name}" / f"{number}.json"
    found = json.loads(document.read_text())
    found["positions"][world.topic]["1"] -= 3
    document.write_text(json.dumps(found))
    report = world.audit()
    assert (report.verdict, report.found) == ("unknown", {})
    assert "does not account for 3 rows" in report.undecided[0].reason
    oncely_json("repair", world.file(), "--execute", expect=4)
    assert ids(world) == IDS


def test_a_pipeline_that_continues_under_another_name(world: SinkWorld) -> None:
    new = replace(world, name=f"{world.name}-new", batch=0)
    new.fence = open_sink(new.sink, new.ends(), new.pipeline.source.identity()).fence
    new.publish(range(300, 305))
    new.run()
    for one in (world, new):
        report = one.audit()
        assert (report.verdict, report.found) == ("clean", {})
        assert any("writes into the same table" in limit for limit in report.limits)
        oncely_json("repair", one.file(), "--execute")
    assert ids(new) == [*IDS, *range(300, 305)]


@pytest.mark.parametrize("how", ["gone", "cut", "emptied"])
def test_a_file_that_nobody_can_read(world: SinkWorld, how: str) -> None:
    path = Path(table(world).file_uris()[0].removeprefix("file://"))
    data = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(data[:-40] if how == "cut" else b"")
    report = world.audit()
    assert report.found["lost"] > 0
    assert repair(world, report).impossible == ()
    assert_whole(world)


def files(world: SinkWorld) -> list[Path]:
    return sorted(Path(one.removeprefix("file://")) for one in table(world).file_uris())


REWRITTEN: dict[str, Callable[[pa.Table], pa.Table]] = {
    "more rows": lambda rows: pa.concat_tables([rows, rows]),
    "fewer rows": lambda rows: rows.slice(1),
    "null": lambda rows: rows.set_column(0, "id", pa.nulls(len(rows), pa.int64())),
    "other column": lambda rows: rows.rename_columns(["x", *rows.column_names[1:]]),
    "nothing else": lambda rows: rows,
}


@pytest.mark.parametrize("how", REWRITTEN)
def test_a_file_that_was_rewritten_in_place_is_replaced_and_stops_nothing(
    world: SinkWorld, how: str
) -> None:
    path, gone, *_ = files(world)
    found = REWRITTEN[how](pq.ParquetFile(path).read())
    pq.write_table(found, path, compression="none", write_page_index=True)
    gone.unlink()
    report = world.audit()
    assert any(path.name in one for one in report.limits)
    shown = oncely_json("repair", world.file(), expect=1)
    assert sum(shown["offsets"].values()) == sum(report.found.values()) > 0
    assert oncely_json("repair", world.file(), "--execute", expect=0)["impossible"] == []
    assert_whole(world)
    assert not any(path.name in one for one in world.audit().limits)


def test_a_file_with_other_bytes_stays_and_stops_nothing_else(world: SinkWorld) -> None:
    """Nobody knows whether its rows are lost: only one that was cut is removed from the table."""
    path, other, *_ = files(world)
    write_deltalake(world.given["url"], pq.ParquetFile(other).read().slice(0, 2), mode="append")
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(len(data) - 12) + data[-8:])
    report = world.audit()
    assert report.found["duplicated"] == 2
    assert repair(world, report, execute=False).offsets == report.found
    done = repair(world, report)
    assert done.offsets == {"duplicated": 2}
    assert {one.found.kind for one in done.impossible} == {"lost"}
    assert len(done.impossible) == report.found["lost"] > 0
    (reason,) = {one.reason for one in done.impossible}
    assert f"{path.name}, which can't be read" in reason
    assert "restore it from a backup" in reason
    assert set(world.audit().found) == {"lost"}
    with pytest.raises(WrongInput, match="can't be read"):
        world.pipeline.backfill({world.tp(0): OffsetRange(0, 20)}, execute=True)
    path.unlink()
    assert repair(world, report).impossible == ()
    assert_whole(world)


def test_a_restore_that_lacks_nothing_is_refused_until_a_repair_has_seen_it(
    world: SinkWorld,
) -> None:
    """Another program has written the rows again."""
    every, version = rows(world), table(world).version()
    table(world).restore(version - 1)
    there = pa.array(rows(world)["id"].to_pylist())
    lacking = every.filter(pc.invert(pc.is_in(every["id"], there)))
    assert lacking.num_rows > 0
    write_deltalake(world.given["url"], lacking, mode="append")
    assert_whole(world)
    told = f"version {version + 1} of the table at sink.url is a RESTORE"
    shown = oncely_json("status", world.file(), expect=0)
    assert shown["verdict"] == "refused"
    assert told in shown["reason"]
    problems = oncely_json("plan", world.file(), expect=1)["problems"]
    assert any(told in one["message"] for one in problems)
    world.publish(range(300, 301))
    with pytest.raises(Stopped, match="is a RESTORE"):
        world.run()
    oncely_json("repair", world.file(), expect=0)
    assert oncely_json("status", world.file(), expect=0)["verdict"] == "refused"
    oncely_json("repair", world.file(), "--execute", expect=0)
    assert oncely_json("status", world.file(), expect=0)["verdict"] == "dead letters"
    assert oncely_json("plan", world.file(), expect=0)["problems"] == []
    world.run()
    assert ids(world) == [*IDS, 300]
    assert world.audit().verdict == "clean"


def test_another_commit_in_between(world: SinkWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(world)
    report = world.audit()
    commit, acted = DeltaSink.commit, []

    def late(self: DeltaSink, *args: Any) -> None:
        if not acted:
            acted.append(True)
            world.publish(range(300, 301))
            again = SinkWorld(world.brokers, world.topic, world.given, world.folder, world.name)
            repair(again, report)
        commit(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(DeltaSink, "commit", late)
        repair(world, report)
    assert acted
    world.run()
    assert ids(world) == [*IDS, 300]
    assert world.audit().verdict == "clean"


STEPS = {"write": 1, "commit": 1}


@pytest.mark.parametrize(
    ("call", "when"),
    [
        pytest.param(
            call, when, marks=() if (call, when) == ("commit", "before") else pytest.mark.long
        )
        for call in STEPS
        for when in ("before", "after")
    ],
)
def test_killed_and_repeated(world: SinkWorld, zygote: Zygote, call: str, when: str) -> None:
    damage(world)
    report = world.audit()
    found = report.findings
    told = [(one.partition, one.offset, one.kind) for one in found]
    ended = zygote.run(repair_jobs.repair_delta, world.settings, told, STEPS[call], call, when)
    assert ended.signal == signal.SIGKILL, ended.error
    assert repair(world, report).impossible == ()
    assert_whole(world)


def test_a_backfill(world: SinkWorld) -> None:
    sql = {"sql": "SELECT id + 1000 AS id, name FROM input WHERE id % 2 = 0"}
    today = Pipeline(parse({**world.settings, "transform": sql}))
    wanted = {world.tp(0): OffsetRange(0, 4)}
    assert today.backfill(wanted).ranges == wanted
    assert ids(world) == IDS
    today.backfill(wanted, execute=True)
    assert ids(world) == sorted([1000, 1002, *(n for n in IDS if n > 3)])
    assert audit(today).found == {}
    today.backfill(wanted, execute=True)
    assert ids(world) == sorted([1000, 1002, *(n for n in IDS if n > 3)])
    everything = {world.tp(0): OffsetRange(0, 1 << 40)}
    today.backfill(everything, execute=True)
    assert ids(world) == sorted([*range(100, 110), *range(1000, 1020, 2)])
    assert len(world.pipeline.rejects(10).listed) == 1
    assert audit(today).found == {}
