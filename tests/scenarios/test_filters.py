"""`[filter]`: what is dropped is accounted for, and what waits is neither lost nor doubled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.testing.processes import await_that, child
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World, good


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A hundred records in two partitions, every fifth of which is an hour old."""
    world = make_world(2)
    producer, now = Producer({"bootstrap.servers": world.brokers}), int(time.time() * 1000)
    for i in range(100):
        at = now - 3_600_000 if i % 5 == 0 else now
        producer.produce(world.topic, good(i), b"k%d" % i, partition=i % 2, timestamp=at)
    producer.flush()
    return world


def ids(world: World) -> list[int]:
    return [one for (one,) in world.sql("SELECT id FROM rows ORDER BY id")]


def audited(world: World, **sections: Any) -> None:
    report = oncely_json("audit", world.file(**sections))
    assert (report["verdict"], report["records"], report["accounted"]) == ("clean", 100, 100)


DROP = {"drop": "kafka_offset = 3 OR key = 'k50'"}
KEPT = [i for i in range(100) if i not in (6, 7, 50)]


def test_dropped_records_are_counted_as_filtered(world: World, runtime: Any) -> None:
    world.run(runtime, filter=DROP)
    assert ids(world) == KEPT
    audited(world, filter=DROP)
    counted = "SELECT sum(filtered), sum(records) FROM oncely_ranges"
    assert world.sql(counted) == [(3, 100)]
    # What is found is said by offset: a dropped record is not taken for a lost one.
    world.sql("DELETE FROM rows WHERE id = 9")
    report = oncely_json("audit", world.file(filter=DROP), expect=1)
    assert [one["offset"] for one in report["lost"]] == [4]


def test_a_worker_drops_expired_records(world: World) -> None:
    given = {**DROP, "expire": "30 minutes"}
    oncely("work", world.file(filter=given), "--until", "latest", *world.logged)
    assert ids(world) == [i for i in KEPT if i % 5]
    audited(world, filter=given)


def test_records_that_wait_are_read_later_once_and_in_order(world: World) -> None:
    world.make_table()
    published = time.time()
    world.publish(1, first=100, partitions=1)
    given = {"delay": "2 seconds", "throttle": "30 in 500 ms"}
    oncely("work", world.file(filter=given), "--until", "latest", *world.logged)
    assert ids(world) == list(range(101))
    order = "SELECT kafka_offset FROM rows WHERE kafka_partition = %s ORDER BY inserted"
    for partition, count in ((0, 51), (1, 50)):
        assert world.sql(order, partition) == [(i,) for i in range(count)]
    ((last,),) = world.sql("SELECT max(committed_at) FROM oncely_ranges")
    assert last.timestamp() >= published + 2


def test_records_that_wait_go_with_their_partition(world: World) -> None:
    """Into another member: what the first one had seen of it, and put off, is not passed over."""
    settings = {"filter": {"delay": "4 seconds"}, "worker": {"session_timeout": "6 seconds"}}
    file = world.file(**settings)
    with child(["oncely.cli", "work", str(file), *world.logged], file.with_suffix(".log")) as one:
        await_that(lambda: world.count() > 0 or one.poll() is not None, "the old record")
        assert one.poll() is None, file.with_suffix(".log").read_text()
        oncely("work", world.file(**settings), "--until", "latest", *world.logged)
        await_that(lambda: world.count() >= 100, "all records")
    assert ids(world) == list(range(100))
    audited(world, **settings)


def test_a_run_on_spark_does_not_wait(world: World) -> None:
    done = oncely("run", world.file(filter={"delay": "1 second"}), expect=2)
    assert "filter.delay" in done.stderr
    assert "oncely work" in done.stderr
    done = oncely("run", world.file(filter={"drop": "count(*) > 1"}), expect=2)
    assert "filter.drop" in done.stderr
