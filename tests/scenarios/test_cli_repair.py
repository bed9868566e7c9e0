"""`oncely repair` and `oncely backfill` on real servers, killed at every statement."""

from __future__ import annotations

import json
import signal
from collections import Counter
from typing import Any

import pytest

from oncely.audit import audit
from oncely.audit.report import Finding
from oncely.config import parse
from oncely.core.ranges import TopicPartition
from oncely.errors import SourceMismatch
from oncely.pipeline import Pipeline
from tests.scenarios import repair_jobs
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World, assert_exactly_once, assert_history, produce, verdict
from tests.scenarios.zygote import Zygote, kills

PARTITIONS, COUNT = 2, 40
BAD = b"not json"


@pytest.fixture
def world(make_world: Any, runtime: Any) -> World:
    """Forty records, two of them broken, all committed."""
    world: World = make_world(PARTITIONS)
    world.overrides = {"sink": {"max_rejects": 100}}
    world.publish(COUNT, partitions=PARTITIONS)
    produce(world.brokers, world.topic, [(0, b"k", BAD), (1, b"k", BAD)])
    world.run(runtime)
    assert_exactly_once(world, rejects=2)
    assert audit(Pipeline(parse(world.settings()))).verdict == "clean"
    return world


def damage(world: World) -> Counter[str]:
    """One of each kind, and a row beyond the position."""
    world.sql("DELETE FROM rows WHERE kafka_partition = 0 AND kafka_offset IN (3, 4, 11)")
    world.sql('DELETE FROM oncely_rejects WHERE "partition" = 1')
    world.sql(
        "INSERT INTO rows SELECT * FROM rows WHERE kafka_partition = 1 AND kafka_offset IN (2, 7)"
    )
    world.sql(
        "INSERT INTO rows (id, kafka_topic, kafka_partition, kafka_offset) VALUES (0, %s, 1, 99)",
        world.topic,
    )
    return Counter(lost=4, duplicated=2, unexpected=1)


def assert_each_once(world: World) -> None:
    """Each record is one row or one reject; rewritten rows are younger than the rows after them."""
    found = verdict(world)
    assert (found.lost, found.duplicated, found.invented) == ((), (), ())
    assert found.rejects == 2
    assert_history(world)


Rows = list[tuple[Any, ...]]


def content(world: World) -> Rows:
    return sorted(world.sql("SELECT kafka_partition, kafka_offset, id, grp, pad FROM rows"))


def test_repair(world: World) -> None:
    before, file = content(world), world.file()
    found = damage(world)
    damaged = content(world)
    plan = oncely_json("repair", file, expect=1)
    assert plan["offsets"] == found
    assert not plan["executed"]
    assert content(world) == damaged
    done = oncely_json("repair", file, "--execute")
    assert done["offsets"] == found
    assert done["audit"]["verdict"] == "clean"
    assert content(world) == before
    assert_each_once(world)
    assert "nothing to repair" in oncely("repair", file).stdout
    assert "clean" in oncely("repair", file, "--execute").stdout


def test_the_report_of_an_audit(world: World, tmp_path: Any) -> None:
    file, report = world.file(), tmp_path / "report.json"
    damage(world)
    report.write_text(oncely("audit", file, "--json", expect=1).stdout)
    short = json.loads(report.read_text())
    assert oncely_json("repair", file, "--report", report, "--execute")["offsets"]["lost"] == 4
    assert_each_once(world)
    again = oncely_json("repair", file, "--report", report, "--execute")
    assert (again["removed_rows"], again["removed_rejects"]) == (0, 0)
    assert len(again["impossible"]) == 7
    assert {
        "the audit of now does not find it" in one["reason"] for one in again["impossible"]
    } == {True}
    assert_each_once(world)
    short["lost"].pop()
    report.write_text(json.dumps(short))
    assert "lists 3 of 4 lost" in oncely("repair", file, "--report", report, expect=2).stderr
    report.write_text(json.dumps({**short, "pipeline": "other"}))
    assert (
        "is of the pipeline 'other'" in oncely("repair", file, "--report", report, expect=2).stderr
    )
    report.write_text("{}")
    assert "is not a report" in oncely("repair", file, "--report", report, expect=2).stderr
    missing = tmp_path / "none.json"
    assert "No such file" in oncely("repair", file, "--report", missing, expect=2).stderr


@pytest.mark.parametrize(
    "every",
    [False, pytest.param(True, marks=[pytest.mark.long, pytest.mark.deep])],
    ids=["each kind", "each"],
)
def test_killed_before_and_after_every_statement(world: World, zygote: Zygote, every: bool) -> None:
    settings, before = world.settings(), content(world)
    damage(world)
    damaged = content(world)
    kept = ("rows", "oncely_rejects", "oncely_amendments")
    for table in kept:
        world.sql(f"CREATE TABLE kept_{table} AS TABLE {table}")
    found = findings(world)
    calls = repaired(zygote, settings, found)
    assert calls.count("COMMIT") >= 3
    for kill in kills(calls, every=every):
        world.sql("DROP TABLE IF EXISTS oncely_removed")  # it is created again, as in the first run
        world.sql(
            ";".join(f"TRUNCATE {one}; INSERT INTO {one} SELECT * FROM kept_{one}" for one in kept)
        )
        died = zygote.run(repair_jobs.repair, settings, found, kill)
        assert died.signal == signal.SIGKILL, died.error
        assert_old_or_new(content(world), damaged, before)
        repaired(zygote, settings, found)
        assert content(world) == before
        assert_each_once(world)


