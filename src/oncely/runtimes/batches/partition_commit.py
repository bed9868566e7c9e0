"""A batch of row transforms: partition commit.

Each task commits the records of its topic-partitions, in its own transactions. When the job has
succeeded, the driver moves the positions over the holes behind the last records (transaction
markers, aborted records, compacted offsets).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from oncely.commit.path import Outcome, behind, pass_over
from oncely.commit.run import OpenRun
from oncely.core.budget import refuse_beyond
from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import OffsetRange
from oncely.errors import TooManyRejects
from oncely.runtimes.batches.plan import Ranges, shares_of
from oncely.runtimes.batches.reading import Reading
from oncely.runtimes.batches.task import CommitPlan, commit_chunks, require_proved
from oncely.runtimes.chunks import Bounds
from oncely.runtimes.jobs.base import Jobs, sort_out
from oncely.runtimes.row_transform import RowTransform
from oncely.sinks.base import CommitsChunks


@dataclass(kw_only=True)
class PartitionCommit(OpenRun[CommitsChunks, RowTransform]):
    """Tasks commit; the driver closes the holes.

    Attributes:
        jobs: runs the tasks.
        bounds: the limits of a commit.
    """

    jobs: Jobs
    bounds: Bounds = field(default_factory=Bounds)

    def run(self, batch_id: int, ranges: Ranges) -> list[Outcome]:
        """Run one job: fetch, decode, transform, commit. Only outcomes are returned.

        Raises:
            TooManyRejects: the budget is spent; written rows are kept.
        """
        del batch_id  # a partition commit is keyed by offsets only
        budget = self._budget()
        reading = Reading.of(self, self.bounds)
        plan = CommitPlan(self.for_batch(ranges), self.fence, budget, reading)
        found = self.jobs.run(partial(commit_chunks, plan), shares_of(ranges))
        outcomes, error = sort_out(found, Outcome)
        done = sum((one.counts for one in outcomes), NO_RECORDS)
        self._count(done)
        if isinstance(error, TooManyRejects):  # other tasks, and earlier chunks, have committed
            self._tidy(len(outcomes))
        if error is not None:
            raise error
        require_proved(found, ranges)
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

    def _close_holes(self, ranges: Ranges, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """Move positions over holes, up to the planned ends.

        Only after every task has proved that it has read its ranges: the rest after the last
        record is empty. The ledger's positions must be exactly the ends that the tasks reported.
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
