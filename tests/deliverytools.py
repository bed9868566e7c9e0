"""What tests of the delivery semantics share: destinations of each kind, and steps that fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from oncely.core.offsets import TopicPartition
from oncely.delivery.apart import Apart
from oncely.delivery.positions import LedgerPositions, Positions, StorePositions
from oncely.local.kafka import Broker
from oncely.sinks.base import Fence, Halves, Opened
from oncely.sinks.sql.session import close_all
from oncely.stores.base import OffsetStore
from tests.kafkatools import make_topics
from tests.sinktools import SOURCE, T0, Place, postgres_place, sink_to, sqlite_place

KINDS = ("postgresql", "sqlite", "kafka")


class Crash(Exception):
    """The process dies here: nobody handles it."""


@dataclass(frozen=True)
class Target:
    """An empty destination.

    Attributes:
        kind: which.
        make: a sink as another process would make it.
        ids: of the rows that an outsider finds, sorted.
        rejects: how many dead letters there are.
    """

    kind: str
    make: Callable[[], Halves]
    ids: Callable[[], list[int]]
    rejects: Callable[[], int]


def target(kind: str, fixture: Callable[[str], Any]) -> Iterator[Target]:
    """A new destination; servers come from the fixtures of conftest."""
    if kind == "kafka":
        yield _topics(fixture("broker"))
    elif kind == "sqlite":
        with sqlite_place() as place:
            yield _table(place)
    else:
        yield _table(postgres_place(fixture("shared_database")))
    close_all()


def _topics(broker: Broker) -> Target:
    topics = make_topics(broker)
    return Target("kafka", topics.sink, topics.ids, lambda: len(topics.records(topics.rejects)))


def _table(place: Place) -> Target:
    return Target(
        place.kind,
        lambda: sink_to(place),
        lambda: [i for (i,) in place.sql("SELECT id FROM rows ORDER BY id")],
        lambda: place.sql("SELECT count(*) FROM oncely_rejects")[0][0],
    )


@dataclass
class Hurt:
    """One half, of which one method fails: before or after it has done its work.

    Attributes:
        inner: the half.
        method: its name.
        error: what it raises.
        after: after the work, as when an answer is lost.
        times: how often.
    """

    inner: Any
    method: str
    error: Exception
    after: bool = False
    times: int = 1
    calls: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._hurt(found) if name == self.method else found

    def _hurt(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **more: Any) -> Any:
            self.calls.append(args[0] if args else None)
            failing = len(self.calls) <= self.times
            if failing and not self.after:
                raise self.error
            done = work(*args, **more)
            if failing:
                raise self.error
            return done

        return method


def apart(
    records: Halves, store: OffsetStore | None = None, *, position_first: bool = False
) -> Apart:
    """Records and positions in two steps, not opened."""
    return Apart(records, positions_of(records, store), position_first)


def positions_of(records: Halves, store: OffsetStore | None) -> Positions:
    """The sink's ledger, or a store."""
    return LedgerPositions(records) if store is None else StorePositions(store, "p")


def opened(
    sink: Any, at: Mapping[TopicPartition, int] | None = None, expected: int | None = None
) -> Opened:
    """Open it, and bind it to its destination."""
    begin = {T0: 0} if at is None else at
    done: Opened = sink.open(SOURCE, lambda: begin, begin, expected)
    sink.bind()
    return done


def ready(sink: Any, at: Mapping[TopicPartition, int] | None = None) -> tuple[Any, Fence]:
    """The sink, opened and bound, and its fence."""
    begin = {T0: 0} if at is None else at
    fence = sink.open(SOURCE, lambda: begin, begin).fence
    return sink.bind(), fence


def standing(sink: Any, fence: Fence) -> dict[TopicPartition, int]:
    """Positions as they are."""
    return {tp: entry.position for tp, entry in sink.entries(fence).items()}


def twice(ids: range) -> list[int]:
    """Every id two times, sorted."""
    return sorted(itertools.chain(ids, ids))
