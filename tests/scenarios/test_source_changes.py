"""A topic that is not the one the ledger knows is refused; records lost to retention are told."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.config import parse
from oncely.errors import DataLost, SourceMismatch
from oncely.pipeline import Pipeline
from oncely.testing.faults import inside_a_commit
from oncely.testing.processes import await_that, kill_tree, running
from oncely.testing.servers.kafka import Broker
from tests.scenarios.world import World, assert_exactly_once


def test_topic_deleted_and_made_again(make_world: Any, runtime: Any, broker: Broker) -> None:
    world: World = make_world(1)
    world.publish(50, partitions=1)
    settings = parse(world.settings())
    Pipeline(settings).run("latest", spark=runtime)
    broker.delete_topic(world.topic)
    broker.create_topic(world.topic, 1)
    world.publish(80, partitions=1, first=500)
    with pytest.raises(SourceMismatch, match="deleted and recreated"):
        Pipeline(settings).run("latest", spark=runtime)
    assert world.count() == 50


def test_retention_passed_the_position(make_world: Any, runtime: Any, broker: Broker) -> None:
    world: World = make_world(2)
    world.publish(100, partitions=2)
    Pipeline(parse(world.settings())).run("latest", spark=runtime)
    world.publish(100, partitions=2, first=100)
    broker.delete_records(world.topic, {0: 80})
    with pytest.raises(DataLost, match=r"\[50, 80\)"):
        Pipeline(parse(world.settings())).run("latest", spark=runtime)
    assert world.count() == 100
    Pipeline(parse(world.settings(source={"on_gap": "record"}))).run("latest", spark=runtime)
    assert world.count() == 170
    gaps = world.sql("SELECT range_start, range_end FROM oncely_ranges WHERE kind = 'gap'")
    assert gaps == [(50, 80)]
    Pipeline(parse(world.settings())).run("latest", spark=runtime)


def test_topic_went_back(make_world: Any, runtime: Any, broker: Broker) -> None:
    """A position beyond the topic's end: same topic id, fewer records."""
    world: World = make_world(1)
    world.publish(20, partitions=1)
    settings = parse(world.settings())
    Pipeline(settings).run("latest", spark=runtime)
    world.sql('UPDATE oncely_positions SET "position" = 999')
    with pytest.raises(SourceMismatch, match="gone back"):
        Pipeline(settings).run("latest", spark=runtime)


def test_restart_without_anything_but_the_database(make_world: Any, runtime: Any) -> None:
    world: World = make_world(3)
    for first in (0, 1_000, 2_000):
        world.publish(1_000, partitions=3, first=first)
        Pipeline(parse(world.settings())).run("latest", spark=runtime)
    assert_exactly_once(world)


@pytest.mark.long
def test_killed_inside_a_commit_and_meanwhile_the_topic_changed(
    make_world: Any, runtime: Any, broker: Broker
) -> None:
    """Retention passes the position, then the topic is made anew, while the pipeline is down."""
    world: World = make_world(2)
    world.publish(10_000, pad=300, partitions=2)
    file = world.file(spark={"max_records_per_batch": 10_000})

    def publish_more() -> None:
        world.publish(30_000, pad=300, partitions=2, first=10_000)

    with running(file) as driver:
        await_that(lambda: world.count() == 10_000, "the first rows", 180)
        with inside_a_commit(world.url, "rows", driver.pid, publish_more):
            kill_tree(driver.pid)
    at = dict(world.sql('SELECT "partition", "position" FROM oncely_positions'))
    kept = world.count()
    assert kept == sum(at.values())
    assert at[0] < 20_000
    missing = range(at[0], min(at[0] + 1_000, 20_000))
    broker.delete_records(world.topic, {0: missing.stop})
    with pytest.raises(DataLost, match=rf"\[{missing.start}, {missing.stop}\)"):
        Pipeline(parse(world.settings())).run("latest", spark=runtime)
    assert world.count() == kept
    Pipeline(parse(world.settings(source={"on_gap": "record"}))).run("latest", spark=runtime)
    found = world.sql("SELECT kafka_partition, kafka_offset FROM rows ORDER BY 1, 2")
    assert found == [(p, o) for p in (0, 1) for o in range(20_000) if not (p == 0 and o in missing)]
    broker.delete_topic(world.topic)
    broker.create_topic(world.topic, 2)
    world.publish(50_000, partitions=2)
    with pytest.raises(SourceMismatch, match="deleted and recreated"):
        Pipeline(parse(world.settings())).run("latest", spark=runtime)
    assert world.count() == len(found)
