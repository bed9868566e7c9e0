"""What tests of the delivery semantics share: destinations of each kind, and steps that fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oncely.commit.run import CommitContext, Interval, OpenLedger
from oncely.core.claim import Fence, Opened, Takeover
from oncely.core.ranges import TopicPartition
from oncely.stores.offsets.base import OffsetStore, StoreLedger
from oncely.stores.sql.connection import close_all
from oncely.testing.servers.kafka import Broker
from tests.deltatools import Committing, make_place
from tests.kafkatools import SHARED_LEDGER, make_topics
from tests.sinktools import SOURCE, T0, Place, postgres_place, sink_to, sqlite_place

KINDS = ("postgresql", "sqlite", "kafka", "delta")


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
    make: Callable[[], Any]
    ids: Callable[[], list[int]]
    rejects: Callable[[], int]


def target(kind: str, fixture: Callable[[str], Any]) -> Iterator[Target]:
    """A new destination; servers come from the fixtures of conftest."""
    if kind == "kafka":
        yield _topics(fixture("broker"))
    elif kind == "delta":
        place = make_place(fixture("tmp_path"))
        yield Target(
            "delta",
            lambda: Committing(place.sink()),
            place.ids,
            lambda: len(place.letters()),
        )
    elif kind == "sqlite":
        with sqlite_place() as place:
            yield _table(place)
    else:
        yield _table(postgres_place(fixture("shared_database")))
    close_all()


def _topics(broker: Broker) -> Target:
    topics = make_topics(broker, ledger=SHARED_LEDGER)
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


def run_of(
    sink: Any,
    store: OffsetStore | None = None,
    *,
    position_first: bool = False,
    interval: Interval | None = None,
) -> OpenLedger[Any]:
    """A run whose records and positions take effect in two steps, not opened."""
    context = CommitContext(
        sink,
        NOTHING,
        NOTHING,
        store=None if store is None else StoreLedger(store, "p"),
        order="position_first" if position_first else "records_first",
        interval=interval,
    )
    return OpenLedger(context)


def put(run: OpenLedger[Any], **fields: Any) -> None:
    """Replace a part of what it commits with."""
    run.context = replace(run.context, **fields)


NOTHING: Any = None


def opened(
    run: Any, at: Mapping[TopicPartition, int] | None = None, expected: int | None = None
) -> Opened:
    """Open a run, or a sink, and bind it to its destination."""
    begin = {T0: 0} if at is None else at
    done: Opened = run.open(Takeover(SOURCE, lambda: begin, begin, expected))
    return done


def ready(run: Any, at: Mapping[TopicPartition, int] | None = None) -> tuple[Any, Fence]:
    """A run, or a sink, opened and bound, and its fence."""
    fence = opened(run, at).fence
    return (run if isinstance(run, OpenLedger) else run.bind()), fence


def positions_in(of: Any, fence: Fence) -> dict[TopicPartition, int]:
    """Positions as they are."""
    ledger = of.context.ledger if isinstance(of, OpenLedger) else of.ledger
    return {tp: entry.position for tp, entry in ledger.positions(fence).items()}


def twice(ids: range) -> list[int]:
    """Every id two times, sorted."""
    return sorted(itertools.chain(ids, ids))
