"""The Spark tasks. ``mapInArrow`` calls them in a Python worker with the task's batches.

| task | reads | does | its answers |
|---|---|---|---|
| :func:`commit_chunks` | records | decode, transform, commit | an outcome for each range |
| :func:`stage_ranges` | records | decode, transform, stage | ranges and staged output |
| :func:`send_ranges` | records | decode, transform, pack | packets, and the ranges |
| :func:`stage_packets` | packets | stage | the senders' answers, and its own |
| :func:`stage_rows` | rows of a Spark transform | stage | staged output |

If tasks stage, nothing takes effect until the driver has all answers. So a task answers with the
ranges that it has READ, and the driver compares them with the plan.

Answers are pickled values in one binary column. Errors that Spark must not retry (a newer run, a
spent reject budget) are answers, too: if they were raised, Spark would repeat the task, each time
in a new worker. Packets are Arrow's IPC format: the JVM moves few large values instead of many
small ones, and does not need the columns.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from oncely.commit.delivery import Delivery
from oncely.commit.path import Outcome
from oncely.core.batch import Chunk, Reject, Rejection, Staged
from oncely.core.budget import Budget, refuse_beyond
from oncely.core.claim import NO_RECORDS, Counts, Fence
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.errors import OncelyError
from oncely.phases import Seconds, into, longest, phase, timed
from oncely.reject_summary import RejectSample, RejectSummary
from oncely.runtimes.pipelined_commit import PipelinedCommit
from oncely.runtimes.spark import worker
from oncely.runtimes.spark.reading import Batches, Reading, is_retry
from oncely.secrets import carried
from oncely.sinks.base import CommitsChunks, StagesBatches, StagesRanges, StagingTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

ANSWER_DDL = "answer BINARY"
PACKET_DDL = "bucket INT, answer BINARY, packet BINARY"
_ANSWER = pa.schema([("answer", pa.binary())])
_PACKET = pa.schema([("bucket", pa.int32()), ("answer", pa.binary()), ("packet", pa.binary())])

TOO_MANY = "{} records of this batch can't be written"
MEND = "correct decode or transform"


# -- plans: pickled into the job, never into a plan of Spark or a configuration -----------------


@dataclass(frozen=True)
class CommitPlan:
    """The parameters of a task that commits."""

    delivery: Delivery[CommitsChunks]
    fence: Fence
    budget: Budget
    reading: Reading


@dataclass(frozen=True)
class RangePlan:
    """The parameters of a task that stages ranges.

    Attributes:
        buckets: the number of parts into which rows are shuffled; 0: the task stages them itself.
        max_rejects: the maximum number of rejects of the whole batch; a task that exceeds it
            refuses the batch independently of other tasks.
    """

    sink: StagesRanges
    fence: Fence
    batch_id: int
    reading: Reading
    buckets: int = 0
    max_rejects: int | None = None


@dataclass(frozen=True)
class StagePlan:
    """The parameters of a task that stages rows of a Spark transform."""

    sink: StagesBatches
    fence: Fence
    batch_id: int


@dataclass(frozen=True)
class Answer:
    """The answer of a staging task to the driver.

    Attributes:
        read: the ranges that it has read, each up to the offset after its last record.
        counts: counts of their records by outcome; rows are those that were staged or sent.
        rejects: dead letters.
        staged: its staged output, or the description of its packets.
    """

    read: Mapping[TopicPartition, OffsetRange] = field(default_factory=dict)
    counts: Mapping[TopicPartition, Counts] = field(default_factory=dict)
    rejects: tuple[Reject, ...] = ()
    staged: Staged | None = None


@dataclass(frozen=True)
class Spent:
    """The last answer of a task: its seconds by phase."""

    seconds: Seconds


# -- tasks ------------------------------------------------------------------------------------


def commit_chunks(plan: CommitPlan, batches: Batches) -> Batches:
    """Commit the task's records in chunks; yield an outcome for each range."""

    def work() -> Generator[Outcome, None, None]:
        # A second attempt decodes in forked children first, and a fork copies no thread.
        overlap = not is_retry()
        with PipelinedCommit(plan.budget, overlap=overlap) as hand:
            for chunk in plan.reading.chunks(batches):
                yield from hand.finish()
                hand.begin(plan.delivery, plan.fence, chunk)
            yield from hand.finish()

    return _answering(work(), batches)


def stage_ranges(plan: RangePlan, batches: Batches) -> Batches:
    """Stage the task's own records; yield one answer."""

    def work() -> Generator[Answer, None, None]:
        tally = _Tally(plan.max_rejects)
        with _staging(plan) as task:
            for chunk in plan.reading.chunks(batches):
                with phase("write"):
                    refused = task.add(chunk)
                tally.add(chunk, refused)
            with phase("write"):
                staged = task.finish()
        yield tally.answer(staged)

    return _answering(work(), batches)


