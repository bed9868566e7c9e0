"""Copies of topics with damage, as a pipeline that is wrong would have written them.

A log can't be edited. So a copy of it is written by a plain producer, and audited by a pipeline
that names the copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from confluent_kafka import Producer, TopicCollection

from oncely.errors import check
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker


class Kept(NamedTuple):
    """A record of a topic."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    at: int

    @property
    def parts(self) -> list[Any]:
        """The key of a ledger's message."""
        found: list[Any] = json.loads(self.key or b"null")
        return found

    @property
    def entry(self) -> dict[str, Any]:
        """The value of a ledger's message."""
        found: dict[str, Any] = json.loads(self.value or b"null")
        return found

    def saying(self, **changes: Any) -> Kept:
        """The same message of a ledger with some other fields."""
        return self._replace(value=json.dumps({**self.entry, **changes}).encode())

    def is_position(self, topic: str, partition: int) -> bool:
        """True for a ledger's position of a topic-partition."""
        return self.parts[0] == "position" and self.parts[2:] == [topic, partition]


def kept(brokers: str, topic: str) -> list[Kept]:
    """The committed records of a topic."""
    return [
        Kept(m.partition(), m.key(), m.value(), m.headers() or [], m.timestamp()[1])
        for m in messages(brokers, topic)
    ]


def write(brokers: str, topic: str, records: Iterable[Kept]) -> None:
    """Append records."""
    producer = Producer(
        {"bootstrap.servers": brokers, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
    )
    for one in records:
        producer.produce(
            topic, one.value, one.key, one.partition, timestamp=one.at, headers=one.headers
        )
    check(producer.flush(60) == 0, "the broker does not answer")


def topic_id(broker: Broker, topic: str) -> str:
    """The id of a topic."""
    admin = broker.admin()
    found = admin.describe_topics(TopicCollection([topic]))[topic].result(30)
    return str(found.topic_id)


def moved(ledger: list[Kept], topic: str, partition: int, by: int) -> list[Kept]:
    """A ledger whose newest position of a partition is another one."""
    newest = [one for one in ledger if one.is_position(topic, partition)][-1]
    return [*ledger, newest.saying(position=newest.entry["position"] + by)]
