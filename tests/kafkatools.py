"""What tests of the Kafka sink share: sinks, and the outcome looked at with plain clients."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from oncely.core import ranges as own
from oncely.core.claim import Fence
from oncely.kafka.client import make
from oncely.kafka.sender import Producer
from oncely.kafka.topics import ledger_partition
from oncely.kinds.kafka.format import RecordFormat
from oncely.kinds.kafka.sink import KafkaSink
from oncely.stores.topic.cluster import PipelineTopics
from oncely.testing.readers import Isolation, messages
from oncely.testing.servers.kafka import Broker
from tests.sinktools import SCHEMA, SOURCE, T1, open_sink

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
    turns: bool = False  # the sink moves positions by two ids in turn

    def sink(
        self, form: RecordFormat | None = None, run: str | None = None, **more: Any
    ) -> KafkaSink:
        """A sink as the driver makes it."""
        place = PipelineTopics(
            self.brokers or self.bootstrap, self.pipeline, self.group or self.pipeline,
            self.ledger, **{"timeout": 20.0, **more},
        )  # fmt: skip
        form = form or RecordFormat(SCHEMA, topic=self.output, key=None)
        sink = KafkaSink(place, form, self.rejects, turns=self.turns)
        return replace(sink, run=run) if run else sink

    def ids(self) -> list[int]:
        """What a reader of committed records sees, sorted."""
        return sorted(one["id"] for one in self.values())

    def values(self) -> list[Any]:
        """The JSON values in the output, in order, as a reader of committed records sees them."""
        return [json.loads(m.value()) for m in self.records(self.output)]

    def records(self, topic: str, level: Isolation = "read_committed") -> list[Any]:
        """All messages of a topic up to its end, partition by partition."""
        return messages(self.bootstrap, topic, level)

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

    @property
    def ledger_partition(self) -> int:
        """The pipeline's partition of the ledger topic, which exists."""
        return ledger_partition(self.pipeline)

    def ledger_positions(self) -> dict[own.TopicPartition, tuple[int, int]]:
        """Position and epoch, the last word of the ledger topic on each."""
        found: dict[own.TopicPartition, tuple[int, int]] = {}
        for message in self.records(self.ledger):
            key = json.loads(message.key())
            if key[:2] == ["position", self.pipeline]:
                value = json.loads(message.value())
                found[own.TopicPartition(key[2], key[3])] = (value["position"], value["epoch"])
        return found

    def ledger_ranges(self) -> list[tuple[int, int, int, str]]:
        """Partition, start, end and kind of every range in the ledger topic, in order."""
        return [
            (key[3], value["start"], value["end"], value["kind"])
            for message in self.records(self.ledger)
            if (key := json.loads(message.key()))[:2] == ["position", self.pipeline]
            and (value := json.loads(message.value()))["start"] < value["end"]
        ]


_there: set[tuple[int, str]] = set()
"""Topics that this process has seen, by the broker's pid."""


def ensure_once(broker: Broker, topic: str, partitions: int) -> None:
    """Create a topic that many tests share, and that none deletes."""
    if (broker.pid, topic) not in _there:
        broker.ensure_topic(topic, partitions)
        _there.add((broker.pid, topic))


SHARED_LEDGER = f"ledger-{uuid.uuid4().hex[:12]}"
"""A ledger topic of this process, for tests that leave no transaction open in it.

To create the sixteen partitions of one takes the broker more time than the test of a commit.
"""


def make_topics(
    broker: Broker,
    partitions: int = 1,
    config: Mapping[str, str] | None = None,
    ledger: str | None = None,
) -> Topics:
    """New topics for one test; the ledger is left to the sink, and is new, too, unless given."""
    name = uuid.uuid4().hex[:12]
    # The broker takes offsets of topics that exist only.
    for source in SOURCE.topic_ids:
        ensure_once(broker, source, 4)
    output = broker.create_topic(f"out-{name}", partitions, config)
    rejects = broker.create_topic(f"rejects-{name}")
    return Topics(broker.bootstrap, f"p-{name}", output, rejects, ledger or f"ledger-{name}")


