"""What a Spark task runs that stages the records of its ranges, for the driver to publish.

As in a partition commit the task decodes, transforms and cuts chunks; but nothing takes effect
until the driver has heard from all tasks. So the task answers with what it has READ, and the
driver compares that with what it has planned.

With a shuffle in between, the first task answers and sends rows on in packets, Arrow's IPC format
in one binary column: the JVM moves few large values instead of many small ones, and never needs
to know the columns. The second task stages the packets and passes the answers through.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.core.batch import Chunk, IntArray, RecordFetcher, Reject, Rejection, Staged
from oncely.core.budget import RAISE_BUDGET
from oncely.core.claim import Counts, Fence
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.decode.base import Decoder
from oncely.errors import OncelyError, TooManyRejects
from oncely.refused import Refused, RefusedRecord
from oncely.runtimes.chunks import Bounds, Chunks
from oncely.runtimes.dead_letters import dead_letters
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.spark.task import careful_decode, with_topic
from oncely.sinks.base import StagesRanges, StagingTask

ANSWER_DDL = "answer BINARY"
PACKET_DDL = "bucket INT, answer BINARY, packet BINARY"
_ANSWER = pa.schema([("answer", pa.binary())])
_PACKET = pa.schema([("bucket", pa.int32()), ("answer", pa.binary()), ("packet", pa.binary())])


@dataclass(frozen=True)
class Answer:
    """What a task tells the driver.

    Attributes:
        read: the ranges that it has read, each up to its last record plus one.
        counts: what became of their records; rows are those that were staged or sent on.
        rejects: dead letters.
        staged: what it has staged, or tells of what it has sent.
    """

    read: Mapping[TopicPartition, OffsetRange] = field(default_factory=dict)
    counts: Mapping[TopicPartition, Counts] = field(default_factory=dict)
    rejects: tuple[Reject, ...] = ()
    staged: Staged | None = None


@dataclass(frozen=True)
class RangePlan:
    """Everything a task needs; pickled into the job."""

    sink: StagesRanges
    fence: Fence
    batch_id: int
    source: RecordFetcher
    decoder: Decoder
    transform: RowTransform
    starts: Mapping[TopicPartition, Position]
    only_topic: str | None
    bounds: Bounds = field(default_factory=Bounds)
    buckets: int = 0
    """Into how many parts rows are shuffled; 0: the task stages them itself."""
    max_rejects: int | None = None
    """The most rejects that the whole batch may have; a task that has more needs no other task
    to know that the batch is refused."""


def stage_ranges(plan: RangePlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stage the task's own records; yield one answer."""
    task = _begin(plan)
    tally = _Tally(plan.max_rejects)

    def work() -> Answer:
        for chunk in _chunks(plan, batches):
            tally.add(chunk, task.add(chunk))
        return replace(tally.answer(), staged=task.finish())

    yield _answer(_guarded(work, task, batches))


