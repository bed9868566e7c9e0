"""Batches: the plan of their ranges, and their commits without a Spark transform.

Tasks commit, or they stage and the driver publishes.

Partition commit: each task commits the records of its topic-partitions, in its own transactions.
When the job has succeeded, the driver moves the positions over the holes behind the last records
(transaction markers, aborted records, compacted offsets).

Range commit: the tasks must have proved that they have read the planned ranges: only then do
positions move to their ends, in the transaction that makes everything take effect.

| task | reads | does | its answers |
|---|---|---|---|
| :func:`commit_chunks` | ranges | fetch, decode, transform, commit | an outcome for each range |
| :func:`stage_ranges` | ranges | fetch, decode, transform, stage | ranges and staged output |
| :func:`send_ranges` | ranges | fetch, decode, transform, pack | packets, and the ranges |
| :func:`stage_packets` | packets | stage | its staged output |

If tasks stage, nothing takes effect until the driver has all answers. So a task answers with the
ranges that it has READ, and the driver compares them with the plan.

Plans are pickled into the job, never into a plan of Spark or a configuration. Packets are Arrow's
IPC format: a shuffle moves few large values instead of many small ones, and does not need the
columns.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from oncely.commit.path import Delivery, Outcome, behind, pass_over
from oncely.commit.run import OpenLedger
from oncely.core.batch import Batch, Chunk, Reject, Rejection, Staged
from oncely.core.claim import NO_RECORDS, Budget, Counts, Fence, refuse_beyond
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import InvariantViolation, RejectSample, RejectSummary, TooManyRejects, check
from oncely.kinds.base import CommitsChunks, StagesBatches, StagingTask
from oncely.phases import phase, timed
from oncely.runtimes.chunks import (
    ChunkBounds,
    PipelinedCommit,
    RangeReader,
    Ranges,
)
from oncely.runtimes.jobs import Attempt, Jobs, ShuffleBlock, all_of, sort_out
from oncely.runtimes.row_transform import RowTransform

TOO_MANY = "{} records of this batch can't be written"
MEND = "correct decode or transform"


# -- plans and answers -------------------------------------------------------------------------


@dataclass(frozen=True)
class RangePlan:
    """The parameters of a task that stages ranges.

    Attributes:
        buckets: the number of parts into which rows are shuffled; 0: the task stages them itself.
        max_rejects: the maximum number of rejects of the whole batch; a task that exceeds it
            refuses the batch independently of other tasks.
    """

    sink: StagesBatches
    fence: Fence
    batch_id: int
    reading: RangeReader
    buckets: int = 0
    max_rejects: int | None = None


@dataclass(frozen=True)
class TaskResult:
    """An answer of a task to the driver; one that commits has several.

    Attributes:
        outcome: a range that it has committed.
        read: the ranges that it has staged or sent, each up to the offset after its last record.
        counts: counts of their records by outcome; rows are those that were staged or sent.
        rejects: dead letters.
        staged: its staged output, or the description of its packets.
        proved: the ranges that are proved to have no other records.
    """

    outcome: Outcome | None = None
    read: Ranges = field(default_factory=dict)
    counts: Mapping[TopicPartition, Counts] = field(default_factory=dict)
    rejects: tuple[Reject, ...] = ()
    staged: Staged | None = None
    proved: Ranges = field(default_factory=dict)


def require_proved(answers: Iterable[TaskResult], ranges: Ranges) -> None:
    """Check that the tasks have proved that they have read all ranges, each once."""
    proved: dict[TopicPartition, OffsetRange] = {}
    for one in answers:
        check(not proved.keys() & one.proved.keys(), "two tasks have read one topic-partition")
        proved |= one.proved
    check(proved == dict(ranges), "the tasks have not proved that they have read all ranges")


# -- tasks ------------------------------------------------------------------------------------


def commit_chunks(
    delivery: Delivery[CommitsChunks],
    fence: Fence,
    budget: Budget,
    reading: RangeReader,
    share: Ranges,
    attempt: Attempt,
) -> Generator[TaskResult, None, None]:
    """Commit the records of a share in chunks; yield the outcome of each range, then the proof."""
    # A second attempt decodes in forked children first, and a fork copies no thread.
    with PipelinedCommit(budget, overlap=not attempt.again) as hand:
        for chunk in reading.chunks(share, again=attempt.again):
            yield from map(TaskResult, hand.finish())
            hand.begin(delivery, fence, chunk)
        yield from map(TaskResult, hand.finish())
    yield TaskResult(proved=share)


def stage_ranges(
    plan: RangePlan, share: Ranges, attempt: Attempt
) -> Generator[TaskResult, None, None]:
    """Stage the records of a share; yield one answer."""
    tally = _Tally(plan.max_rejects)
    with _staging(plan, attempt) as task:
        for chunk in plan.reading.chunks(share, again=attempt.again):
            with phase("write"):
                refused = task.add(chunk)
            tally.add(chunk, refused)
        with phase("write"):
            staged = task.finish()
    yield tally.answer(share, staged)


def send_ranges(
    plan: RangePlan, share: Ranges, attempt: Attempt
) -> Generator[TaskResult | ShuffleBlock, None, None]:
    """Before a shuffle: yield the rows of a share in packets, each with a bucket, and one
    answer."""
    tally = _Tally(plan.max_rejects)
    with _staging(plan, attempt) as task:
        for chunk in plan.reading.chunks(share, again=attempt.again):
            packets, refused = task.pack(chunk, plan.buckets)
            tally.add(chunk, refused)
            for bucket, data in packets:
                yield ShuffleBlock(bucket, data)
        staged = task.finish()
    yield tally.answer(share, staged)


def stage_packets(
    plan: RangePlan, packets: Iterable[Any], attempt: Attempt
) -> Generator[TaskResult, None, None]:
    """After a shuffle: stage the packets of a bucket; yield one answer."""
    with _staging(plan, attempt) as task:
        for packet in timed("read", packets):
            with phase("write"):
                task.add_packet(packet)
        with phase("write"):
            staged = task.finish()
    yield TaskResult(staged=staged)


# -- parts ------------------------------------------------------------------------------------


@contextmanager
def _staging(plan: RangePlan, attempt: Attempt) -> Iterator[StagingTask]:
    """The attempt's staging; a failed or cancelled task leaves no output."""
    task = plan.sink.staging(plan.fence, plan.batch_id, attempt.number)
    try:
        yield task
    except BaseException:
        task.abandon()
        raise


