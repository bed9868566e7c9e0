"""A log is read for as long as it comes; silence ends a reading."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.errors import Unavailable
from oncely.kafka.topics import TopicLog
from tests import jobtools

TIMEOUT = 30.0
Message = partial(jobtools.Message, of="ledger")


class Clock:
    """Goes on when a consumer waits."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Consumer:
    """Each message takes most of the time that an answer may take."""

    clock: Clock
    messages: Iterator[jobtools.Message]
    at_once: int = 0
    assigned: list[Any] = field(default_factory=list)

    def list_topics(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(orig_broker_id=1)

    def assign(self, partitions: list[Any]) -> None:
        self.assigned += partitions

    def unassign(self) -> None:
        self.assigned.clear()

    def poll(self, _: float) -> jobtools.Message | None:
        self.clock.now += 0.6 * TIMEOUT
        return next(self.messages, None)

    def consume(self, *_: Any) -> list[jobtools.Message]:
        return list(itertools.islice(self.messages, self.at_once))


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


def test_what_comes_behind_the_end_is_left_for_the_next_reading(clock: Clock) -> None:
    taken: list[int] = []
    ours = log(taken, 3)
    come = Consumer(clock, iter([Message(n) for n in range(9)]), at_once=9)
    ours.read(lambda: come, stable=True)
    assert (taken, ours.next) == ([0, 1, 2], 3)


@pytest.mark.parametrize("at_once", [0, 9])
def test_a_transaction_that_ends_while_the_log_is_read_is_taken_as_a_whole(
    clock: Clock, at_once: int
) -> None:
    """At offset 2 is the marker of the first; the second one was open when the end was asked."""
    taken: list[int] = []
    ours = log(taken, 3)
    sent = [*(Message(n) for n in (0, 1, 3, 4, 5)), Message(7, end=True)]
    ours.read(lambda: Consumer(clock, iter(sent), at_once), stable=False)
    assert (taken, ours.next) == ([0, 1], 3)
    log_of_all = log(taken, 7)
    log_of_all.next = ours.next
    log_of_all.read(lambda: Consumer(clock, iter(sent[2:]), at_once), stable=False)
    assert (taken, log_of_all.next) == ([0, 1, 3, 4, 5], 7)


def test_silence_ends_a_reading_and_what_was_read_is_kept(clock: Clock) -> None:
    taken: list[int] = []
    ours = log(taken, 5)
    with pytest.raises(Unavailable, match="hides the messages from offset 3 on"):
        ours.read(lambda: Consumer(clock, iter([Message(n) for n in range(3)])), stable=True)
    ours.read(lambda: Consumer(clock, iter([Message(n) for n in (3, 4)])), stable=True)
    assert taken == list(range(5))
