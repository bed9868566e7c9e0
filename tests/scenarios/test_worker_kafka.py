"""`oncely work` into Kafka: records, offsets and positions in transactions of a group's member."""

from __future__ import annotations

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
def test_spark_takes_over_and_a_worker_takes_back(world: TopicWorld, spark: Any) -> None:
    file = world.file()
    with watching(world) as watcher:
        with child(["oncely.cli", "work", str(file)], file.with_suffix(".log")) as worker:
            world.publish(400, partitions=2)
            await_that(lambda: len(watcher.seen) >= 400 or worker.poll() is not None, "records")
            world.run(spark)
            world.publish(400, partitions=2, first=400)
            assert worker.wait(90) == 3, file.with_suffix(".log").read_text()
        world.run(spark)
        world.publish(400, partitions=2, first=800)
        oncely("work", file, "--until", "latest")
    assert assert_exactly_once(world, watcher) == 1_200