def send_ranges(plan: RangePlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Before a shuffle: yield the rows in packets, each for a bucket, and one answer."""
    task = _begin(plan)
    tally = _Tally(plan.max_rejects)
    try:
        for chunk in _chunks(plan, batches):
            packets, refused = task.pack(chunk, plan.buckets)
            tally.add(chunk, refused)
            for bucket, packet in packets:
                yield pa.RecordBatch.from_arrays(
                    [
                        pa.array([bucket], pa.int32()),
                        pa.nulls(1, pa.binary()),
                        pa.array([packet], pa.binary()),
                    ],
                    schema=_PACKET,
                )
        done: Answer | Exception = replace(tally.answer(), staged=task.finish())
    except OncelyError as error:
        done = _gave_up(error, task, batches)
    except BaseException:  # also when nobody takes the packets any more
        task.abandon()
        raise
    # Which bucket an answer goes by does not matter; each task has one of its own.
    yield pa.RecordBatch.from_arrays(
        [pa.array([0], pa.int32()), pa.array([pickle.dumps(done)]), pa.nulls(1, pa.binary())],
        schema=_PACKET,
    )


def stage_packets(plan: RangePlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """After a shuffle: stage the packets; yield the first tasks' answers, and one's own."""
    task = _begin(plan)

    def work() -> Answer:
        rows = 0
        for batch in batches:
            for answer, packet in zip(batch["answer"], batch["packet"], strict=True):
                if packet.is_valid:
                    rows += task.add_packet(packet.as_buffer())
                else:
                    passed.append(answer.as_py())
        return Answer(staged=task.finish())

    passed: list[bytes] = []
    own = _guarded(work, task, batches)
    for one in passed:
        yield pa.RecordBatch.from_arrays([pa.array([one], pa.binary())], schema=_ANSWER)
    yield _answer(own)


def read_answers(rows: Iterable[Any]) -> list[Answer]:
    """The answers of a job's successful tasks.

    Raises:
        OncelyError: what a task answered instead; Fenced before anything else.
    """
    found = [pickle.loads(bytes(one)) for one in rows]  # noqa: S301 - our own tasks' answers
    errors = [one for one in found if isinstance(one, OncelyError)]
    if errors:
        raise max(errors, key=lambda error: (error.exit_code == 3, not error.retryable))
    return found


def too_many(count: str, refused: Refused) -> TooManyRejects:
    """The error that refuses a batch of which so many records are rejects."""
    return TooManyRejects(
        f"sink.max_rejects: {count} records of this batch can't be written",
        way_out=f"mend decode or transform; or {RAISE_BUDGET}",
        refused=refused,
    )


def _begin(plan: RangePlan) -> StagingTask:
    from pyspark import TaskContext

    context = TaskContext.get()
    attempt = context.taskAttemptId() if context is not None else 0
    return plan.sink.staging(plan.fence, plan.batch_id, attempt)


def _chunks(plan: RangePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[Chunk]:
    decode = careful_decode(plan.decoder)
    letters = partial(dead_letters, plan.source)
    chunks = Chunks(plan.starts, decode, plan.transform, letters, plan.bounds)
    return chunks.cut(with_topic(batch, plan.only_topic) for batch in batches)


def _guarded(
    work: Callable[[], Answer], task: StagingTask, batches: Iterable[object]
) -> Answer | Exception:
    """Raised, an error would make Spark try again what can't be mended; it is an answer too."""
    try:
        return work()
    except OncelyError as error:
        return _gave_up(error, task, batches)
    except BaseException:
        task.abandon()
        raise


def _gave_up(error: OncelyError, task: StagingTask, batches: Iterable[object]) -> OncelyError:
    """Leave nothing behind of a task that answers with an error."""
    task.abandon()
    for _ in batches:  # an iterator left half-read costs Spark the worker
        pass
    return error


def _answer(what: Answer | Exception) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([pickle.dumps(what)], pa.binary())], schema=_ANSWER)


class _Tally:
    """Adds up what became of a task's chunks."""

    def __init__(self, max_rejects: int | None) -> None:
        self._max_rejects = max_rejects
        self._read: dict[TopicPartition, OffsetRange] = {}
        self._counts: dict[TopicPartition, Counter[str]] = {}
        self._rejects: list[Reject] = []

    def add(self, chunk: Chunk, refused: list[Rejection]) -> None:
        """Count a chunk of which the sink has refused some records.

        Raises:
            TooManyRejects: more than the batch may have. The chunk's are not kept: what a task
                holds, and sends to the driver, is bounded by the budget.
        """
        rejections = [*chunk.rejections, *refused]
        self._check_budget(chunk, rejections)
        self._rejects += chunk.dead_letters(rejections) if rejections else []
        rejected = np.zeros(chunk.records, dtype=bool)
        rejected[[one.record for one in rejections]] = True
        refused_rows = np.zeros(chunk.records, dtype=bool)
        refused_rows[[one.record for one in refused]] = True
        rows = chunk.row_record[~refused_rows[chunk.row_record]]
        kept = np.zeros(chunk.records, dtype=bool)
        kept[rows] = True
        for index, tp in enumerate(chunk.partitions):
            self._count(tp, chunk, chunk.partition == index, rejected, kept, rows)

    def _check_budget(self, chunk: Chunk, more: Sequence[Rejection]) -> None:
        kept = self._rejects
        count = len(kept) + len(more)
        if self._max_rejects is None or count <= self._max_rejects:
            return

        def records(chosen: Sequence[int]) -> list[RefusedRecord]:
            own = [more[at - len(kept)] for at in chosen if at >= len(kept)]
            before = [kept[at].refused for at in chosen if at < len(kept)]
            return before + (chunk.refused_records(own) if own else [])

        reasons = [one.reason for one in kept] + [one.reason for one in more]
        raise too_many(f"{count:,} or more", Refused.of(reasons, records))

    def _count(
        self,
        tp: TopicPartition,
        chunk: Chunk,
        own: IntArray,
        rejected: IntArray,
        kept: IntArray,
        rows: IntArray,
    ) -> None:
        range_ = chunk.ranges[tp]
        known = self._read.get(tp)
        self._read[tp] = OffsetRange(known.start if known else range_.start, range_.end)
        self._counts.setdefault(tp, Counter()).update(
            records=int(own.sum()),
            rows=int(own[rows].sum()),
            rejects=int((own & rejected).sum()),
            filtered=int((own & ~rejected & ~kept).sum()),
        )

    def answer(self) -> Answer:
        """All of it."""
        counts = {
            tp: Counts(*(one[name] for name in ("records", "rows", "rejects", "filtered")))
            for tp, one in self._counts.items()
        }
        return Answer(self._read, counts, tuple(self._rejects))