class _Tally:
    """Adds up the outcomes of a task's chunks.

    Args:
        max_rejects: the maximum number of rejects of the whole batch.
    """

    def __init__(self, max_rejects: int | None) -> None:
        self._max_rejects = max_rejects
        self._read: dict[TopicPartition, OffsetRange] = {}
        self._counts: dict[TopicPartition, Counts] = {}
        self._rejects: list[Reject] = []

    def add(self, chunk: Chunk, refused: list[Rejection]) -> None:
        """Count a chunk of which the sink has refused some records.

        Raises:
            TooManyRejects: more than the batch may have. Those of the chunk are not kept: the
                number that a task stores, and sends to the driver, is bounded by the budget.
        """
        rejections = [*chunk.rejections, *refused]
        self._check_budget(chunk, rejections)
        self._rejects += chunk.dead_letters(rejections) if rejections else []
        gone = np.isin(chunk.row_record, [one.record for one in refused])
        for tp, counts in chunk.counts(chunk.row_record[~gone], rejections).items():
            begun = self._read.get(tp, chunk.ranges[tp])
            self._read[tp] = OffsetRange(begun.start, chunk.ranges[tp].end)
            self._counts[tp] = self._counts.get(tp, NO_RECORDS) + counts

    def _check_budget(self, chunk: Chunk, more: Sequence[Rejection]) -> None:
        kept = self._rejects

        def records(chosen: Sequence[int]) -> list[RejectSample]:
            own = [more[at - len(kept)] for at in chosen if at >= len(kept)]
            before = [kept[at].refused for at in chosen if at < len(kept)]
            return before + (chunk.reject_samples(own) if own else [])

        def refused() -> RejectSummary:
            reasons = [one.reason for one in kept] + [one.reason for one in more]
            return RejectSummary.of(reasons, records)

        count = len(kept) + len(more)
        refuse_beyond(
            self._max_rejects, count, TOO_MANY.format(f"{count:,} or more"), MEND, refused
        )

    def answer(self, share: Ranges, staged: Staged) -> TaskResult:
        """The answer of a task that has read its share."""
        counts = {tp: staged.of_range(tp, done) for tp, done in self._counts.items()}
        return TaskResult(None, self._read, counts, tuple(self._rejects), staged, share)


