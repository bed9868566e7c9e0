"""A micro-batch of row transforms: partition commit.

Each task commits what it read of its topic-partitions, in transactions of its own. When the
job has succeeded, the driver moves the positions over the holes behind the last records
(transaction markers, aborted records, compacted offsets).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Protocol

from oncely.core.ledger import Entry
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.decode.base import Decoder
from oncely.errors import (
    Fenced,
    InvariantViolation,
    SourceMismatch,
    TooManyRejects,
    Unavailable,
)
from oncely.runtimes.backoff import Backoff
from oncely.runtimes.chunks import Bounds
from oncely.runtimes.commit import Outcome, commit
from oncely.runtimes.letters import Rereader
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.task import OUTCOME_DDL, Budget, TaskPlan, read_outcomes, run
from oncely.sinks.base import Chunk, Fence, Opened
from oncely.sinks.sql.sink import SqlSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

OFFSETS_A_TASK = 50_000
"""A task costs about as much as writing so many rows: smaller batches share one."""
_JOIN_HISTORY_EVERY = 100
_HISTORY_KEPT = 1_000


class BatchRunner(Protocol):
    """How a micro-batch takes effect: by partition commit or by batch commit."""

    @property
    def fence(self) -> Fence:
        """The epoch of this run, once opened."""

    @property
    def columns(self) -> list[str]:
        """What is read of each record."""

    def open(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None,
    ) -> Opened:
        """Take the ledger; see :meth:`oncely.sinks.base.Sink.open`."""

    def same_source(self, source: SourceIdentity) -> None:
        """Refuse a cluster or topic other than at ``open``."""

    def positions(self) -> dict[TopicPartition, Position]:
        """The ledger's positions, read now."""

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity
    ) -> None:
        """Give partitions that were found while running their position."""

    def record_gaps(self, gaps: Mapping[TopicPartition, OffsetRange]) -> None:
        """Move positions over lost ranges and keep those in the history."""

    def run(
        self, frame: DataFrame, batch_id: int, ranges: Mapping[TopicPartition, OffsetRange]
    ) -> list[Outcome]:
        """Make the batch take effect; afterwards every position stands at its range's end."""


@dataclass
class LedgerKeeper:
    """What both ways of committing share: the driver's dealings with the ledger."""

    sink: SqlSink

    def __post_init__(self) -> None:
        self._fence: Fence | None = None
        self._source: SourceIdentity | None = None
        self._batches = 0

    @property
    def fence(self) -> Fence:
        """The epoch of this run, once opened."""
        if self._fence is None:
            raise InvariantViolation("the ledger was not opened")
        return self._fence

    def open(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None,
    ) -> Opened:
        """Take the ledger and bind the sink to the table as it is now."""
        opened = self.sink.open(source, start, earliest, expected)
        self.sink = self.sink.bind()
        self._fence, self._source = opened.fence, source
        return opened

    def same_source(self, source: SourceIdentity) -> None:
        """Refuse a cluster or topic other than at ``open``.

        Raises:
            SourceMismatch: the topic was made anew under the running query.
        """
        if self._source is None or source == self._source:
            return
        raise SourceMismatch(
            "the topic or its cluster changed while the pipeline ran:"
            f" {dict(self._source.topic_ids)} at start, {dict(source.topic_ids)} now",
            way_out="give the pipeline a new name if the topic was made again on purpose",
        )

    def positions(self) -> dict[TopicPartition, Position]:
        """The ledger's positions, read now."""
        return {tp: entry.position for tp, entry in self._entries().items()}

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity
    ) -> None:
        """Give partitions that were found while running their position."""
        self.sink.add_partitions(positions, source, self.fence)

    def record_gaps(self, gaps: Mapping[TopicPartition, OffsetRange]) -> None:
        """Move positions over lost ranges and keep those in the history."""
        lost = Chunk.of_nothing(gaps)
        list(commit(self.sink, lost, self.fence, None, Backoff(), kind="gap"))

    def _entries(self) -> dict[TopicPartition, Entry]:
        try:
            entries = self.sink.entries(self.fence)
        except Unavailable:
            # The kept session may have been ended while nothing was to do: a new one may work.
            entries = self.sink.entries(self.fence)
        newest = max((entry.epoch for entry in entries.values()), default=self.fence.epoch)
        if newest > self.fence.epoch:
            raise Fenced(self.fence.pipeline, self.fence.epoch, newest)
        return entries

    def _tidy(self, *more: Callable[[], object]) -> None:
        """Housekeeping after a batch; it can wait, and must not fail what is committed."""
        self._batches += 1
        works = list(more)
        if self._batches % _JOIN_HISTORY_EVERY == 0:
            works.append(lambda: self.sink.join_history(self.fence, _HISTORY_KEPT))
        for work in works:
            try:
                work()
            except Unavailable as error:
                log.warning("housekeeping is put off: %s", error.message)

    def _count(self, budget: Budget, records: int, rejects: int) -> None:
        """Count a batch that has taken effect.

        Raises:
            TooManyRejects: tasks that ran side by side have spent the budget together.
        """
        left = budget.left(records, rejects)
        if left is not None and left < 0:
            raise TooManyRejects(
                f"sink.max_rejects: {budget.rejects + rejects} of {budget.records + records}"
                " records were rejected; they are kept, and the pipeline stops here",
                way_out="mend decode, transform or table and replay them; or raise it",
            )


