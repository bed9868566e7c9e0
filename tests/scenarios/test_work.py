"""`oncely work`: a pipeline without Spark, as a member of a consumer group."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from oncely.kafka import group as group_consumer
from oncely.kafka.group import GroupConsumer
from oncely.pipeline import working
from oncely.runtimes.worker.assignment import BufferLimits
from oncely.testing.processes import await_that, child
from oncely.testing.servers.kafka import Broker
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World, assert_exactly_once, assert_steps, good, produce, toml


def in_transactions(brokers: str, topic: str, records: list[tuple[bytes, bool]]) -> None:
    """Each record in a transaction of its own, committed or aborted."""
    producer = Producer({"bootstrap.servers": brokers, "transactional.id": topic})
    producer.init_transactions()
    for value, commits in records:
        producer.begin_transaction()
        producer.produce(topic, value, b"k", partition=0)
        (producer.commit_transaction if commits else producer.abort_transaction)()


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(2)
    world.publish(1_000, partitions=2)
    return world


@pytest.mark.parametrize("protocol", ["eager", "cooperative", "consumer"])
def test_until_latest_all_records_are_committed_once(world: World, protocol: str) -> None:
    produce(world.brokers, world.topic, [(0, None, b"{broken")])
    file = world.file(worker={"protocol": protocol}, sink={"max_rejects": 1})
    done = oncely("work", file, "--until", "latest", *world.logged)
    assert done.stderr.splitlines()[-1].startswith("1,001 records: 1,000 rows, 1 reject in ")
    assert_exactly_once(world, rejects=1)
    assert_steps(world)


def test_after_a_signal_it_ends_with_0_and_goes_on_later(world: World) -> None:
    file = world.file()
    with child(["oncely.cli", "work", str(file), *world.logged], file.with_suffix(".log")) as one:
        await_that(lambda: world.count() == 1_000 or one.poll() is not None, "rows")
        world.publish(100, partitions=2, first=1_000)
        await_that(lambda: world.count() == 1_100 or one.poll() is not None, "more rows")
        one.send_signal(signal.SIGTERM)
        assert one.wait(180) == 0, file.with_suffix(".log").read_text()
    world.publish(100, partitions=2, first=1_100)
    oncely("work", file, "--until", "latest", *world.logged)
    assert_exactly_once(world)
    assert_steps(world)


def test_an_upsert_and_holes_at_the_ends_of_logs(make_world: Any) -> None:
    """Transaction markers and aborted records leave no lag."""
    world: World = make_world(1)
    produce(world.brokers, world.topic, [(0, b"1", good(1)), (0, b"2", good(2)), (0, b"1", None)])
    in_transactions(world.brokers, world.topic, [(good(3), True), (good(4), False)])
    world.overrides = {
        "decode": {"key": {"format": "string", "column": "id"}, "schema": "grp STRING"},
        "sink": {"mode": "upsert", "keys": ["id"]},
    }
    oncely("work", world.file(), "--until", "latest", *world.logged)
    assert world.sql("SELECT id FROM rows ORDER BY id") == [("2",), ("k",)]
    (line,) = oncely_json("status", world.file())["partitions"]
    assert line["lag"] == 0
    assert_steps(world)


def test_back_pressure_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions are paused and resumed many times."""
    paused = []

    def pause(self: GroupConsumer, partitions: Any) -> None:
        paused.append(partitions)
        kept(self, partitions)

    kept = GroupConsumer.pause
    small = BufferLimits(records=50, buffered_records=60)
    monkeypatch.setattr(working, "BufferLimits", lambda *_, **__: small)
    monkeypatch.setattr(group_consumer, "_MANY", 40)
    monkeypatch.setattr(GroupConsumer, "pause", pause)
    oncely("work", world.file(), "--until", "latest", *world.logged)
    assert len(paused) > 4
    assert_exactly_once(world)
    assert_steps(world)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"transform": {"spark": "module:function"}}, "transform.spark"),
        ({"delivery": "at_least_once"}, "delivery"),
        (
            {
                "sink": {"kind": "files", "url": "file:///lake", "manifest_topic": "m"},
                "spark": {"master": "local[2]"},
            },
            "sink.kind",
        ),
        (
            {"sink": {"kind": "kafka", "topic": "out"}, "worker": {"group": "another"}},
            "worker.group",
        ),
        ({"worker": {"protocol": "classic"}}, "worker.protocol"),
        ({"worker": {"session_timeout": "0 seconds"}}, "worker.session_timeout"),
        ({"worker": {"buffer": "1 MiB"}}, "worker.buffer"),
    ],
)
def test_what_a_worker_cannot_do_is_refused(world: World, sections: Any, key: str) -> None:
    settings = world.settings() | sections
    file = world.folder / "refused.toml"
    file.write_text(toml(settings))
    done = oncely("work", file, expect=2)
    assert f"error: {key}: " in done.stderr


def test_a_topic_that_does_not_exist_and_one_that_is_recreated(
    world: World, broker: Broker
) -> None:
    missing = world.file(source={"brokers": world.brokers, "topics": ["no-such-topic"]})
    assert "no-such-topic" in oncely("work", missing, expect=2).stderr
    oncely("work", world.file(), "--until", "latest")
    broker.delete_topic(world.topic)
    broker.create_topic(world.topic, 2)
    assert "recreated" in oncely("work", world.file(), expect=2).stderr


@pytest.mark.parametrize(
    "protocol", ["cooperative", pytest.param("consumer", marks=pytest.mark.long)]
)
def test_a_topic_that_is_deleted_meanwhile_ends_the_member(world: World, protocol: str) -> None:
    file = world.file(worker={"protocol": protocol})
    with child(["oncely.cli", "work", str(file)], file.with_suffix(".log")) as one:
        await_that(lambda: world.count() == 1_000 or one.poll() is not None, "rows")
        admin = AdminClient({"bootstrap.servers": world.brokers})
        admin.delete_topics([world.topic])[world.topic].result()
        assert one.wait(180) == 2
    assert f"no such topic on {world.brokers}" in file.with_suffix(".log").read_text()
