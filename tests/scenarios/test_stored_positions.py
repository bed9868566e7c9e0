"""Weaker deliveries on Spark: positions in a store, shown, reset, and held by the newest run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from oncely.config import parse
from oncely.core import events
from oncely.errors import Fenced, SourceMismatch
from oncely.kafka.reset import Verb
from oncely.pipeline import Pipeline
from oncely.testing.processes import await_that
from oncely.threads import StopSignal
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.topic_world import TopicWorld
from tests.scenarios.world import World, toml


def pipeline(world: World, delivery: str, offsets: dict[str, Any], **top: Any) -> Pipeline:
    return Pipeline(parse(world.settings(offsets=offsets) | {"delivery": delivery, **top}))


def stored(world: World, folder: Path) -> dict[str, Any]:
    """[offsets] of a file store."""
    return {"store": "file", "path": str(folder / "positions")}


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(2)
    world.publish(100, partitions=2)
    return world


def ids(world: World) -> list[int]:
    return [i for (i,) in world.sql("SELECT id FROM rows ORDER BY 1")]


@pytest.mark.parametrize(
    ("delivery", "store"),
    [
        ("none", "ledger"),
        ("none", "kafka"),
        ("at_most_once", "ledger"),
        ("at_most_once", "file"),
        ("at_least_once", "kafka"),
        ("at_least_once", "sql"),
    ],
)
def test_without_a_crash_nothing_is_lost_or_doubled(
    world: World, runtime: Any, tmp_path: Path, delivery: str, store: str, database: str
) -> None:
    more = {"file": stored(world, tmp_path), "sql": {"store": "sql", "url": database}}
    offsets = more.get(store, {"store": store})
    for first in (0, 100):
        if first:
            world.publish(100, partitions=2, first=first)
        one = pipeline(world, delivery, offsets, commit_interval=30)
        assert one.run("latest", spark=runtime)
        assert [s.position for s in one.status().partitions] == [(first + 100) // 2] * 2
        assert [s.lag for s in one.status().partitions] == [0, 0]
    assert ids(world) == [*range(200)]
    assert pipeline(world, delivery, offsets).status().epoch == 2
    standing = pipeline(world, delivery, offsets).partition_offsets()
    assert [one.mirrored for one in standing] == [100, 100], "and lag tools see it"


def test_to_topics_with_a_store(make_topic_world: Any, runtime: Any, tmp_path: Path) -> None:
    """No ledger topic is made, or asked for: it has nothing to hold."""
    world: TopicWorld = make_topic_world(2)
    world.publish(100, partitions=2, bad_every=50)
    one = pipeline(world, "at_least_once", stored(world, tmp_path))
    plan = one.plan(use_spark=False)
    assert plan.problems == ()
    assert not [text for text in (*plan.ddl, *plan.acls) if world.ledger in text]
    assert not [text for text in plan.acls if "--transactional-id" in text]
    one.run("latest", spark=runtime)
    assert len(world.ids()) == 98
    assert len(world.records(world.rejects)) == 2
    assert not world.exists(world.ledger)
    assert [s.position for s in one.status().partitions] == [50, 50]


def test_status_plan_and_reset(world: World, runtime: Any, tmp_path: Path) -> None:
    top = {"delivery": "at_least_once"}
    file = tmp_path / "p.toml"
    file.write_text(toml(world.settings(offsets=stored(world, tmp_path)) | top))
    assert oncely_json("status", file)["epoch"] == 0
    plan = oncely_json("plan", file)
    assert plan["source"]["begins"] == "earliest (first start)"
    assert (plan["guarantee"]["delivery"], plan["guarantee"]["store"]) == ("at_least_once", "file")
    assert not (tmp_path / "positions").exists(), "looking writes nothing"
    Pipeline.from_file(file).run("latest", spark=runtime)
    assert oncely_json("plan", file)["source"]["begins"] == "where epoch 1 has ended"
    done = oncely_json("offsets", "reset", file, "--to-offset", "45", "--execute")
    assert (done["executed"], done["epoch"]) == (True, 2)
    shown = oncely_json("offsets", "show", file)["partitions"]
    assert [(p["position"], p["mirrored"]) for p in shown] == [(45, 45), (45, 45)]
    Pipeline.from_file(file).run("latest", spark=runtime)
    assert len(ids(world)) == 110
    assert oncely_json("status", file)["epoch"] == 3


def test_a_group_of_its_own_is_the_one_that_is_shown(world: World, runtime: Any) -> None:
    group = f"mine-{world.name}"
    one = pipeline(world, "at_least_once", {"store": "kafka", "group": group})
    one.run("latest", spark=runtime)
    assert [s.mirrored for s in one.partition_offsets()] == [50, 50]
    assert any(f"--group {group}" in acl for acl in one.plan(use_spark=False).acls)


def test_a_store_of_another_topic_is_refused(
    world: World, make_topic: Any, runtime: Any, broker: Any, tmp_path: Path
) -> None:
    offsets = stored(world, tmp_path)
    pipeline(world, "at_least_once", offsets).run("latest", spark=runtime)
    broker.delete_topic(world.topic)
    broker.create_topic(world.topic, 2)
    one = pipeline(world, "at_least_once", offsets)
    with pytest.raises(SourceMismatch, match="recreated"):
        one.run("latest", spark=runtime)
    assert any("recreated" in p.message for p in one.plan(use_spark=False).problems)
    assert "recreated" in one.status().warnings[0]
    assert len(ids(world)) == 100


@pytest.mark.parametrize("delivery", ["none", "at_least_once"])
def test_the_older_of_two_runs_is_stopped(
    world: World, runtime: Any, tmp_path: Path, delivery: str
) -> None:
    offsets = stored(world, tmp_path)
    stop, caught, done = StopSignal(), [], threading.Event()

    def running() -> None:
        try:
            pipeline(world, delivery, offsets).run(
                stop=stop, spark=runtime,
                listener=lambda e: done.set() if isinstance(e, events.BatchCommitted) else None,
            )  # fmt: skip
        except Fenced as error:
            caught.append(error)

    thread = threading.Thread(target=running)
    thread.start()
    try:
        assert done.wait(180)
        pipeline(world, delivery, offsets).reset(
            Verb("to-offset", 30), execute=True
        )  # a newer epoch
        thread.join(180)
        assert caught
        assert caught[0].exit_code == 3
    finally:
        stop.ask()
        stop.ask()
        thread.join(180)
    one = pipeline(world, delivery, offsets)
    assert [s.position for s in one.status().partitions] == [30, 30], "and moves nothing"
    world.publish(50, partitions=2, first=100)
    one.run("latest", spark=runtime)
    assert {*ids(world)} == {*range(150)}
    assert len(ids(world)) == 150 + 40


def test_positions_are_saved_at_an_orderly_end(world: World, runtime: Any, tmp_path: Path) -> None:
    """The timer is an hour away."""
    offsets = stored(world, tmp_path)
    stop = StopSignal()
    one = pipeline(world, "none", offsets, commit_interval="1 hour")
    thread = threading.Thread(target=lambda: one.run(stop=stop, spark=runtime))
    thread.start()
    try:
        await_that(lambda: world.count() == 100, "all rows")
        assert [s.position for s in one.status().partitions] == [0, 0]
    finally:
        stop.ask()
        thread.join(180)
    assert not thread.is_alive()
    assert [s.position for s in one.status().partitions] == [50, 50]
    one.run("latest", spark=runtime)
    assert world.count() == 100


def test_a_pair_that_can_not_keep_its_promise_is_refused(world: World, tmp_path: Path) -> None:
    file = world.file(offsets=stored(world, tmp_path))
    for command in (["plan", file], ["run", file], ["status", file]):
        refused = oncely(*command, expect=2)
        assert "offsets.store" in refused.stderr
        assert "no transaction covers both" in refused.stderr
