"""Topic to topic: positions shown and reset, and found again when Kafka has forgotten the group."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.config import parse
from oncely.errors import Stopped, TableMismatch
from oncely.kafka.reset import Verb
from oncely.kafka.topics import ledger_partition
from oncely.pipeline import Pipeline
from tests.scenarios.commands import oncely_json, reset_fences_a_run
from tests.scenarios.topic_world import TopicWorld
from tests.scenarios.world import run


@pytest.fixture
def world(make_topic_world: Any) -> TopicWorld:
    world: TopicWorld = make_topic_world(2)
    world.make_output()
    world.publish(100, partitions=2)
    return world


def forget_group(world: TopicWorld) -> None:
    """What Kafka does to a group that nobody commits to for a week."""
    group = f"oncely-{world.name}"
    admin = world.admin()
    admin.delete_consumer_groups([group])[group].result(120)
    assert world.shown() in ({}, {0: -1001, 1: -1001})


def test_nothing_is_known_and_nothing_is_written_before_the_first_start(world: TopicWorld) -> None:
    status = oncely_json("status", world.file())
    assert (status["epoch"], status["rejects"]) == (0, 0)
    assert [(p["position"], p["lag"]) for p in status["partitions"]] == [(None, 50), (None, 50)]
    shown = oncely_json("offsets", "show", world.file())["partitions"]
    assert [(p["position"], p["mirrored"]) for p in shown] == [(None, None), (None, None)]
    assert not world.exists(world.ledger)


def test_positions_lag_and_reset(world: TopicWorld, runtime: Any) -> None:
    run(world, runtime)
    world.publish(20, partitions=1, first=100)
    status = oncely_json("status", world.file())
    assert status["epoch"] == 1
    found = [(p["position"], p["end"], p["lag"]) for p in status["partitions"]]
    assert found == [(50, 70, 20), (50, 50, 0)]
    shown = oncely_json("offsets", "show", world.file())["partitions"]
    assert [(p["position"], p["mirrored"]) for p in shown] == [(50, 50), (50, 50)]
    assert world.shown() == {0: 50, 1: 50}, "and so do Kafka's own tools"
    done = oncely_json("offsets", "reset", world.file(), "--shift-by", "-10")
    assert (done["executed"], world.positions()) == (False, {0: 50, 1: 50})
    done = oncely_json("offsets", "reset", world.file(), "--shift-by", "-10", "--execute")
    assert (done["executed"], done["epoch"]) == (True, 3)
    assert world.positions() == world.shown() == {0: 40, 1: 40}
    run(world, runtime)
    assert len(world.ids()) == 140, "20 were written again"
    assert len({*world.ids()}) == 120
    assert world.positions() == {0: 70, 1: 50}


def test_a_reset_before_the_first_start(world: TopicWorld, runtime: Any) -> None:
    done = oncely_json("offsets", "reset", world.file(), "--to-offset", "45", "--execute")
    assert done["epoch"] == 2
    assert not world.records()
    run(world, runtime)
    assert len(world.ids()) == 10


def test_a_reset_fences_a_run_that_waits_for_records(world: TopicWorld, runtime: Any) -> None:
    reset_fences_a_run(world, runtime, lambda: len(world.ids()) == 100)
    assert world.positions() == {0: 30, 1: 30}


# -- what Kafka forgets --------------------------------------------------------------------


def test_the_ledger_topic_knows_when_the_group_has_expired(world: TopicWorld, runtime: Any) -> None:
    run(world, runtime)
    forget_group(world)
    world.publish(40, partitions=2, first=100)
    run(world, runtime)
    assert world.ids() == [*range(140)]
    assert world.shown() == world.positions() == {0: 70, 1: 70}


def test_the_group_knows_when_the_ledger_topic_was_deleted(
    world: TopicWorld, runtime: Any, broker: Any
) -> None:
    run(world, runtime)
    broker.delete_topic(world.ledger)
    left = Pipeline(parse(world.settings())).status()
    assert ([one.position for one in left.partitions], left.epoch) == ([50, 50], 1)
    assert f"the ledger topic '{world.ledger}' was deleted" in left.warnings[0]
    world.publish(40, partitions=2, first=100)
    run(world, runtime)
    assert world.ids() == [*range(140)]
    assert world.shown() == world.positions() == {0: 70, 1: 70}


def test_a_position_that_neither_knows_is_refused(world: TopicWorld, runtime: Any) -> None:
    """The group has expired, and somebody has removed a position from the ledger topic."""
    run(world, runtime)
    forget_group(world)
    producer = Producer({"bootstrap.servers": world.brokers})
    gone = json.dumps(["position", world.name, world.topic, 1], separators=(",", ":"))
    own = ledger_partition(world.name)
    producer.produce(world.ledger, None, gone.encode(), own)
    assert producer.flush(120) == 0
    with pytest.raises(Stopped, match="its positions are lost for") as refused:
        run(world, runtime)
    assert f"{world.topic}-1" in refused.value.message
    assert world.ledger in refused.value.message
    assert f"{world.topic}-0" not in refused.value.message
    assert "offsets reset" in refused.value.way_out
    assert world.ids() == [*range(100)], "nothing was written twice"
    planned = Pipeline(parse(world.settings())).plan(use_spark=False).problems
    assert refused.value.message in [one.message for one in planned]
    # The way out that it names.
    to = ("--to-offset", "50", "--execute")
    with pytest.raises(Stopped, match=f"lost for {world.topic}-1: .* nothing was changed"):
        Pipeline(parse(world.settings())).reset(
            Verb("to-offset", 50), [f"{world.topic}:0"], execute=True
        )
    oncely_json("offsets", "reset", world.file(), "--topic", f"{world.topic}:1", *to)
    world.publish(20, partitions=2, first=100)
    run(world, runtime)
    assert world.ids() == [*range(120)]
    assert world.shown() == {0: 60, 1: 60}


def test_a_reset_takes_another_output_topic_over(world: TopicWorld, runtime: Any) -> None:
    """The way out that the refusal names; nothing is written again."""
    run(world, runtime)
    other = {"sink": {"topic": f"{world.output}-2"}}
    world.publish(20, partitions=2, first=100)
    with pytest.raises(TableMismatch, match="--shift-by 0"):
        run(world, runtime, **other)
    changed = dataclasses.replace(world, overrides=other)
    oncely_json("offsets", "reset", changed.file(), "--shift-by", "0", "--execute")
    run(world, runtime, **other)
    assert world.ids() == list(range(100))
    found = [json.loads(one.value())["id"] for one in world.records(f"{world.output}-2")]
    assert sorted(found) == list(range(100, 120))
