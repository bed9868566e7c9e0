"""Kafka's own tools see the pipeline's position and lag, also after a move backwards."""

from __future__ import annotations

from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions

from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.testing.servers.kafka import Broker
from tests.scenarios.world import World


def test_the_consumer_group_shows_the_position(
    make_world: Any, runtime: Any, broker: Broker
) -> None:
    world: World = make_world(2)
    world.publish(100, partitions=2)
    Pipeline(parse(world.settings())).run("latest", spark=runtime)
    world.publish(30, partitions=2, first=100)
    request = [ConsumerGroupTopicPartitions(f"oncely-{world.name}")]
    admin = broker.admin()  # kept: a client that is collected never answers
    answer = admin.list_consumer_group_offsets(request)
    offsets = next(iter(answer.values())).result().topic_partitions
    assert {tp.partition: tp.offset for tp in offsets} == {0: 50, 1: 50}
