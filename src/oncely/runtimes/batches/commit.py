"""Batches without a Spark transform: their tasks commit, or they stage and the driver publishes.

Partition commit: each task commits the records of its topic-partitions, in its own transactions.
When the job has succeeded, the driver moves the positions over the holes behind the last records
(transaction markers, aborted records, compacted offsets).

Range commit: the tasks must have proved that they have read the planned ranges: only then do
positions move to their ends, in the transaction that makes everything take effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from oncely.commit.path import Outcome, behind, pass_over
from oncely.commit.run import OpenRun, PublishingRun
from oncely.core.batch import Batch, Reject
from oncely.core.budget import refuse_beyond
from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import InvariantViolation, TooManyRejects, check
from oncely.reject_summary import RejectSummary
from oncely.runtimes.batches.plan import Ranges, offsets_of, shares_of
from oncely.runtimes.batches.task import (
    MEND,
    TOO_MANY,
    Answer,
    CommitPlan,
    RangePlan,
    Reading,
    commit_chunks,
    require_proved,
    send_ranges,
    stage_packets,
    stage_ranges,
)
from oncely.runtimes.chunks import Bounds
from oncely.runtimes.jobs.base import Jobs, all_of, sort_out
from oncely.runtimes.row_transform import RowTransform
from oncely.sinks.base import CommitsChunks, StagesBatches


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


_ROUNDS = (None, None, 1)
"""The number of tasks that may stage in each round. Nearly always one round suffices. Tasks that
contradict others stage again, with the merged schema; if they contradict each other again, a
single task stages their ranges, which contradicts no other."""


@dataclass(kw_only=True)
class RangeCommit(PublishingRun[StagesBatches, RowTransform]):
    """Tasks stage the records that they read; the driver publishes.

    Attributes:
        jobs: runs the tasks.
        bounds: the amount that a task decodes at once.
        layout: ``per_partition``: a task stages its own ranges; ``clustered``: one shuffle collects
            the rows of a directory, for fewer files.
        buckets: the number of tasks after that shuffle.
    """

    jobs: Jobs
    bounds: Bounds = field(default_factory=Bounds)
    layout: Literal["per_partition", "clustered"] = "per_partition"
    buckets: int = 8

    def run(self, batch_id: int, ranges: Ranges) -> list[Outcome]:
        """Stage, check, publish."""
        self.sink.begin_batch()
        batch = self._batch(ranges, self._agreed(batch_id, ranges))
        return self._publish(batch, lambda: self.sink.sweep(self.fence, batch_id + 1))

    def _agreed(self, batch_id: int, ranges: Ranges) -> list[Answer]:
        """The answers of tasks that agree; ranges of the others are staged again."""
        agreed: list[Answer] = []
        left = ranges
        # A batch has no more records than offsets, and more records never lower the budget.
        max_rejects = self._budget().left(offsets_of(ranges), 0)
        for tasks in _ROUNDS:
            answers = self._stage(batch_id, left, tasks, max_rejects)
            fits = [one.staged is None or self.sink.agree(one.staged) for one in answers]
            against = [one for one, fit in zip(answers, fits, strict=True) if not fit]
            if not against:
                return sorted([*agreed, *answers], key=_order)
            if self.layout == "clustered":  # a file may have rows of any task: all stage again
                continue
            agreed += [one for one, fit in zip(answers, fits, strict=True) if fit]
            left = {tp: ranges[tp] for one in against for tp in one.proved}
        raise InvariantViolation(
            f"the tasks of batch {batch_id} contradict each other, even with a single task"
        )

    def _stage(
        self, batch_id: int, ranges: Ranges, most: int | None, max_rejects: int | None
    ) -> list[Answer]:
        """Run one job, of at most so many tasks; its answers in the order of their ranges."""
        buckets = self.buckets if self.layout == "clustered" else 0
        reading = Reading.of(self, self.bounds)
        plan = RangePlan(self.sink, self.fence, batch_id, reading, buckets, max_rejects)
        shares = shares_of(ranges, most)
        if buckets:
            found = self.jobs.shuffled(
                partial(send_ranges, plan), shares, partial(stage_packets, plan), buckets
            )
        else:
            found = self.jobs.run(partial(stage_ranges, plan), shares)
        return sorted(all_of(found, Answer), key=_order)

    def _batch(self, ranges: Ranges, answers: Sequence[Answer]) -> Batch:
        """The job's output as a batch, after a check that it is complete.

        Raises:
            InvariantViolation: a task has read, sent or staged other records than planned.
            TooManyRejects: the reject budget is spent; nothing was published.
        """
        read: dict[TopicPartition, OffsetRange] = {}
        staged = [one.staged for one in answers if one.staged is not None]
        counts = dict.fromkeys(ranges, NO_RECORDS)
        rejects: list[Reject] = []
        for one in answers:
            read |= one.read
            counts |= one.counts
            rejects += one.rejects
        for tp, range_ in read.items():
            planned = ranges[tp]
            fits = range_.start == planned.start and range_.end <= planned.end
            check(fits, f"{tp}: a task has read {range_}, and {planned} was planned")
        require_proved(answers, ranges)
        rows = sum(one.rows for one in counts.values())
        there = sum(one.rows for one in staged)
        check(rows == there, f"tasks have made {rows} rows, and {there} were staged")
        records = sum(one.records for one in counts.values())
        refuse_beyond(
            self._budget().left(records, 0),
            len(rejects),
            TOO_MANY.format(f"{len(rejects):,}"),
            MEND,
            lambda: RejectSummary.of(
                [one.reason for one in rejects],
                lambda chosen: [rejects[at].refused for at in chosen],
            ),
        )
        return Batch(ranges, counts, rejects, staged)


def _order(answer: Answer) -> list[TopicPartition]:
    return sorted(answer.read)
