"""One adapter for each sink: how the contract suite makes it, and what an outsider finds in it.

A sink that is new gets an adapter here, and passes the suite (``test_every_*.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from oncely.core.batch import Batch, Reject
from oncely.core.claim import Counts, Fence, Opened, Positions, Takeover
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.kinds.base import PacksRows
from oncely.stores.sql.connection import close_all
from oncely.testing.readers import messages
from tests import deltatools, filestools, kafkatools
from tests.contracts import looking
from tests.contracts.members import by_members
from tests.filestools import publish_all
from tests.kafkatools import SHARED_LEDGER
from tests.scenarios.publishing_jobs import batch_sink
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    Place,
    chunk,
    commit_all,
    numbered,
    postgres_place,
    sink_to,
    sqlite_place,
    with_rows,
)

CHUNKS = ("sqlite", "postgresql", "kafka", "delta")
"""Sinks whose tasks commit what they have read; a Delta table by a driver that does so."""

MEMBERS = ("sqlite-member", "postgresql-member", "kafka-member")
"""Likewise, committed by a member of a group."""

BATCHES = (*CHUNKS, "files")
"""Sinks to which a driver publishes a batch as a whole."""

ALL = BATCHES

Ranges = Mapping[TopicPartition, tuple[int, int]]
"""Start and end of what is read of each partition."""


@dataclass(frozen=True)
class SinkAdapter:
    """An empty destination.

    Attributes:
        kind: which.
        sink: makes a sink as another process would, in the way that it commits first: by chunks
            where it can.
        staging_sink: one whose driver publishes.
        ids: of the rows that a reader finds, sorted.
        rejects: the offsets of the dead letters that a reader finds, sorted.
        positions: the ledger's, seen from outside.
        history: (partition, start, end, kind) of each committed range, sorted; without what a
            start behind offset 0 passes over.
    """

    kind: str
    sink: Callable[[], Any]
    staging_sink: Callable[[], Any]
    ids: Callable[[], list[int]]
    rejects: Callable[[], list[int]]
    positions: Callable[[], dict[TopicPartition, int]]
    history: Callable[[], list[tuple[int, int, int, str]]]

    def write(self, sink: Any, fence: Fence, start: int, end: int, tp: TopicPartition = T0) -> bool:
        """Commit the records ``[start, end)``, ids as offsets; True when they had been before."""
        if self.kind in CHUNKS:
            done = commit_all(sink, chunk({tp: (start, numbered(start, end))}), fence)
            return all(one.replayed for one in done)
        return publish_all(sink, staged_batch(sink, fence, {tp: (start, end)}), fence)


def take_over(
    sink: Any,
    at: Positions | None = None,
    *,
    source: SourceIdentity = SOURCE,
    expected: int | None = None,
    reset: Callable[[Positions], Positions] | None = None,
) -> Opened:
    """Open as a run does."""
    begin = {T0: 0} if at is None else at
    done: Opened = sink.open(Takeover(source, lambda: begin, begin, expected, reset))
    return done


def ready(sink: Any, at: Positions | None = None) -> tuple[Any, Fence]:
    """The sink, opened and bound, and its fence."""
    fence = take_over(sink, at).fence
    return sink.bind(), fence


def rows(ids: range) -> pa.Table:
    """Rows of :data:`SCHEMA`."""
    names = [f"g{n % 3}" for n in ids]
    return pa.table({"id": list(ids), "name": names}, schema=SCHEMA)


def staged_batch(
    sink: Any, fence: Fence, ranges: Ranges, *, bad: frozenset[int] = frozenset(), batch: int = 0
) -> Batch:
    """What tasks have made, one for each partition; ids are offsets, ``bad`` ones of t-0."""
    of_tasks = []
    for tp, (start, end) in sorted(ranges.items()):
        good = [n for n in range(start, end) if tp != T0 or n not in bad]
        of_tasks.append(pa.concat_tables([rows(range(n, n + 1)) for n in good] or [rows(range(0))]))
    made = Batch(
        {tp: OffsetRange(*of) for tp, of in ranges.items()},
        {
            tp: Counts(end - start, 0, len(bad) if tp == T0 else 0, 0)
            for tp, (start, end) in ranges.items()
        },
        [Reject(T0, n, None, b"k", b"x", (), "decode", "no JSON") for n in sorted(bad)],
    )
    if isinstance(sink, PacksRows):
        return with_rows(made, sink, *of_tasks)
    sink.begin_batch()
    staged = [
        sink.stage(fence, batch, attempt, [part] if part.num_rows else [])
        for attempt, part in enumerate(of_tasks)
    ]
    return replace(made, staged=staged)


# -- one adapter a sink --------------------------------------------------------------------


def adapter(kind: str, fixture: Callable[[str], Any], folder: Path) -> Iterator[SinkAdapter]:
    """An empty destination; servers come from the fixtures of conftest."""
    with ExitStack() as left:
        kind, _, member = kind.partition("-")
        if member:
            left.enter_context(by_members())
        if kind == "kafka":
            topics = kafkatools.make_topics(fixture("broker"), ledger=SHARED_LEDGER)
            yield _kafka(topics, turns=bool(member))
        elif kind == "files":
            yield _files(filestools.make_place(fixture("broker"), folder, SHARED_LEDGER))
        elif kind == "delta":
            yield _delta(deltatools.make_place(folder))
        elif kind == "sqlite":
            yield _sql(left.enter_context(sqlite_place()))
        else:
            yield _sql(postgres_place(fixture("shared_database")))
        close_all()


def _sql(place: Place) -> SinkAdapter:
    def positions() -> dict[TopicPartition, int]:
        found = place.sql('SELECT topic, "partition", "position" FROM oncely_positions')
        return {TopicPartition(topic, number): at for topic, number, at in found}

    def history() -> list[tuple[int, int, int, str]]:
        ranges = looking.history(place)
        return sorted(
            (number, start, end, kind)
            for number, start, end, _, kind, *_ in ranges
            if kind != "skipped"
        )

    return SinkAdapter(
        place.kind,
        lambda: sink_to(place),
        lambda: sink_to(place),
        lambda: looking.ids(place),
        lambda: [offset for offset, _ in looking.rejected(place)],
        positions,
        history,
    )


def _kafka(topics: kafkatools.Topics, *, turns: bool) -> SinkAdapter:
    def positions() -> dict[TopicPartition, int]:
        committed = topics.committed()
        assert {tp: at for tp, (at, _) in topics.ledger_positions().items()} == committed
        return committed

    return SinkAdapter(
        "kafka",
        lambda: replace(topics.sink(), turns=turns),
        lambda: batch_sink(topics),
        topics.ids,
        lambda: _offsets_of(topics.bootstrap, topics.rejects),
        positions,
        lambda: sorted(topics.ledger_ranges()),
    )


def _files(place: filestools.FilesPlace) -> SinkAdapter:
    sink = place.sink()
    seen = kafkatools.Topics(
        place.bootstrap, place.name, "", sink.rejects_topic, sink.pipeline_topics.ledger_topic,
        group=sink.pipeline_topics.group,
    )  # fmt: skip

    return SinkAdapter(
        "files",
        place.sink,
        place.sink,
        place.ids,
        lambda: _offsets_of(place.bootstrap, sink.rejects_topic),
        seen.committed,
        lambda: sorted(seen.ledger_ranges()),
    )


def _delta(place: deltatools.DeltaPlace) -> SinkAdapter:
    def positions() -> dict[TopicPartition, int]:
        found = place.told()[0]["positions"]
        return {TopicPartition(t, int(n)): at for t, of in found.items() for n, at in of.items()}

    def history() -> list[tuple[int, int, int, str]]:
        return sorted(
            (int(number), *range_, one["kind"])
            for one in (place.told() if place.root.exists() else [])
            for numbers in one.get("ranges", {}).values()
            for number, range_ in numbers.items()
        )

    return SinkAdapter(
        "delta",
        lambda: deltatools.Committing(place.sink()),
        place.sink,
        place.ids,
        lambda: [offset for *_, offset in place.letters()],
        positions,
        history,
    )


def _offsets_of(bootstrap: str, topic: str) -> list[int]:
    """The offsets that dead letters in a topic name."""
    letters = messages(bootstrap, topic)
    return sorted(int(dict(one.headers())["oncely.offset"]) for one in letters)
