"""Counts from outside: plain clients, nothing of the pipeline's code."""

from __future__ import annotations

import json
from collections import Counter

import psycopg
from confluent_kafka import Consumer, TopicPartition

_PATIENCE = 60.0  # seconds without a message or an end


def in_table(url: str, table: str) -> Counter[int]:
    """How often each id stands in a table."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(f'SELECT id, count(*) FROM "{table}" GROUP BY id').fetchall()
    return Counter({int(id_): int(count) for id_, count in rows})


def in_topic(brokers: str, topic: str) -> Counter[int]:
    """How often a reader of committed records sees each id in a topic of one partition.

    Raises:
        TimeoutError: the end of the topic did not come.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "oncely-semantics-reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
            "log_level": 0,
        }
    )
    found: Counter[int] = Counter()
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        while True:
            message = consumer.poll(_PATIENCE)
            if message is None:
                raise TimeoutError(f"the end of topic {topic} did not come")
            if message.error():
                return found
            found[json.loads(message.value())["id"]] += 1
    finally:
        consumer.close()


def damage(found: Counter[int], records: int) -> tuple[int, int]:
    """How many of the ids from 0 on are missing, and how many effects are beyond the first."""
    lost = sum(1 for one in range(records) if not found[one])
    return lost, sum(count - 1 for count in found.values() if count > 1)
