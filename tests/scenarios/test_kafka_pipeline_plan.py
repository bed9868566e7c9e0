"""Topic to topic: what can't work is told by `oncely plan`, and refused by `oncely run`, exit 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition

from oncely.config import parse
from oncely.errors import TableMismatch
from oncely.kafka.reset import Verb
from oncely.pipeline import Pipeline
from oncely.stores.topic.records import OffsetMetadata, stamp
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import set_config
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.topic_world import TopicWorld


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Broker]:
    """Another cluster, that is strict about transactions."""
    with Broker(properties={"transaction.max.timeout.ms": "30000"}) as running:
        yield running


@pytest.fixture
def world(make_topic_world: Any) -> TopicWorld:
    world: TopicWorld = make_topic_world(2)
    world.publish(10, partitions=2)
    return world


def problems(plan: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: one["message"] for one in plan["problems"]}


def planned(world: TopicWorld, **sections: Any) -> dict[str, str]:
    """The problems that a plan in this process finds."""
    found = Pipeline(parse(world.settings(**sections))).plan(use_spark=False)
    assert found.exit_code == (2 if found.problems else 0)
    return {one.key: f"{one.message} {one.way_out}" for one in found.problems}


def nothing_was_written(world: TopicWorld) -> None:
    assert not any(world.exists(one) for one in (world.output, world.rejects, world.ledger))
    assert world.shown() == {}


def test_a_new_pipeline_can_run_and_nothing_is_written(world: TopicWorld) -> None:
    plan = oncely_json("plan", world.file())
    assert plan["can_run"]
    assert "one transaction of Kafka" in " ".join(plan["guarantee"]["means"].split())
    assert plan["sink"]["exists"] is False
    assert plan["sink"]["columns"][1] == {
        "name": "grp", "rows": "string", "table": "key, value (json)"
    }  # fmt: skip
    assert [one.split("--topic ")[1].split()[0] for one in plan["ddl"]] == [
        world.ledger, world.output, world.rejects,
    ]  # fmt: skip
    assert any(f"--transactional-id oncely/{world.name}/" in one for one in plan["acls"])
    nothing_was_written(world)


def test_topics_that_it_creates_are_told_with_their_copies(
    make_topic_world: Any, broker: Broker
) -> None:
    world: TopicWorld = make_topic_world(3)
    world.publish(3, partitions=3)
    broker.create_topic(world.rejects)
    found = Pipeline(parse(world.settings())).plan(use_spark=False)
    assert [(one.name, one.exists, one.partitions, one.replicas, one.min_insync)
            for one in found.topics] == sorted([
        (world.ledger, False, 16, 1, 1), (world.output, False, 3, 1, 1),
        (world.rejects, True, 1, 1, 1),
    ])  # fmt: skip
    (note,) = [one for one in found.notes if "one replica" in one]
    assert world.ledger in note
    assert any(one.endswith(f"--topic {world.output} --partitions 3") for one in found.ddl)
    ledger = f"--topic {world.ledger} --partitions 16 --config cleanup.policy=compact"
    assert any(ledger in one for one in found.ddl)
    for partitions, given in ((3, {}), (5, {"partitions": 5})):
        output = f"{world.output}-{partitions}"
        Pipeline(parse(world.settings(sink={"topic": output, **given}))).sink(
            pa.schema([("id", pa.int64()), ("grp", pa.string())])
        ).prepare()
        found_ = broker.admin().list_topics(output, timeout=60).topics[output]
        assert len(found_.partitions) == partitions
        broker.delete_topic(output)


def test_settings_of_topics_that_defeat_those_of_the_sink(
    world: TopicWorld, broker: Broker
) -> None:
    def notes(config: dict[str, str], **sink: Any) -> list[str]:
        if config:
            set_config(broker, world.output, config)
        found = Pipeline(parse(world.settings(sink=sink))).plan(use_spark=False)
        assert not found.problems
        named = world.output if config else world.rejects
        return [one for one in found.notes if one.startswith(f"topic {named} has ")]

    for topic in (world.output, world.rejects):
        broker.create_topic(topic)
    more = {"batch.size": "2000", "compression.type": "zstd"}
    assert notes({"retention.ms": "5000"}, kafka=more) == []
    (told,) = notes({"message.timestamp.type": "LogAppendTime"}, timestamp="source")
    assert "LogAppendTime" in told
    config = {"message.timestamp.type": "CreateTime"}
    (told,) = notes(config, timestamp="source")
    assert "retention.ms 5000" in told
    compression, size = notes({"compression.type": "gzip", "max.message.bytes": "1000"}, kafka=more)
    assert "compression.type gzip" in compression
    assert "batch.size is lowered" in size
    assert notes({}) == []
    set_config(broker, world.rejects, {"retention.ms": "5000"})
    (told,) = notes({})
    assert "a shorter retention.ms than the source" in told
    set_config(broker, world.rejects, {"cleanup.policy": "compact"})
    assert "is compacted" in planned(world)["sink.rejects_topic"]
    set_config(broker, world.output, {"min.insync.replicas": "2"})
    assert "the broker takes no record" in planned(world)["sink.topic"]
    with pytest.raises(TableMismatch, match=r"min\.insync\.replicas 2"):
        Pipeline(parse(world.settings())).preflight()


def test_another_cluster_is_refused(world: TopicWorld, elsewhere: Broker) -> None:
    file = world.file(sink={"brokers": elsewhere.bootstrap})
    found = problems(oncely_json("plan", file, expect=2))
    assert "two clusters share no transaction" in found["sink.brokers"]
    refused = oncely("run", file, "--until", "latest", expect=2)
    assert "sink.brokers" in refused.stderr
    assert "two clusters share no transaction" in refused.stderr
    assert "MirrorMaker" in refused.stderr
    nothing_was_written(world)
    assert world.topic not in elsewhere.admin().list_topics(timeout=60).topics


def test_the_same_cluster_by_another_name_is_fine(world: TopicWorld) -> None:
    other = world.brokers.replace("127.0.0.1", "localhost")
    assert planned(world, sink={"brokers": other}) == {}


def test_topics_that_may_not_be_created(world: TopicWorld, broker: Broker) -> None:
    file = world.file(sink={"create": False})
    for command in (["plan", file], ["run", file, "--until", "latest"]):
        refused = oncely(*command, expect=2)
        said = refused.stderr + refused.stdout
        assert f"'{world.output}', '{world.rejects}'" in said
    nothing_was_written(world)
    for one in (world.output, world.rejects):
        broker.create_topic(one)
    found = planned(world, sink={"create": False})
    assert world.ledger in found["sink.ledger_topic"]
    assert "cleanup.policy=compact" in found["sink.ledger_topic"]
    broker.create_topic(world.ledger, 16, {"cleanup.policy": "compact"})
    assert planned(world, sink={"create": False}) == {}


def test_a_compacted_topic_needs_a_key(world: TopicWorld, broker: Broker) -> None:
    broker.create_topic(world.output, 1, {"cleanup.policy": "compact,delete"})
    assert planned(world) == {}  # the key is a column
    (told,) = planned(world, sink={"key": None}).items()
    assert told[0] == "sink.key"
    assert world.output in told[1]


def test_a_ledger_topic_that_forgets_is_refused(world: TopicWorld, broker: Broker) -> None:
    broker.create_topic(world.ledger, 16)
    found = planned(world)
    assert "must not be deleted by age" in found["sink.ledger_topic"]
    refused = oncely("run", world.file(), "--until", "latest", expect=2)
    assert world.ledger in refused.stderr


def test_a_compacted_topic_of_dead_letters_is_refused(world: TopicWorld, broker: Broker) -> None:
    broker.create_topic(world.rejects, 1, {"cleanup.policy": "compact,delete"})
    assert "would replace others of its key" in planned(world)["sink.rejects_topic"]
    refused = oncely("run", world.file(), "--until", "latest", expect=2)
    assert f"sink.rejects_topic: topic '{world.rejects}' is compacted" in refused.stderr


@pytest.mark.parametrize(
    ("sink", "key", "word", "way_out"),
    [
        ({"value": "nope"}, "sink.value", "the rows have no column 'nope'", "id, grp, pad"),
        ({"value": "id"}, "sink.value", "column 'id' is int64", "cast it"),
        ({"key": "nope"}, "sink.key", "the rows have no column 'nope'", "id, grp, pad"),
        (
            {"topic": None, "topic_column": "id", "rejects_topic": "r"},
            "sink.topic_column",
            "column 'id' is int64",
            "cast it",
        ),
    ],
)
def test_columns_that_have_no_form(
    world: TopicWorld, sink: dict[str, Any], key: str, word: str, way_out: str
) -> None:
    found = planned(world, sink=sink)
    assert word in found[key]
    assert way_out in found[key]


def test_a_missing_column_stops_a_run_before_it_begins(world: TopicWorld) -> None:
    refused = oncely("run", world.file(sink={"value": "nope"}), "--until", "latest", expect=2)
    assert "the rows have no column 'nope'" in refused.stderr
    nothing_was_written(world)


def test_a_group_that_holds_another_pipelines_positions(world: TopicWorld) -> None:
    group, other = f"shared-{world.name}", "somebody-else"
    consumer = Consumer({"bootstrap.servers": world.brokers, "group.id": group})
    metadata = stamp(OffsetMetadata(3, 1, "c", "t"), other)
    consumer.commit(offsets=[TopicPartition(world.topic, 0, 3, metadata)], asynchronous=False)
    consumer.close()
    found = planned(world, source={"group": group})
    assert list(found) == ["source.group"]
    assert other in found["source.group"]
    assert planned(world) == {}


def test_a_longer_timeout_than_the_broker_allows(world: TopicWorld, elsewhere: Broker) -> None:
    there = TopicWorld(elsewhere.bootstrap, "", world.topic, world.folder)
    elsewhere.create_topic(world.topic, 1)
    there.publish(5, partitions=1)
    found = planned(there)
    assert "30 seconds" in found["sink.transaction_timeout"]
    refused = oncely("run", there.file(), "--until", "latest", expect=2)
    assert "sink.transaction_timeout" in refused.stderr
    assert "transaction.max.timeout.ms" in refused.stderr
    nothing_was_written(there)
    assert planned(there, sink={"transaction_timeout": "30 seconds"}) == {}


def test_an_output_topic_that_was_deleted(world: TopicWorld, broker: Broker) -> None:
    """`run` would not make it again, and `plan` says so before."""
    world.make_output()
    Pipeline(parse(world.settings())).reset(Verb("to-earliest", 0), execute=True)
    assert planned(world) == {}
    broker.delete_topic(world.output)
    found = planned(world)
    assert f"'{world.output}' was deleted since" in found["sink.ledger_topic"]
    broker.create_topic(world.output)
    found = planned(world)
    assert f"'{world.output}' was deleted and recreated since" in found["sink.ledger_topic"]
    assert not world.records()
