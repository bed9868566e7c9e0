"""What scenarios of the Kafka sink share: a pipeline from topic to topic, and readers of its own.

Nothing here uses Oncely: plain ``read_committed`` consumers compare the source topic with the
output and the rejects, record by record.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from oncely.testing.processes import await_that
from oncely.testing.readers import ends, held_back, messages
from tests.scenarios.world import World, assert_unbroken, produce, topic_content

KEYS = 20
Position = tuple[int, int]
"""Partition and offset in the source topic."""


@dataclass
class TopicWorld(World):
    """Topics for source, output, rejects and ledger, and one pipeline name."""

    out_partitions: int = 3

    @property
    def output(self) -> str:
        """Where records go."""
        return f"out-{self.name}"

    @property
    def rejects(self) -> str:
        """Where dead letters go."""
        return f"{self.output}.rejects"

    @property
    def ledger(self) -> str:
        """The topic of positions."""
        return f"ledger-{self.name}"

    def settings(self, **sections: Mapping[str, Any]) -> dict[str, Any]:
        """The pipeline file's content; keyword arguments add to its sections."""
        raw = super().settings(**sections)
        own = {**self.overrides.get("sink", {}), **sections.get("sink", {})}
        raw["sink"] = {
            "kind": "kafka",
            "topic": self.output,
            "key": "grp",
            "ledger_topic": self.ledger,
            **own,
        }
        return {**raw, "sink": {k: v for k, v in raw["sink"].items() if v is not None}}

    def publish(
        self, count: int, *, pad: int = 0, partitions: int = 4, first: int = 0, bad_every: int = 0
    ) -> None:
        """Records with ascending ids; those of a key are in one partition, in that order."""
        produce(
            self.brokers,
            self.topic,
            (
                (i % KEYS % partitions, key(i), b"{" if bad_every and i % bad_every == 0
                 else value(i, pad))
                for i in range(first, first + count)
            ),
        )  # fmt: skip

    def make_output(self, config: Mapping[str, str] | None = None) -> None:
        """Create the output; else the sink would, with the broker's number of partitions."""
        from confluent_kafka.admin import NewTopic

        admin = self.admin()
        topic = NewTopic(self.output, self.out_partitions, 1, config=dict(config or {}))
        admin.create_topics([topic], operation_timeout=60)[self.output].result(120)
        await_that(
            lambda: len(ends(self.brokers, self.output)) == self.out_partitions, "the output topic"
        )

    def admin(self) -> AdminClient:
        """A plain admin client."""
        return AdminClient({"bootstrap.servers": self.brokers})

    def records(self, topic: str | None = None) -> list[Any]:
        """What a reader of committed records finds in the output, partition by partition.

        A transaction is seen when its markers are written, a moment after its commit has its
        answer.
        """
        await_that(lambda: not self.held_back(topic or self.output), "the end of transactions")
        return messages(self.brokers, topic or self.output)

    def ids(self) -> list[int]:
        """The ids in the output, sorted."""
        return sorted(json.loads(one.value())["id"] for one in self.records())

    def exists(self, topic: str) -> bool:
        """Whether the broker knows the topic."""
        return topic in self.admin().list_topics(timeout=60).topics

    def positions(self) -> dict[int, int]:
        """The last word of the ledger topic on each partition of the source."""
        found: dict[int, int] = {}
        for one in self.records(self.ledger):
            kind, *_, number = json.loads(one.key())
            if kind == "position" and one.value() is None:
                found.pop(number, None)
            elif kind == "position":
                found[number] = json.loads(one.value())["position"]
        return found

    def shown(self) -> dict[int, int]:
        """What the consumer group shows to lag tools."""
        group = f"oncely-{self.name}"
        admin = self.admin()  # kept: a client that is collected never answers
        wanted = [ConsumerGroupTopicPartitions(group)]
        answer = admin.list_consumer_group_offsets(wanted, require_stable=True)[group]
        return {tp.partition: tp.offset for tp in answer.result(120).topic_partitions}

    def held_back(self, topic: str) -> bool:
        """Whether an open transaction hides the end of a topic from committed readers."""
        return held_back(self.brokers, topic)


def key(i: int) -> bytes:
    """The key of record ``i``."""
    return f"k{i % KEYS}".encode()


def value(i: int, pad: int = 0) -> bytes:
    """The value of record ``i``."""
    return json.dumps({"id": i, "grp": f"k{i % KEYS}", "pad": "x" * pad}).encode()


