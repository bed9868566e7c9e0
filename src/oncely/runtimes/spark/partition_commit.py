"""A micro-batch of row transforms: partition commit.

Each task commits what it read of its topic-partitions, in transactions of its own. When the
job has succeeded, the driver moves the positions over the holes behind the last records
(transaction markers, aborted records, compacted offsets).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from oncely.commit.path import Outcome, behind, pass_over
from oncely.commit.run import OpenRun
from oncely.core.budget import RAISE_BUDGET, Budget
from oncely.core.claim import Fence, Opened, Takeover
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, SourceIdentity, TopicPartition
from oncely.errors import TooManyRejects
from oncely.runtimes.chunks import Bounds
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.spark.task import OUTCOME_DDL, TaskPlan, read_outcomes, run
from oncely.secrets import carried
from oncely.sinks.base import CommitsChunks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OFFSETS_A_TASK = 50_000
"""A task costs about as much as writing so many rows: smaller batches share one."""


class BatchRunner(Protocol):
    """How a micro-batch takes effect: by partition commit or by batch commit."""

    @property
    def fence(self) -> Fence:
        """The epoch of this run, once opened."""

    @property
    def columns(self) -> list[str]:
        """What is read of each record."""

    def open(self, takeover: Takeover) -> Opened:
        """Take the ledger; see :meth:`oncely.sinks.base.Sink.open`."""

    def same_source(self, source: SourceIdentity) -> None:
        """Refuse a cluster or topic other than at ``open``."""

    def positions(self) -> dict[TopicPartition, Position]:
        """The ledger's positions, read now."""

    def leader_epochs(self) -> Mapping[TopicPartition, int]:
        """The source's leader epochs that the ledger has noted."""

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int]) -> None:
        """Note them."""

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity
    ) -> None:
        """Give partitions that were found while running their position."""

    def record_gaps(self, gaps: Mapping[TopicPartition, OffsetRange]) -> None:
        """Move positions over lost ranges and keep those in the history."""

    def finish(self) -> None:
        """The run has ended in order; never raises."""

    def close(self) -> None:
        """The run ends: connections are closed."""

    def run(
        self, frame: DataFrame, batch_id: int, ranges: Mapping[TopicPartition, OffsetRange]
    ) -> list[Outcome]:
        """Make the batch take effect; afterwards every position stands at its range's end."""


@dataclass
class PartitionCommit(OpenRun[CommitsChunks, RowTransform]):
    """Tasks commit; the driver closes the holes."""

    bounds: Bounds = field(default_factory=Bounds)

    def run(
        self,
        frame: DataFrame,
        batch_id: int,
        ranges: Mapping[TopicPartition, OffsetRange],
    ) -> list[Outcome]:
        """One stage: decode, transform, commit. Only outcome rows come back."""
        del batch_id  # a partition commit is keyed by offsets alone
        budget = self._budget()
        plan = TaskPlan(
            delivery=self.for_batch(ranges),
            fence=self.fence,
            source=self.source,
            decoder=self.decoder,
            transform=self.transform,
            starts={tp: range_.start for tp, range_ in ranges.items()},
            budget=budget,
            only_topic=self._only_topic,
            bounds=self.bounds,
            headers="headers" in self.sink.needs,
        )
        offsets = sum(range_.end - range_.start for range_ in ranges.values())
        tasks = max(1, min(len(ranges), -(-offsets // OFFSETS_A_TASK)))
        rows = frame.coalesce(tasks).mapInArrow(carried(partial(run, plan)), OUTCOME_DDL).collect()
        outcomes, error = read_outcomes(tuple(row) for row in rows)
        records = sum(one.counts.records for one in outcomes)
        rejects = sum(one.counts.rejects for one in outcomes)
        self._count(records, rejects)
        if isinstance(error, TooManyRejects):  # other tasks, and earlier chunks, have committed
            self._tidy(len(outcomes))
        if error is not None:
            raise error
        if self.interval is None:
            self._close_holes(ranges, outcomes)
        self._tidy(len(outcomes) + len(ranges))  # holes are ranges of their own
        _check_budget(budget, records, rejects)
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
                told = f"{tp}: tasks read up to {read_to[tp]}, ledger at {at}"
                raise behind(self.delivery, self.fence, told)
            if at < range_.end:
                holes[tp] = OffsetRange(at, range_.end)
        if holes:
            pass_over(self.delivery, holes, self.fence, "hole")


def _check_budget(budget: Budget, records: int, rejects: int) -> None:
    """Look at what a batch that has taken effect left of the budget.

    Raises:
        TooManyRejects: tasks that ran side by side have spent the budget together.
    """
    left = budget.left(records, 0)
    if left is not None and rejects > left:
        raise TooManyRejects(
            f"sink.max_rejects: {budget.rejects + rejects} of {budget.records + records}"
            " records were rejected; they are kept, and the pipeline stops here",
            way_out="`oncely rejects list` shows them: mend decode, transform or table and replay"
            f" them; or {RAISE_BUDGET}",
        )