# -- drivers ----------------------------------------------------------------------------------


@dataclass
class PartitionCommit:
    """Tasks commit; the driver closes the holes.

    Attributes:
        ledger: the ledger of the positions.
        transform: transforms the decoded rows.
        jobs: runs the tasks.
        bounds: the limits of a commit.
    """

    ledger: OpenLedger[CommitsChunks]
    transform: RowTransform
    jobs: Jobs
    bounds: ChunkBounds = field(default_factory=ChunkBounds)

    def opened(self) -> None:
        """See :class:`~oncely.runtimes.batches.run.CommitsBatches`. Nothing is staged."""

    def run(self, batch_id: int, ranges: Ranges) -> list[Outcome]:
        """Run one job: fetch, decode, transform, commit.

        Raises:
            TooManyRejects: the budget is spent; written rows are kept.
        """
        del batch_id  # a partition commit is keyed by offsets only
        ledger, budget = self.ledger, self.ledger.budget
        reading = RangeReader.of(ledger.context, self.transform, self.bounds)
        task = partial(commit_chunks, ledger.for_batch(ranges), ledger.fence, budget, reading)
        answers, error = sort_out(self.jobs.run(task, shares_of(ranges)))
        outcomes = [one.outcome for one in answers if one.outcome is not None]
        done = sum((one.counts for one in outcomes), NO_RECORDS)
        ledger.count(done)
        if isinstance(error, TooManyRejects):  # other tasks, and earlier chunks, have committed
            ledger.tidy(len(outcomes))
        if error is not None:
            raise error
        require_proved(answers, ranges)
        if ledger.context.interval is None:
            outcomes += self._close_holes(ranges, outcomes)
        ledger.tidy(len(outcomes) + len(ranges))  # holes are separate ranges
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
        entries, delivery, fence = (
            self.ledger.entries(),
            self.ledger.context.delivery,
            self.ledger.fence,
        )
        holes = {}
        for tp, range_ in ranges.items():
            at = entries[tp].position
            if at < read_to[tp]:
                why = f"{tp}: tasks read up to {read_to[tp]}, ledger at {at}"
                raise behind(delivery, fence, why)
            if at < range_.end:
                holes[tp] = OffsetRange(at, range_.end)
        return pass_over(delivery, holes, fence, "hole") if holes else []


_ROUNDS = (None, None, 1)
"""The number of tasks that may stage in each round. Nearly always one round suffices. Tasks that
contradict others stage again, with the merged schema; if they contradict each other again, a
single task stages their ranges, which contradicts no other."""