def ready(
    sink: KafkaSink, start: Mapping[own.TopicPartition, int] | None = None
) -> tuple[KafkaSink, Fence]:
    """The sink opened and bound, and its fence."""
    return sink, open_sink(sink, start).fence


def put(topics: Topics, key: bytes, value: bytes | None, partition: int | None = None) -> None:
    """Write to the ledger topic, into the pipeline's partition or another, as another program."""
    refused: list[object] = []
    producer = Producer({"bootstrap.servers": topics.bootstrap})
    producer.produce(
        topics.ledger,
        value,
        key,
        topics.ledger_partition if partition is None else partition,
        on_delivery=lambda error, _: refused.extend([error] * bool(error)),
    )
    assert producer.flush(120) == 0
    assert not refused


def lose_position(broker: Broker, topics: Topics) -> None:
    """A tombstone in the ledger topic, and an offset that has expired: neither knows where t-1
    was."""
    put(topics, topics.sink().pipeline_topics.keys.position_key(T1), None)
    forget_group(broker, topics)


def lose_record_and_position(broker: Broker, topics: Topics) -> None:
    """Nor is there a record of the pipeline."""
    put(topics, topics.sink().pipeline_topics.keys.pipeline_key(), None)
    lose_position(broker, topics)


def lose_all(broker: Broker, topics: Topics) -> None:
    """Nothing is left but the emptied ledger topic."""
    forget_group(broker, topics)
    empty_ledger(broker, topics)


def forget_group(broker: Broker, topics: Topics) -> None:
    """What expiry does."""
    admin = broker.admin()  # by name: its answers die with it
    admin.delete_consumer_groups([topics.pipeline])[topics.pipeline].result(120)


def empty_ledger(broker: Broker, topics: Topics) -> None:
    """Delete all records of the ledger topic."""
    set_config(broker, topics.ledger, {"cleanup.policy": "delete"})
    broker.delete_records(topics.ledger, {topics.ledger_partition: _end_of(topics)})
    set_config(broker, topics.ledger, {"cleanup.policy": "compact"})


def set_config(broker: Broker, topic: str, config: Mapping[str, str]) -> None:
    """Set configuration of a topic, and wait until the broker applies it.

    A broker answers before. It applies the metadata log update by update, and of one update topics
    before configuration: the second of two new topics is in a later update than the configuration.
    """
    entries = [
        ConfigEntry(name, one, incremental_operation=AlterConfigOpType.SET)
        for name, one in config.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = broker.admin()
    admin.incremental_alter_configs([resource])[resource].result(120)
    for _ in range(2):
        broker.create_topic(f"later-{uuid.uuid4().hex[:12]}")


def _end_of(topics: Topics) -> int:
    reader = Consumer({"bootstrap.servers": topics.bootstrap, "group.id": "tests"})
    try:
        own = TopicPartition(topics.ledger, topics.ledger_partition)
        end: int = reader.get_watermark_offsets(own, 60)[1]
        return end
    finally:
        reader.close()


class _Replaced:
    """A client of which some methods are others; each gets the client before its arguments."""

    def __init__(self, inner: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._inner, self._methods = inner, methods

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return partial(self._methods[name], self._inner)
        return getattr(self._inner, name)


def producing_by(**methods: Callable[..., Any]) -> Callable[..., Any]:
    """A ``connect`` whose producers have these methods instead of their own."""

    def connect(kind: Any, *args: Any, **own: Any) -> Any:
        made = make(kind, *args, **own)
        return _Replaced(made, methods) if issubclass(kind, Producer) else made

    return connect


def connected(sink: KafkaSink, connect: Callable[..., Any]) -> KafkaSink:
    """The sink with other clients."""
    return replace(sink, pipeline_topics=replace(sink.pipeline_topics, connect=connect))
