"""What the processes of the Kafka scenarios do: write a range, and die or stop on the way."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from oncely.commit.backoff import Backoff
from oncely.commit.path import commit
from oncely.core.batch import Chunk
from oncely.core.claim import Fence, Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import Fenced
from oncely.kafka.client import make
from oncely.kafka.sender import Producer
from oncely.kinds.kafka.sink import KafkaSink
from oncely.testing.processes import kill_self, stop_self
from tests.kafkatools import Topics, open_sink
from tests.replaytools import judging, replayed
from tests.sinktools import SOURCE, T0, T1, Rec, at_t0, chunk, numbered, together

LAST = 20
BAD = 13
START = {T0: 0, T1: 0}
DECIDES = 5
"""The transaction that decides a reset: after an epoch, two positions and the end of a takeover."""


def patient() -> Backoff:
    return Backoff(0.01, 0.2, 30)


class Calls:
    """Counts the calls to every producer of a process, and does something at one of them.

    With ``only`` calls of that name count.
    """

    def __init__(self, at: int, when: str, what: Callable[[], None], only: str = "") -> None:
        self.at, self.when, self.what, self.only = at, when, what, only
        self.make: Callable[..., Any] = make
        self.names: list[str] = []
        self._lock = threading.Lock()

    def connect(self, kind: Any, *args: Any, **own: Any) -> Any:
        made = self.make(kind, *args, **own)
        return _Counted(made, self) if issubclass(kind, Producer) else made

    def around(self, name: str, call: Callable[[], Any]) -> Any:
        with self._lock:
            self.names.append(name)
            mine = self.here(name)
        if mine and self.when == "before":
            self.what()
        done = call()
        if mine and self.when == "after":
            self.what()
        return done

    def here(self, name: str) -> bool:
        """Whether the call that has just begun is the one."""
        counted = self.names.count(name) if self.only else len(self.names)
        return counted == self.at and name == (self.only or name)


class _Counted:
    def __init__(self, inner: Any, calls: Calls) -> None:
        self._inner, self._calls = inner, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "list_topics":  # once or twice, by chance; it tells nothing to the broker
            return method
        return lambda *args, **own: self._calls.around(name, lambda: method(*args, **own))


def what(both: bool) -> Chunk:
    """Twenty records of t-0, one of them a reject; with ``both`` five of t-1 too."""
    records = [*numbered(0, BAD), Rec(BAD, bad="no JSON"), *numbered(BAD + 1, LAST)]
    if not both:
        return at_t0(0, records)
    return chunk({T0: (0, records), T1: (0, numbered(100, 105))})


def hooked(sink: KafkaSink, calls: Calls) -> KafkaSink:
    """The sink, whose producers are counted; also by those that count already."""
    calls.make = sink.pipeline_topics.connect
    return dataclasses.replace(
        sink, pipeline_topics=dataclasses.replace(sink.pipeline_topics, connect=calls.connect)
    )


def write(
    topics: Topics, fence: Fence, at: int, when: str, how: str, both: bool, more: dict[str, Any]
) -> tuple[list[str], list[tuple[TopicPartition, bool]] | str]:
    """Commit the chunk; at the ``at``-th call to a producer the process dies or stops."""
    calls = Calls(at, when, kill_self if how == "kill" else stop_self)
    sink = hooked(topics.sink(**more), calls)
    try:
        done = list(commit(together(sink), what(both), fence, None, patient()))
    except Fenced:
        return calls.names, "fenced"
    return calls.names, [(one.partition, one.replayed) for one in done]


def open_and_die(topics: Topics, at: int, when: str, *partitions: TopicPartition) -> list[str]:
    """Open, of some partitions when they are named; at a call to a producer the process dies."""
    calls = Calls(at, when, kill_self)
    hooked(topics.sink(), calls).open(
        Takeover(SOURCE, lambda: START, START, partitions=frozenset(partitions) or None)
    )
    return calls.names


def reset_and_die(
    topics: Topics, to: dict[TopicPartition, int], at: int, when: str, only: str
) -> list[str]:
    """A person resets; at the ``at``-th call to a producer the process dies."""
    calls = Calls(at, when, kill_self, only)
    hooked(topics.sink(), calls).open(Takeover(SOURCE, lambda: START, START, reset=lambda _: to))
    return calls.names


def reset_and_die_decided(topics: Topics, to: dict[TopicPartition, int]) -> None:
    """A person resets: the process stops before the transaction that decides it, and dies after."""
    stops = Calls(DECIDES, "before", stop_self, "begin_transaction")
    dies = Calls(DECIDES, "after", kill_self, "commit_transaction")
    sink = hooked(hooked(topics.sink(), stops), dies)
    sink.open(Takeover(SOURCE, lambda: START, START, reset=lambda _: to))


def restart(topics: Topics, both: bool) -> list[tuple[TopicPartition, bool]]:
    """A new run brings the same chunk, as a replay does."""
    sink = topics.sink()
    fence = open_sink(sink, START).fence
    done = list(commit(together(sink), what(both), fence, None, patient()))
    return [(one.partition, one.replayed) for one in done]


def write_range(topics: Topics, fence: Fence, start: int, end: int, at: int, how: str) -> str:
    """Commit numbered records; at the ``at``-th call to a producer the process dies or stops."""
    calls = Calls(at, "before", kill_self if how == "kill" else stop_self)
    sink = hooked(topics.sink(), calls)
    try:
        list(commit(together(sink), at_t0(start, numbered(start, end)), fence, None, patient()))
    except Fenced:
        return "fenced"
    return "done"


def replay(topics: Topics, at: int, when: str, how: str, more: dict[str, Any]) -> Any:
    """Replay all letters but one, in several transactions; the process dies or stops on the way.

    Returns the calls to producers, and how many were moved and kept.
    """
    calls = Calls(at, when, kill_self if how == "kill" else stop_self)
    judge = judging(lambda one: one.offset != BAD)
    return calls.names, replayed(hooked(topics.sink(**more), calls), judge, 3, patient())


def write_in_turns(topics: Topics, fence: Fence, name: str, at: int, when: str) -> list[str]:
    """Commit the records one by one; at the ``at``-th call of a name the process dies."""
    calls = Calls(at, when, kill_self, name)
    sink = hooked(topics.sink(), calls)
    for offset in range(LAST // 4):
        records = at_t0(offset, numbered(offset, offset + 1))
        list(commit(together(sink), records, fence, None, patient()))
    return calls.names


def restart_after(topics: Topics) -> None:
    """A new run goes on from the position up to the last record."""
    sink = topics.sink()
    opened = open_sink(sink, START)
    start = opened.positions[T0]
    list(commit(together(sink), at_t0(start, numbered(start, LAST)), opened.fence, None, patient()))