@dataclass
class RangeCommit:
    """Tasks stage the records that they read; the driver publishes.

    Attributes:
        ledger: the ledger of the positions.
        transform: transforms the decoded rows.
        jobs: runs the tasks.
        bounds: the amount that a task decodes at once.
        layout: ``per_partition``: a task stages its own ranges; ``clustered``: one shuffle collects
            the rows of a directory, for fewer files.
        buckets: the number of tasks after that shuffle.
    """

    ledger: OpenLedger[StagesBatches]
    transform: RowTransform
    jobs: Jobs
    bounds: ChunkBounds = field(default_factory=ChunkBounds)
    layout: Literal["per_partition", "clustered"] = "per_partition"
    buckets: int = 8

    def opened(self) -> None:
        """See :class:`~oncely.runtimes.batches.run.CommitsBatches`. Staged output of older runs is
        removed after a batch."""

    def run(self, batch_id: int, ranges: Ranges) -> list[Outcome]:
        """Stage, check, publish."""
        ledger, sink = self.ledger, self.ledger.context.sink
        sink.begin_batch()
        batch = self._batch(ranges, self._agreed(batch_id, ranges))
        return ledger.publish(batch, lambda: sink.sweep(ledger.fence, batch_id + 1))

    def _agreed(self, batch_id: int, ranges: Ranges) -> list[TaskResult]:
        """The answers of tasks that agree; ranges of the others are staged again."""
        agreed: list[TaskResult] = []
        left = ranges
        # A batch has no more records than offsets, and more records never lower the budget.
        max_rejects = self.ledger.budget.left(offsets_of(ranges), 0)
        sink = self.ledger.context.sink
        for tasks in _ROUNDS:
            answers = self._stage(batch_id, left, tasks, max_rejects)
            fits = [one.staged is None or sink.agree(one.staged) for one in answers]
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
    ) -> list[TaskResult]:
        """Run one job, of at most so many tasks; its answers in the order of their ranges."""
        buckets = self.buckets if self.layout == "clustered" else 0
        context = self.ledger.context
        reading = RangeReader.of(context, self.transform, self.bounds)
        plan = RangePlan(context.sink, self.ledger.fence, batch_id, reading, buckets, max_rejects)
        shares = shares_of(ranges, most)
        if buckets:
            found = self.jobs.shuffled(
                partial(send_ranges, plan), shares, partial(stage_packets, plan), buckets
            )
        else:
            found = self.jobs.run(partial(stage_ranges, plan), shares)
        return sorted(all_of(found), key=_order)

    def _batch(self, ranges: Ranges, answers: Sequence[TaskResult]) -> Batch:
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
            self.ledger.budget.left(records, 0),
            len(rejects),
            TOO_MANY.format(f"{len(rejects):,}"),
            MEND,
            lambda: RejectSummary.of(
                [one.reason for one in rejects],
                lambda chosen: [rejects[at].refused for at in chosen],
            ),
        )
        return Batch(ranges, counts, rejects, staged)


def _order(answer: TaskResult) -> list[TopicPartition]:
    return sorted(answer.read)


# -- the ranges of a batch -------------------------------------------------------------------

OFFSETS_A_TASK = 50_000
"""A task costs about as much as writing this many rows: smaller batches share one."""


def plan_ranges(
    positions: Mapping[TopicPartition, Position],
    ends: Mapping[TopicPartition, Position],
    limit: int,
) -> dict[TopicPartition, OffsetRange]:
    """The ranges of the next batch, as Spark's Kafka source plans them with
    ``maxOffsetsPerTrigger``.

    If there is more than the limit, each partition has a share in proportion to what is there. A
    partition with a share below one offset has one, so a batch can have more offsets than the limit
    if more partitions than that are busy.

    Args:
        positions: the next offset of each partition.
        ends: the offsets at which readers of committed records end.
        limit: the greatest number of offsets.
    """
    sizes = {tp: ends[tp] - at for tp, at in positions.items() if ends.get(tp, at) > at}
    total = sum(sizes.values())
    planned = {}
    for tp, size in sorted(sizes.items()):
        offsets = size if total <= limit else min(size, max(1, limit * size // total))
        planned[tp] = OffsetRange(positions[tp], positions[tp] + offsets)
    return planned


def shares_of(ranges: Ranges, most: int | None = None) -> list[dict[TopicPartition, OffsetRange]]:
    """Divide ranges among tasks, with about the same number of offsets each; none is cut.

    Args:
        ranges: those of a batch.
        most: the number of tasks; by default as many as their offsets are worth.
    """
    tasks = most or -(-offsets_of(ranges) // OFFSETS_A_TASK)
    tasks = max(1, min(tasks, len(ranges)))
    shares: list[dict[TopicPartition, OffsetRange]] = [{} for _ in range(tasks)]
    loads = [(0, number) for number in range(tasks)]
    for tp, range_ in sorted(ranges.items(), key=lambda one: (one[1].start - one[1].end, one[0])):
        load, number = heapq.heappop(loads)
        shares[number][tp] = range_
        heapq.heappush(loads, (load + range_.end - range_.start, number))
    return shares


def offsets_of(ranges: Ranges) -> int:
    """The number of offsets."""
    return sum(range_.end - range_.start for range_ in ranges.values())
