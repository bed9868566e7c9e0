"""Members into Kafka that come, go and are paused inside a transaction: each record once."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException
from confluent_kafka.admin import AdminClient

from oncely.kafka.client import OFFSETS_DELAYED
from oncely.testing.halting import ask_to_halt, halted, running_halting
from oncely.testing.processes import await_that, child
from tests.scenarios.topic_world import TopicWorld, assert_exactly_once, watching

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def world(make_topic_world: Any) -> TopicWorld:
    world: TopicWorld = make_topic_world(2)
    world.make_output()
    return world


def shares(admin: AdminClient, group: str) -> list[int]:
    """How many partitions each member of the group has."""
    try:
        answer = admin.describe_consumer_groups([group], request_timeout=20)[group].result(120)
    except KafkaException as error:
        if error.args[0].code() not in OFFSETS_DELAYED:
            raise
        return []  # a new broker has no coordinator of the group yet
    return sorted(
        len(one.assignment.topic_partitions) if one.assignment else 0 for one in answer.members
    )


def test_a_member_is_paused_inside_a_transaction_and_comes_back(world: TopicWorld) -> None:
    """It loses its session. The takeover ends its transaction; later it joins again."""
    file = world.file(worker={"session_timeout": "6 seconds"})
    log, admin, group = file.with_suffix(".second"), world.admin(), f"oncely-{world.name}"
    with (
        watching(world) as watcher,
        running_halting(file, "--work") as paused,
        child(["oncely.cli", "work", str(file)], log) as other,
    ):
        await_that(lambda: shares(admin, group) == [1, 1], "a partition each", 180)
        ask_to_halt(file, "commit")
        world.publish(400, partitions=2)
        halted(paused.pid)
        # At the latest when the broker aborts the transaction, after sink.transaction_timeout.
        await_that(lambda: len(watcher.seen) == 400 or other.poll() is not None, "all of it", 180)
        paused.send_signal(signal.SIGCONT)
        await_that(lambda: shares(admin, group) == [1, 1], "a partition each again", 180)
        world.publish(400, partitions=2, first=400)
        await_that(lambda: len(watcher.seen) >= 800, "the rest", 180)
        for one in (paused, other):
            one.send_signal(signal.SIGTERM)
            assert one.wait(180) == 0, file.with_suffix(".log").read_text() + log.read_text()
    assert assert_exactly_once(world, watcher) == 800


@pytest.mark.parametrize("protocol", ["cooperative", "consumer"])
def test_the_group_changes_in_the_middle_of_a_commit(world: TopicWorld, protocol: str) -> None:
    """Later transactions name the member by its new generation, or the group would refuse them."""
    file = world.file(worker={"protocol": protocol})
    admin, group = world.admin(), f"oncely-{world.name}"
    how = {"group.protocol": "consumer"} if protocol == "consumer" else {
        "partition.assignment.strategy": "cooperative-sticky"
    }  # fmt: skip
    ask_to_halt(file, "commit")
    world.publish(400, partitions=2)
    with watching(world) as watcher, running_halting(file, "--work") as worker:
        halted(worker.pid)
        guest = Consumer({"bootstrap.servers": world.brokers, "group.id": group, **how})
        guest.subscribe([world.topic])
        await_that(lambda: guest.poll(0.1) or len(shares(admin, group)) == 2, "the guest", 180)
        worker.send_signal(signal.SIGCONT)
        await_that(lambda: guest.poll(0.1) or shares(admin, group) == [1, 1], "its share", 180)
        guest.close()
        await_that(lambda: shares(admin, group) == [2], "the worker alone", 180)
        world.publish(400, partitions=2, first=400)
        await_that(lambda: len(watcher.seen) >= 800, "the rest", 180)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(180) == 0, file.with_suffix(".log").read_text()
    assert assert_exactly_once(world, watcher) == 800