def assert_old_or_new(rows: Rows, old: Rows, new: Rows) -> None:
    """Each record has the rows from before the rewrite, or those from after it."""
    for record in {row[:2] for row in (*rows, *old, *new)}:
        found, *allowed = ([row for row in some if row[:2] == record] for some in (rows, old, new))
        assert found in allowed, (record, found, allowed)


def findings(world: World) -> list[Any]:
    report = audit(Pipeline(parse(world.settings())), limit=1_000)
    return [(one.partition, one.offset, one.kind) for one in report.findings]


def repaired(zygote: Zygote, settings: dict[str, Any], found: list[Any]) -> Any:
    ended = zygote.run(repair_jobs.repair, settings, found, {})
    assert not ended.error, ended.error
    return ended.value


def test_records_that_the_topic_no_longer_has(world: World, broker: Any) -> None:
    file = world.file()
    damage(world)
    broker.delete_records(world.topic, {0: 5})
    lost = {"topic": world.topic, "partition": 0, "kind": "lost",
            "reason": "lost for good: the topic no longer has the record"}  # fmt: skip
    findings = [Finding(TopicPartition(world.topic, 0), at, "lost") for at in (3, 4, 11)]
    done = Pipeline(parse(world.settings())).repair(findings, execute=True)
    assert done.as_json()["impossible"] == [lost | {"offset": 3}, lost | {"offset": 4}]
    assert (done.offsets, done.done.counts.rows) == ({"lost": 1}, 1)
    refused = oncely("backfill", file, "--offsets", f"{world.topic}:0:2-9", expect=1)
    assert "no longer has offsets [2, 5)" in refused.stderr
    assert "begin at offset 5" in refused.stderr
    # Rows whose records are gone stay.
    rows = [Finding(TopicPartition(world.topic, 0), 2, "duplicated"),
            Finding(TopicPartition(world.topic, 0), 1, "unexpected"),
            Finding(TopicPartition("another", 0), 1, "unexpected"),
            Finding(None, None, "lost")]  # fmt: skip
    left = Pipeline(parse(world.settings())).repair(rows, execute=True)
    assert len(left.impossible) == 4
    assert left.done.removed_rows == 0


def test_a_topic_that_was_made_again(world: World, broker: Any) -> None:
    broker.delete_topic(world.topic)
    broker.create_topic(world.topic, PARTITIONS)
    findings = [Finding(TopicPartition(world.topic, 0), 3, "lost")]
    with pytest.raises(SourceMismatch):
        Pipeline(parse(world.settings())).repair(findings)


def test_beside_a_running_pipeline(world: World, runtime: Any) -> None:
    file = world.file()
    damage(world)
    world.publish(COUNT, partitions=PARTITIONS, first=COUNT)
    oncely("repair", file, "--execute", expect=0)
    world.run(runtime)
    assert_each_once(world)


# -- backfill --------------------------------------------------------------------------------------


def test_backfill(world: World) -> None:
    today = {"transform": {"sql": "SELECT id, upper(grp) AS grp, pad FROM input WHERE id % 5 <> 0"}}
    before, file = content(world), world.file(**today)
    range_ = f"{world.topic}:0:5-15"
    plan = oncely_json("backfill", file, "--offsets", range_)
    assert plan["ranges"] == [{"topic": world.topic, "partition": 0, "start": 5, "end": 15}]
    assert content(world) == before
    oncely_json("backfill", file, "--offsets", range_, "--execute")
    wanted = [
        (p, o, i, g.upper() if inside(p, o) else g, pad)
        for p, o, i, g, pad in before
        if not inside(p, o) or i % 5
    ]
    assert content(world) == wanted
    back = world.file()
    oncely_json("backfill", back, "--offsets", range_, "--execute")
    assert content(world) == before
    assert_each_once(world)


def inside(partition: int, offset: int) -> bool:
    return partition == 0 and 5 <= offset < 15


def test_backfill_of_a_time(world: World) -> None:
    world.sql("UPDATE rows SET grp = 'x'")
    world.sql("DELETE FROM oncely_rejects")
    file = world.file()
    oncely("backfill", file, "--from", "2020-01-01T00:00:00", "--execute")
    assert world.sql("SELECT count(*) FROM rows WHERE grp = 'x'") == [(0,)]
    assert_each_once(world)


def test_wrong_input_of_a_backfill(world: World) -> None:
    file = world.file()
    for arguments, said in (
        ((), "a backfill needs a range"),
        (("--from", "yesterday"), "--from: found 'yesterday'"),
        (("--offsets", "t:0"), "--offsets: found 't:0'"),
        (("--offsets", "t:0:5-5"), "--offsets: found 't:0:5-5'"),
        (("--offsets", "t:0:1-5", "--from", "2020-01-01"), "a backfill needs a range"),
        (("--offsets", "t:0:1-5"), "t-0: the pipeline's topics have no such partition"),
    ):
        assert said in oncely("backfill", file, *arguments, expect=2).stderr
