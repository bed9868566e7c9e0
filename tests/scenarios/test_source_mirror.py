"""The position is shown by Kafka's own consumer groups, backwards too."""

from __future__ import annotations

import time
from collections.abc import Callable

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient

from oncely.core.ranges import TopicPartition
from oncely.errors import Unavailable
from oncely.kafka.source import KafkaSource
from oncely.testing.servers.kafka import Broker

MakeTopic = Callable[..., str]


def seen_by_kafka(broker: Broker, group: str) -> dict[tuple[str, int], int]:
    """What ``kafka-consumer-groups --describe`` shows: it asks the same of the broker."""
    admin = AdminClient(broker.client_config())
    request = [ck.ConsumerGroupTopicPartitions(group)]
    answer = admin.list_consumer_group_offsets(request)[group].result(120)
    return {(one.topic, one.partition): one.offset for one in answer.topic_partitions}


def test_positions_forward_and_back(broker: Broker, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=2, records=[(0, None, b"x")] * 10)
    group = f"oncely-{topic}"
    p0, p1 = (TopicPartition(topic, n) for n in (0, 1))
    with KafkaSource(broker.bootstrap, [topic]) as source:
        assert source.mirrored(group) == {}
        for positions in ({p0: 0, p1: 0}, {p0: 10, p1: 0}, {p0: 3, p1: 0}):
            source.mirror(group, positions)
            assert seen_by_kafka(broker, group) == positions
            assert source.mirrored(group) == positions
        source.mirror(group, {p0: 7})
        assert source.mirrored(group) == {p0: 7, p1: 0}
        source.mirror(group, {})


def test_a_group_in_use_by_somebody_else(broker: Broker, make_topic: MakeTopic) -> None:
    topic = make_topic(records=[(0, None, b"x")])
    group = f"taken-{topic}"
    member = ck.Consumer(
        {**broker.client_config(), "group.id": group, "auto.offset.reset": "earliest"}
    )
    member.subscribe([topic])
    deadline = time.monotonic() + 180
    while not member.assignment():
        member.poll(0.1)
        assert time.monotonic() < deadline
    try:
        with (
            KafkaSource(broker.bootstrap, [topic]) as source,
            pytest.raises(Unavailable, match=f"mirror the position to group '{group}'"),
        ):
            source.mirror(group, {TopicPartition(topic, 0): 1})
    finally:
        member.close()