@dataclass
class PartitionCommit(LedgerKeeper):
    """Tasks commit; the driver closes the holes."""

    source: Rereader
    decoder: Decoder
    transform: RowTransform
    topics: tuple[str, ...]
    max_rejects_share: Fraction | None = None
    max_rejects_count: int | None = None
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._records = self._rejects = 0

    @property
    def columns(self) -> list[str]:
        """Partition, offset, value, and what else the decoder reads."""
        topic = ["topic"] if len(self.topics) > 1 or "topic" in self.decoder.needs else []
        more = sorted(self.decoder.needs - {"topic", "partition", "offset", "value"})
        return [*topic, "partition", "offset", "value", *more]

    def run(
        self,
        frame: DataFrame,
        batch_id: int,  # noqa: ARG002 - a partition commit is keyed by offsets alone
        ranges: Mapping[TopicPartition, OffsetRange],
    ) -> list[Outcome]:
        """One stage: decode, transform, commit. Only outcome rows come back."""
        budget = Budget(
            self.max_rejects_share, self.max_rejects_count, self._records, self._rejects
        )
        plan = TaskPlan(
            sink=self.sink,
            fence=self.fence,
            source=self.source,
            decoder=self.decoder,
            transform=self.transform,
            starts={tp: range_.start for tp, range_ in ranges.items()},
            budget=budget,
            only_topic=None if "topic" in self.columns else self.topics[0],
            bounds=self.bounds,
        )
        offsets = sum(range_.end - range_.start for range_ in ranges.values())
        tasks = max(1, min(len(ranges), -(-offsets // OFFSETS_A_TASK)))
        rows = frame.coalesce(tasks).mapInArrow(partial(run, plan), OUTCOME_DDL).collect()
        outcomes = read_outcomes(tuple(row) for row in rows)
        self._close_holes(ranges, outcomes)
        records = sum(one.written.records for one in outcomes)
        rejects = sum(one.written.rejects for one in outcomes)
        self._tidy()
        self._count(budget, records, rejects)
        self._records += records
        self._rejects += rejects
        return outcomes

    def _close_holes(
        self, ranges: Mapping[TopicPartition, OffsetRange], outcomes: Iterable[Outcome]
    ) -> None:
        """Move positions over what holds no records, up to the planned ends.

        Only after the job has succeeded: then every task has read its whole range, and what
        follows its last record is known to be empty. The ledger must stand exactly where the
        tasks say they ended.
        """
        read_to = {tp: range_.start for tp, range_ in ranges.items()}
        for one in outcomes:
            read_to[one.partition] = max(read_to[one.partition], one.range.end)
        entries = self._entries()
        holes = {}
        for tp, range_ in ranges.items():
            at = entries[tp].position
            if at < read_to[tp]:
                raise InvariantViolation(f"{tp}: tasks read up to {read_to[tp]}, ledger at {at}")
            if at < range_.end:
                holes[tp] = OffsetRange(at, range_.end)
        if holes:
            closing = Chunk.of_nothing(holes)
            for _ in commit(self.sink, closing, self.fence, None, Backoff(), kind="hole"):
                pass