# -- the readers -----------------------------------------------------------------------------


class Seen(NamedTuple):
    """A record as a reader saw it."""

    partition: int
    offset: int
    key: str
    id: int


@dataclass
class Watcher:
    """A reader of committed records that follows the output all the time."""

    seen: list[Seen] = field(default_factory=list)

    def take(self, message: Any) -> None:
        """Note a record."""
        where = (message.partition(), message.offset())
        content = json.loads(message.value())
        self.seen.append(Seen(*where, message.key().decode(), content["id"]))


@contextmanager
def watching(world: TopicWorld) -> Iterator[Watcher]:
    """A reader beside what the block does; afterwards it has read to the end of the output."""
    watcher, ending = Watcher(), threading.Event()

    def read() -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": world.brokers,
                "group.id": uuid.uuid4().hex,
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 20,
                "log_level": 0,
            }
        )
        consumer.assign([TopicPartition(world.output, n, 0) for n in range(world.out_partitions)])
        at_end: set[int] = set()
        while not (ending.is_set() and len(at_end) == world.out_partitions):
            if not ending.is_set():
                at_end.clear()
            for message in consumer.consume(5_000, 0.1):
                if message.error() is None:
                    watcher.take(message)
                    at_end.discard(message.partition())
                elif message.error().name() == "_PARTITION_EOF":
                    at_end.add(message.partition())
            if ending.is_set() and len(at_end) < world.out_partitions:
                at_end |= _at_end(consumer, world)
        consumer.close()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield watcher
    finally:
        ending.set()
        thread.join(180)
        assert not thread.is_alive(), "the reader did not come to the end"


def _at_end(consumer: Any, world: TopicWorld) -> set[int]:
    """Partitions whose end was reached before; it is told only once."""
    at = {tp.partition: tp.offset for tp in consumer.position(consumer.assignment())}
    found = set()
    for n in range(world.out_partitions):
        _, end = consumer.get_watermark_offsets(TopicPartition(world.output, n), timeout=60)
        if at[n] == end or (end == 0 and at[n] < 0):
            found.add(n)
    return found


def check_seen(seen: list[Seen], expected: Mapping[int, Position]) -> None:
    """Every id once; those of a key in one partition and in the order of the source."""
    counts = Counter(one.id for one in seen)
    doubled = [i for i, n in counts.items() if n > 1]
    lost, invented = sorted(expected.keys() - counts), sorted(counts.keys() - expected.keys())
    wrong = {"lost": lost[:5], "doubled": doubled[:5], "invented": invented[:5]}
    assert not any(wrong.values()), f"{len(expected)} records: {wrong}"
    places: dict[str, set[int]] = {}
    newest: dict[str, int] = {}
    for one in seen:
        _, offset = expected[one.id]  # a producer that sends again may have changed the ids' order
        assert newest.get(one.key, -1) < offset, f"key {one.key}: {one.id} came late"
        newest[one.key] = offset
        places.setdefault(one.key, set()).add(one.partition)
    assert all(len(found) == 1 for found in places.values())


def assert_exactly_once(world: TopicWorld, watcher: Watcher | None = None) -> int:
    """Each record of the source is one record of the output, or one dead letter; how many."""
    good: dict[int, Position] = {}
    bad: list[Position] = []
    for at, text in topic_content(world.brokers, world.topic).items():
        if text == b"{":
            bad.append(at)
        elif text is not None:
            good[json.loads(text)["id"]] = at
    final = Watcher()
    for message in world.records():
        final.take(message)
    check_seen(final.seen, good)
    if watcher is not None:
        # Sorted by offset it is the same: what it saw was never taken back, and nothing was
        # put in behind it. In its own order, keys are in order, too.
        check_seen(watcher.seen, good)
        assert sorted(watcher.seen) == sorted(final.seen)
    letters = world.records(world.rejects) if world.exists(world.rejects) else []
    assert sorted(origin(one) for one in letters) == sorted(bad)
    positions = world.positions()
    ends = Counter(partition for partition, _ in [*good.values(), *bad])
    assert {n: positions.get(n, 0) for n in ends} == dict(ends), "positions stand at the ends"
    assert world.shown().items() >= dict(ends).items()
    assert_unbroken(world)
    return len(final.seen)


def origin(letter: Any) -> Position:
    """Where the record of a dead letter stood."""
    about = dict(letter.headers())
    return int(about["oncely.partition"]), int(about["oncely.offset"])
