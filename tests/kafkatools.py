"""What tests of the Kafka sink share: sinks, and the outcome looked at with plain clients."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from oncely.core import topics as own
from oncely.core.claim import Fence, Opened, Takeover
from oncely.core.topics import SourceIdentity
from oncely.ledgers.topic.cluster import PipelineTopics
from oncely.sinks.kafka.record_format import RecordFormat
from oncely.sinks.kafka.sink import KafkaSink
from oncely.testing.servers.kafka import Broker
from tests.sinktools import SCHEMA, SOURCE, T0

_READER = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "earliest",
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 10,
    "log_level": 0,
}


@dataclass(frozen=True)
class Topics:
    """The topics and the group of one test. Picklable."""

    bootstrap: str
    pipeline: str
    output: str
    rejects: str
    ledger: str
    brokers: str = ""  # what the sink is told, when it goes through a proxy
    group: str = ""  # the pipeline's own by default

    def sink(
        self, form: RecordFormat | None = None, run: str | None = None, **more: Any
    ) -> KafkaSink:
        """A sink as the driver makes it."""
        place = PipelineTopics(
            self.brokers or self.bootstrap, self.pipeline, self.group or self.pipeline,
            self.ledger, **{"timeout": 20.0, **more},
        )  # fmt: skip
        sink = KafkaSink(
            place, form or RecordFormat(SCHEMA, topic=self.output, key=None), self.rejects
        )
        return replace(sink, run=run) if run else sink

    def ids(self) -> list[int]:
        """What a reader of committed records sees, sorted."""
        return sorted(one["id"] for one in self.values())

    def values(self) -> list[Any]:
        """The JSON values in the output, in order, as a reader of committed records sees them."""
        return [json.loads(m.value()) for m in self.records(self.output)]

    def records(self, topic: str, level: str = "read_committed") -> list[Any]:
        """All messages of a topic up to its end, partition by partition."""
        return read_all(self.bootstrap, topic, level)

    def committed(self) -> dict[own.TopicPartition, int]:
        """The group's offsets, through a plain consumer."""
        asked = [TopicPartition(t, n) for t in SOURCE.topic_ids for n in range(4)]
        consumer = Consumer(
            {
                **_READER,
                "bootstrap.servers": self.bootstrap,
                "group.id": self.group or self.pipeline,
            }
        )
        try:
            found = consumer.committed(asked, 20)
        finally:
            consumer.close()
        return {
            own.TopicPartition(one.topic, one.partition): one.offset
            for one in found
            if one.offset >= 0
        }

    def ledger_positions(self) -> dict[own.TopicPartition, tuple[int, int]]:
        """Position and epoch, the last word of the ledger topic on each."""
        found: dict[own.TopicPartition, tuple[int, int]] = {}
        for message in self.records(self.ledger):
            key = json.loads(message.key())
            if key[0] == "position":
                value = json.loads(message.value())
                found[own.TopicPartition(key[2], key[3])] = (value["position"], value["epoch"])
        return found

    def ledger_ranges(self) -> list[tuple[int, int, int, str]]:
        """Partition, start, end and kind of every range in the ledger topic, in order."""
        return [
            (key[3], value["start"], value["end"], value["kind"])
            for message in self.records(self.ledger)
            if (key := json.loads(message.key()))[0] == "position"
            and (value := json.loads(message.value()))["start"] < value["end"]
        ]


def make_topics(
    broker: Broker, partitions: int = 1, config: Mapping[str, str] | None = None
) -> Topics:
    """New topics for one test; the ledger is left to the sink."""
    name = uuid.uuid4().hex[:12]
    # The broker takes offsets of topics that exist only.
    there = broker.admin().list_topics(timeout=20).topics
    for source in SOURCE.topic_ids:
        if source not in there:
            broker.create_topic(source, 4)
    output = broker.create_topic(f"out-{name}", partitions, config)
    rejects = broker.create_topic(f"rejects-{name}")
    return Topics(broker.bootstrap, f"p-{name}", output, rejects, f"ledger-{name}")


def open_sink(
    sink: KafkaSink,
    start: Mapping[own.TopicPartition, int] | None = None,
    source: SourceIdentity = SOURCE,
    expected: int | None = None,
) -> Opened:
    at = {T0: 0} if start is None else start
    return sink.open(Takeover(source, lambda: at, at, expected))


def ready(
    sink: KafkaSink, start: Mapping[own.TopicPartition, int] | None = None
) -> tuple[KafkaSink, Fence]:
    """The sink opened and bound, and its fence."""
    return sink, open_sink(sink, start).fence


def read_all(bootstrap: str, topic: str, level: str = "read_committed") -> list[Any]:
    """All messages of a topic up to its (stable) end."""
    consumer = Consumer(
        {**_READER, "isolation.level": level, "bootstrap.servers": bootstrap, "group.id": "tests"}
    )
    try:
        numbers = sorted(consumer.list_topics(topic, timeout=20).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, n, 0) for n in numbers])
        found: dict[int, list[Any]] = {n: [] for n in numbers}
        ended: set[int] = set()
        while len(ended) < len(numbers):
            for message in consumer.consume(1000, 0.1):
                if message.error():
                    ended.add(message.partition())
                else:
                    found[message.partition()].append(message)
        return [message for n in numbers for message in found[n]]
    finally:
        consumer.close()


def put(topics: Topics, key: bytes, value: bytes | None) -> None:
    """Write to the ledger topic, as another program."""
    refused: list[object] = []
    producer = Producer({"bootstrap.servers": topics.bootstrap})
    producer.produce(
        topics.ledger,
        value,
        key,
        on_delivery=lambda error, _: refused.extend([error] * bool(error)),
    )
    assert producer.flush(20) == 0
    assert not refused


def forget_group(broker: Broker, topics: Topics) -> None:
    """What expiry does."""
    admin = broker.admin()  # by name: its answers die with it
    admin.delete_consumer_groups([topics.pipeline])[topics.pipeline].result(20)


def empty_ledger(broker: Broker, topics: Topics) -> None:
    """Delete all records of the ledger topic."""
    _set_policy(broker, topics, "delete")
    broker.delete_records(topics.ledger, {0: _end_of(topics)})
    _set_policy(broker, topics, "compact")


def _set_policy(broker: Broker, topics: Topics, policy: str) -> None:
    entry = ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topics.ledger, incremental_configs=[entry])
    admin = broker.admin()
    admin.incremental_alter_configs([resource])[resource].result(20)


def _end_of(topics: Topics) -> int:
    reader = Consumer({"bootstrap.servers": topics.bootstrap, "group.id": "tests"})
    try:
        end: int = reader.get_watermark_offsets(TopicPartition(topics.ledger, 0), 20)[1]
        return end
    finally:
        reader.close()