def send_ranges(plan: RangePlan, batches: Batches) -> Batches:
    """Before a shuffle: yield the rows in packets, each with a bucket, and one answer."""

    def work() -> Generator[Answer | _Packet, None, None]:
        tally = _Tally(plan.max_rejects)
        with _staging(plan) as task:
            for chunk in plan.reading.chunks(batches):
                packets, refused = task.pack(chunk, plan.buckets)
                tally.add(chunk, refused)
                for bucket, data in packets:
                    yield _Packet(bucket, data)
            staged = task.finish()
        yield tally.answer(staged)

    return _answering(work(), batches, _packet_row)


def stage_packets(plan: RangePlan, batches: Batches) -> Batches:
    """After a shuffle: stage the packets; yield the first tasks' answers, and the task's own."""

    def work() -> Generator[Answer | bytes, None, None]:
        with _staging(plan) as task:
            for batch in timed("read", batches):
                for answer, packet in zip(batch["answer"], batch["packet"], strict=True):
                    if packet.is_valid:
                        with phase("write"):
                            task.add_packet(packet.as_buffer())
                    else:
                        yield answer.as_py()
            with phase("write"):
                staged = task.finish()
        yield Answer(staged=staged)

    return _answering(work(), batches)


def stage_rows(plan: StagePlan, batches: Batches) -> Batches:
    """Stage rows of a Spark transform under the attempt's own name."""

    def work() -> Generator[Staged, None, None]:
        rows = (pa.Table.from_batches([batch]) for batch in timed("read", batches))
        with phase("write"):
            staged = plan.sink.stage(plan.fence, plan.batch_id, _attempt(), rows)
        yield staged

    return _answering(work(), batches)


# -- answers ----------------------------------------------------------------------------------


class _Packet(NamedTuple):
    bucket: int
    data: bytes


def _row(answer: object) -> pa.RecordBatch:
    data = answer if isinstance(answer, bytes) else pickle.dumps(answer)
    return pa.RecordBatch.from_arrays([pa.array([data], pa.binary())], schema=_ANSWER)


def _packet_row(what: object) -> pa.RecordBatch:
    """The bucket of an answer is arbitrary; each task has its own."""
    row = (
        (what.bucket, None, what.data)
        if isinstance(what, _Packet)
        else (0, pickle.dumps(what), None)
    )
    arrays = [pa.array([value], one.type) for value, one in zip(row, _PACKET, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_PACKET)


def _answering(
    answers: Generator[object, None, None],
    batches: Iterable[object],
    row: Callable[[object], pa.RecordBatch] = _row,
) -> Batches:
    """The rows of a task; an error is the last one."""
    worker.settle()
    spent = Spent({})
    with closing(answers), into(spent.seconds):  # also when the consumer has stopped
        try:
            yield from map(row, answers)
            yield row(spent)
        except OncelyError as error:
            yield row(error)
            for _ in batches:  # Spark discards the worker if the iterator is not exhausted
                pass


def collect(
    frame: DataFrame, task: Callable[[Any, Batches], Batches], plan: object, kind: type[T]
) -> tuple[list[T], OncelyError | None]:
    """Run a job whose last stage consists of these tasks.

    Returns:
        The answers of its successful tasks, and the error that a task answered; Fenced takes
            precedence.
    """
    rows = frame.mapInArrow(carried(partial(task, plan)), ANSWER_DDL).collect()
    found = [pickle.loads(bytes(row[0])) for row in rows]  # noqa: S301 - our own tasks' answers
    errors = [one for one in found if isinstance(one, OncelyError)]
    worst = max(errors, key=lambda error: (error.exit_code == 3, not error.retryable), default=None)
    longest(one.seconds for one in found if isinstance(one, Spent))
    return [one for one in found if isinstance(one, kind)], worst


def collect_all(
    frame: DataFrame, task: Callable[[Any, Batches], Batches], plan: object, kind: type[T]
) -> list[T]:
    """Like :func:`collect`, but raises the error.

    Raises:
        OncelyError: the error that a task answered; Fenced takes precedence.
    """
    answers, error = collect(frame, task, plan, kind)
    if error is not None:
        raise error
    return answers


# -- parts ------------------------------------------------------------------------------------


@contextmanager
def _staging(plan: RangePlan) -> Iterator[StagingTask]:
    """The attempt's staging; a failed or cancelled task leaves no output."""
    task = plan.sink.staging(plan.fence, plan.batch_id, _attempt())
    try:
        yield task
    except BaseException:
        task.abandon()
        raise


def _attempt() -> int:
    """Unique among all attempts of all tasks of the application."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.taskAttemptId() if context is not None else 0


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

    def answer(self, staged: Staged) -> Answer:
        """The task's answer."""
        counts = {tp: staged.of_range(tp, done) for tp, done in self._counts.items()}
        return Answer(self._read, counts, tuple(self._rejects), staged)
