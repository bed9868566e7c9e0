"""`oncely work` into Kafka: records, offsets and positions in transactions of a group's member."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from typing import Any

import pytest

from oncely.testing.processes import await_that, child
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.topic_world import TopicWorld, assert_exactly_once, watching
from tests.scenarios.world import assert_steps


@pytest.fixture
def world(make_topic_world: Any) -> TopicWorld:
    world: TopicWorld = make_topic_world(2)
    world.make_output()
    return world


@pytest.mark.timeout(120)
@pytest.mark.parametrize("protocol", ["eager", "cooperative", "consumer"])
def test_until_latest_all_records_are_committed_once(world: TopicWorld, protocol: str) -> None:
    world.publish(1_000, partitions=2, bad_every=250)
    file = world.file(worker={"protocol": protocol}, sink={"max_rejects": 4})
    done = oncely("work", file, "--until", "latest", *world.logged)
    assert done.stderr.splitlines()[-1].startswith("1,000 records: 996 rows, 4 rejects in ")
    assert_exactly_once(world)
    assert_steps(world)


def test_filters(world: TopicWorld) -> None:
    """What is dropped has no record there, and what waits comes later."""
    world.publish(100, partitions=2)
    given = {"drop": "kafka_offset IN (3, 7)", "throttle": "30 in 100 ms"}
    file = world.file(filter=given)
    done = oncely("work", file, "--until", "latest", *world.logged)
    assert done.stderr.splitlines()[-1].startswith("100 records: 96 rows, 0 rejects in ")
    report = oncely_json("audit", file)
    assert (report["verdict"], report["records"], report["accounted"]) == ("clean", 100, 100)
    assert_steps(world)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_of_three_that_start_together_each_tells_where_its_partitions_begin(
    make_topic_world: Any,
) -> None:
    """The one that has registered the pipeline may take none of them."""
    world: TopicWorld = make_topic_world(3)
    world.make_output()
    world.publish(30, partitions=3)
    with ExitStack() as stack:
        members = []
        for _ in range(3):
            file = world.file(source={"start": "latest"})
            command = ["oncely.cli", "work", str(file), *world.logged]
            members.append(stack.enter_context(child(command, file.with_suffix(".log"))))
        await_that(lambda: len({x["run"] for x in taken(world)}) == 3, "three with partitions", 180)
        world.publish(300, first=30, partitions=3)
        await_that(lambda: records(world) == 300, "records")
        for one in members:
            one.send_signal(signal.SIGTERM)
        assert [one.wait(180) for one in members] == [0, 0, 0]
    assert_steps(world)


def logged(world: TopicWorld, kind: str) -> list[dict[str, Any]]:
    lines = world.events.read_text().splitlines() if world.events.exists() else []
    return [one for one in map(json.loads, lines) if one["type"] == kind]


def taken(world: TopicWorld) -> list[dict[str, Any]]:
    return [one for one in logged(world, "opened") if one["positions"]]


def records(world: TopicWorld) -> int:
    done = logged(world, "range_committed")
    return sum(one["records"] for one in done if not one["replayed"])


@pytest.mark.both
@pytest.mark.long
@pytest.mark.timeout(300)
def test_spark_takes_over_and_a_worker_takes_back(world: TopicWorld, runtime: Any) -> None:
    file = world.file()
    with watching(world) as watcher:
        with child(["oncely.cli", "work", str(file)], file.with_suffix(".log")) as worker:
            world.publish(400, partitions=2)
            await_that(lambda: len(watcher.seen) >= 400 or worker.poll() is not None, "records")
            world.run(runtime)
            world.publish(400, partitions=2, first=400)
            assert worker.wait(180) == 3, file.with_suffix(".log").read_text()
        world.run(runtime)
        world.publish(400, partitions=2, first=800)
        oncely("work", file, "--until", "latest")
    assert assert_exactly_once(world, watcher) == 1_200
