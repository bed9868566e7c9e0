"""The topic of a truth test: records, transactions, markers, aborted records, bad records."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Literal

from confluent_kafka import Producer

from oncely.errors import check
from oncely.testing.processes import await_that
from oncely.testing.readers import ends, held_back, messages
from oncely.testing.servers.kafka import Broker
from truth.damage import Damage, Place

Pool = Literal["row", "dead letter", "hole", "beyond", "nowhere"]

_MADE_AGAIN = "the topic was deleted and made again"

SCHEMA = (
    "id BIGINT NOT NULL, customer STRING, cents BIGINT NOT NULL, share DOUBLE, at TIMESTAMP NOT"
    " NULL, paid BOOLEAN"
)


def order(number: int, random: Random) -> bytes:
    """A record that becomes one row."""
    return json.dumps(
        {
            "id": number,
            "customer": random.choice(["", "Ada", "Grace Hopper", "Ørsted", "王小明"]),
            "cents": random.randint(1, 10**9),
            "share": random.random() + 0.5,
            "at": f"2026-01-{1 + number % 28:02}T{random.randint(0, 11):02}:15:00Z",
            "paid": bool(number % 2),
        }
    ).encode()


class Pools:
    """Places of each sort, in random order; each is taken once.

    Args:
        source: the topic.
        ends: the position of each partition; damage is below it, or beyond on purpose.
        random: the source of chance.
    """

    def __init__(self, source: Source, ends: Mapping[int, int], random: Random) -> None:
        self._random = random

        def below(places: Iterable[Place]) -> list[Place]:
            return self._shuffled(one for one in places if one[1] < ends[one[0]])

        self._left: dict[Pool, list[Place]] = {
            "row": below(source.records.keys() - source.bad),
            "dead letter": below(source.bad),
            "hole": below(source.holes),
            "beyond": self._shuffled((p, e + n) for p, e in ends.items() for n in range(99)),
            "nowhere": self._shuffled((99, n) for n in range(99)),
        }

    def draw(self, kinds: Mapping[str, Pool]) -> tuple[str, Place]:
        """A kind of damage whose pool is not used up, and its place."""
        kind = self._random.choice([kind for kind, pool in kinds.items() if self._left[pool]])
        return kind, self._left[kinds[kind]].pop()

    def _shuffled(self, places: Iterable[Place]) -> list[Place]:
        found = sorted(places)
        self._random.shuffle(found)
        return found


@dataclass
class Source:
    """A topic with hostile contents, and what a plain consumer sees in it.

    Attributes:
        brokers: the bootstrap address.
        topic: its name.
        partitions: the number of its partitions.
    """

    brokers: str
    topic: str
    partitions: int
    random: Random
    records: dict[Place, bytes] = field(default_factory=dict)
    bad: set[Place] = field(default_factory=set)
    holes: set[Place] = field(default_factory=set)
    _next: int = 0

    def publish(self, number: int) -> None:
        """Publish records in portions: plain, in transactions, and in aborted transactions."""
        left = number
        while left > 0:
            left -= self.portion(left)
        await_that(lambda: not held_back(self.brokers, self.topic), "the last marker")
        self.look()

    def portion(self, most: int = 400) -> int:
        """Publish some records in one of these ways; returns the number of those that count."""
        size = min(most, self.random.randint(1, 400))
        how = self.random.choice(["plain", "plain", "committed", "committed", "aborted"])
        self._portion(size, how)
        return size if how != "aborted" else 0

    def plain(self, number: int, partition: int) -> None:
        """Publish records into one partition, without a transaction."""
        for value in self._values(number):
            self._plain.produce(self.topic, value, partition=partition)
        check(self._plain.flush(60) == 0, "the broker does not answer")

    @contextmanager
    def made_again(self, broker: Broker, partitions: Iterable[int]) -> Iterator[list[Damage]]:
        """Delete the topic, and make it again with the same records."""
        kept = sorted(self.records.items())
        broker.delete_topic(self.topic)
        broker.create_topic(self.topic, self.partitions)
        producer = Producer({"bootstrap.servers": self.brokers, "linger.ms": 5})
        for (partition, _), value in kept:
            producer.produce(self.topic, value, partition=partition)
        check(producer.flush(60) == 0, "the broker does not answer")
        yield [Damage.unknown("source made again", _MADE_AGAIN, partitions)]

    def look(self) -> None:
        """Read the topic as any committed reader does."""
        found = messages(self.brokers, self.topic)
        self.records = {(one.partition(), one.offset()): one.value() for one in found}
        self.bad = {place for place, value in self.records.items() if value.startswith(b"!")}
        last = ends(self.brokers, self.topic)
        every = {(p, offset) for p, end in last.items() for offset in range(end)}
        self.holes = every - self.records.keys()

    def _portion(self, size: int, how: str) -> None:
        producer = self._plain if how == "plain" else self._transactional
        if how != "plain":
            producer.begin_transaction()
        for value in self._values(size):
            producer.produce(self.topic, value, partition=self.random.randrange(self.partitions))
        check(producer.flush(60) == 0, "the broker does not answer")
        if how == "committed":
            producer.commit_transaction(30)
        elif how == "aborted":
            producer.abort_transaction(30)

    @cached_property
    def _plain(self) -> Producer:
        return Producer({"bootstrap.servers": self.brokers, "linger.ms": 5})

    @cached_property
    def _transactional(self) -> Producer:
        own = {"transactional.id": uuid.uuid4().hex}
        producer = Producer({"bootstrap.servers": self.brokers, "linger.ms": 5, **own})
        producer.init_transactions(30)
        return producer

    def _values(self, number: int) -> Iterable[bytes]:
        for _ in range(number):
            self._next += 1
            bad = self.random.random() < 0.005
            yield b"!no JSON" if bad else order(self._next, self.random)
