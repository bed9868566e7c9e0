"""A log is read for as long as it comes; silence ends a reading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from oncely.clients.kafka.compacted_topic import TopicLog
from oncely.errors import Unavailable

TIMEOUT = 30.0


@dataclass
class Message:
    """A record, or the end of the partition at ``at``."""

    at: int
    end: bool = False

    def error(self) -> KafkaError | None:
        return KafkaError(KafkaError._PARTITION_EOF) if self.end else None

    def offset(self) -> int:
        return self.at


class Clock:
    """Goes on when a consumer waits."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Consumer:
    """Each message takes most of the time that an answer may take."""

    clock: Clock
    messages: Iterator[Message]
    assigned: list[Any] = field(default_factory=list)

    def list_topics(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(orig_broker_id=1)

    def assign(self, partitions: list[Any]) -> None:
        self.assigned += partitions

    def unassign(self) -> None:
        self.assigned.clear()

    def poll(self, _: float) -> Message | None:
        self.clock.now += 0.6 * TIMEOUT
        return next(self.messages, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


def log(taken: list[int], end: int) -> TopicLog:
    def one(_: str, request: Any) -> Any:
        client = SimpleNamespace(list_offsets=lambda wanted, **__: wanted)
        (here,) = request(client, 1.0)
        return {here: SimpleNamespace(offset=end)}

    return TopicLog(
        "ledger",
        "the ledger topic",
        SimpleNamespace(one=one),  # type: ignore[arg-type]
        brokers="h:1",
        timeout=TIMEOUT,
        take=lambda message: taken.append(message.offset()),
        forget=lambda: None,
    )


def test_a_long_log_is_read_to_its_end(clock: Clock) -> None:
    taken: list[int] = []
    consumer = Consumer(clock, iter([Message(n) for n in range(20)]))
    log(taken, 20).read(lambda: consumer, stable=True)
    assert taken == list(range(20))
    assert clock.now > 10 * TIMEOUT


def test_a_log_that_ends_with_markers_is_read_to_its_end(clock: Clock) -> None:
    taken: list[int] = []
    consumer = Consumer(clock, iter([Message(0), Message(1), Message(3, end=True)]))
    log(taken, 3).read(lambda: consumer, stable=True)
    assert taken == [0, 1]


def test_silence_ends_a_reading_and_what_was_read_is_kept(clock: Clock) -> None:
    taken: list[int] = []
    ours = log(taken, 5)
    with pytest.raises(Unavailable, match="hides the messages from offset 3 on"):
        ours.read(lambda: Consumer(clock, iter([Message(n) for n in range(3)])), stable=True)
    ours.read(lambda: Consumer(clock, iter([Message(n) for n in (3, 4)])), stable=True)
    assert taken == list(range(5))
