"""A micro-batch of row transforms: partition commit.

Each task commits the records of its topic-partitions, in its own transactions. When the job has
succeeded, the driver moves the positions over the holes behind the last records (transaction
markers, aborted records, compacted offsets).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oncely.commit.path import Outcome, behind, pass_over
from oncely.commit.run import OpenRun
from oncely.core.budget import refuse_beyond
from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.errors import TooManyRejects
from oncely.runtimes.chunks import Bounds
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.spark.reading import Reading
from oncely.runtimes.spark.task import CommitPlan, collect, commit_chunks
from oncely.sinks.base import CommitsChunks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OFFSETS_A_TASK = 50_000
"""A task costs about as much as writing this many rows: smaller batches share one."""


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
        """Run one stage: decode, transform, commit. Only outcomes are returned.

        Raises:
            TooManyRejects: the budget is spent; written rows are kept.
        """
        del batch_id  # a partition commit is keyed by offsets only
        budget = self._budget()
        reading = Reading.of(self, ranges, self.bounds)
        plan = CommitPlan(self.for_batch(ranges), self.fence, budget, reading)
        offsets = sum(range_.end - range_.start for range_ in ranges.values())
        tasks = max(1, min(len(ranges), -(-offsets // OFFSETS_A_TASK)))
        outcomes, error = collect(frame.coalesce(tasks), commit_chunks, plan, Outcome)
        done = sum((one.counts for one in outcomes), NO_RECORDS)
        self._count(done)
        if isinstance(error, TooManyRejects):  # other tasks, and earlier chunks, have committed
            self._tidy(len(outcomes))
        if error is not None:
            raise error
        if self.interval is None:
            outcomes += self._close_holes(ranges, outcomes)
        self._tidy(len(outcomes) + len(ranges))  # holes are separate ranges
        # Parallel tasks may have exceeded the budget together.
        refuse_beyond(
            budget.left(done.records, 0),
            done.rejects,
            f"{budget.rejects + done.rejects} of {budget.records + done.records}"
            " records were rejected; they are kept, and the pipeline stops here",
            "`oncely rejects list` shows them: correct decode, transform or table and replay them",
        )
        return outcomes

    def _close_holes(
        self, ranges: Mapping[TopicPartition, OffsetRange], outcomes: Iterable[Outcome]
    ) -> list[Outcome]:
        """Move positions over holes, up to the planned ends.

        Only after the job has succeeded: then every task has read its whole range, and the rest
        after its last record is empty. The ledger's positions must be exactly the ends that the
        tasks reported.
        """
        read_to = {tp: range_.start for tp, range_ in ranges.items()}
        for one in outcomes:
            read_to[one.partition] = max(read_to[one.partition], one.range.end)
        entries = self._entries()
        holes = {}
        for tp, range_ in ranges.items():
            at = entries[tp].position
            if at < read_to[tp]:
                why = f"{tp}: tasks read up to {read_to[tp]}, ledger at {at}"
                raise behind(self.delivery, self.fence, why)
            if at < range_.end:
                holes[tp] = OffsetRange(at, range_.end)
        return pass_over(self.delivery, holes, self.fence, "hole") if holes else []
