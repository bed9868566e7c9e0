"""What a Spark task runs: the records of its ranges are decoded, transformed and committed.

``mapInArrow`` calls :func:`run` in a Python worker with the task's Arrow batches. Nothing goes
back to the JVM but outcome rows. Errors that Spark must not retry (a newer run, a spent reject
budget) are outcome rows too: raised, Spark would try the task again, each time in a new worker.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import numpy as np
import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.delivery import Delivery
from oncely.commit.path import Outcome, commit
from oncely.core.batch import Chunk, RecordFetcher
from oncely.core.budget import Budget
from oncely.core.claim import Counts, Fence
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.decode.base import Decoded, Decoder
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.errors import OncelyError, check
from oncely.runtimes.chunks import Bounds, Chunks
from oncely.runtimes.dead_letters import dead_letters
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.spark import worker
from oncely.sinks.base import CommitsChunks

OUTCOME_DDL = (
    "topic STRING, `partition` INT, `start` BIGINT, `end` BIGINT, records BIGINT,"
    " written BIGINT, rejects BIGINT, filtered BIGINT, replayed BOOLEAN, error STRING"
)
_OUTCOME = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        *((name, pa.int64()) for name in ("start", "end")),
        *((name, pa.int64()) for name in ("records", "written", "rejects", "filtered")),
        ("replayed", pa.bool_()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class TaskPlan:
    """Everything a task needs; pickled into the job, never into a plan or a configuration."""

    delivery: Delivery[CommitsChunks]
    fence: Fence
    source: RecordFetcher
    decoder: Decoder
    transform: RowTransform
    starts: Mapping[TopicPartition, Position]
    budget: Budget
    only_topic: str | None
    """The topic, when there is one only: its name is not sent with each record."""
    bounds: Bounds = field(default_factory=Bounds)
    headers: bool = False
    """Whether the sink wants the records' headers."""


def run(plan: TaskPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Commit the task's records chunk by chunk; yield an outcome row for each range."""
    worker.settle()
    decode = careful_decode(plan.decoder)
    chunks = Chunks(
        plan.starts,
        decode,
        plan.transform,
        partial(dead_letters, plan.source),
        plan.bounds,
        headers=plan.headers,
    )
    # A second try decodes in forked children first, and a fork copies no thread.
    with PipelinedCommit(plan, overlap=not is_retry()) as hand:
        try:
            for chunk in chunks.cut(with_topic(batch, plan.only_topic) for batch in batches):
                yield from map(_row, hand.finish())
                hand.begin(chunk)
            yield from map(_row, hand.finish())
        except OncelyError as error:
            yield _error_row(error)
            for _ in batches:  # an iterator left half-read costs Spark the worker
                pass


class PipelinedCommit:
    """Commits one chunk in a thread while the task reads and decodes the next one.

    One at a time and in order: a chunk's commit begins when the one before it has ended. So the
    ledger sees what it would see without the thread, and the task no longer stands still while
    the database works. What a chunk claims was read before it is handed over; the end of the
    input in the meantime adds nothing to it.
    """

    def __init__(self, plan: TaskPlan, *, overlap: bool) -> None:
        self._plan = plan
        self._records = self._rejects = 0
        self._thread = ThreadPoolExecutor(1, "oncely-commit") if overlap else None
        self._running: Future[list[Outcome]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Also when the task is cancelled: the commit in hand ends before the task does."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def begin(self, chunk: Chunk) -> None:
        """Begin to commit; :meth:`finish` must have been called since the last one began."""
        check(self._running is None, "two chunks of a task would be committed at once")
        self._records += chunk.records
        work = partial(self._commit, chunk, self._plan.budget.left(self._records, self._rejects))
        self._running = (
            self._thread.submit(copy_context().run, work)
            if self._thread is not None
            else _done(work)
        )

    def finish(self) -> list[Outcome]:
        """Wait for the chunk in hand, if there is one; its outcomes.

        Raises:
            OncelyError: as :func:`oncely.commit.path.commit`.
        """
        if self._running is None:
            return []
        running, self._running = self._running, None
        outcomes = running.result()
        self._rejects += sum(one.counts.rejects for one in outcomes)
        return outcomes

    def _commit(self, chunk: Chunk, limit: int | None) -> list[Outcome]:
        return list(commit(self._plan.delivery, chunk, self._plan.fence, limit, Backoff()))


def _done(work: Callable[[], list[Outcome]]) -> Future[list[Outcome]]:
    """Do the work here and now."""
    done: Future[list[Outcome]] = Future()
    done.set_result(work())
    return done


def is_retry() -> bool:
    """True in a task that Spark tries again."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def careful_decode(decoder: Decoder) -> Callable[[pa.Table], Decoded]:
    """The decoder, in a task's second try tried out in a child process first.

    The first try may have died of a record that kills the decoder.
    """
    return partial(isolate_crashes, decoder) if is_retry() else decoder.decode


def with_topic(batch: pa.RecordBatch, only_topic: str | None) -> pa.Table:
    """The batch as a table with its topic, which is not sent when there is only one."""
    table = pa.Table.from_batches([batch])
    if only_topic is None:
        return table
    codes = pa.array(np.zeros(table.num_rows, dtype=np.int32))
    topic = pa.DictionaryArray.from_arrays(codes, pa.array([only_topic]))
    return table.append_column("topic", topic)


def _row(outcome: Outcome) -> pa.RecordBatch:
    done = outcome.counts
    values = (
        *outcome.partition,
        outcome.range.start,
        outcome.range.end,
        done.records,
        done.rows,
        done.rejects,
        done.filtered,
        outcome.replayed,
        None,
    )
    return _batch(values)


def _error_row(error: OncelyError) -> pa.RecordBatch:
    return _batch((*[None] * 9, base64.b64encode(pickle.dumps(error)).decode()))


def _batch(values: tuple[object, ...]) -> pa.RecordBatch:
    arrays = [pa.array([v], f.type) for v, f in zip(values, _OUTCOME, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_OUTCOME)


def read_outcomes(
    rows: Iterable[tuple[object, ...]],
) -> tuple[list[Outcome], OncelyError | None]:
    """The outcome rows of a job, back as values.

    Returns:
        What has taken effect, and what a task answered instead of an outcome; Fenced before
        anything else.
    """
    outcomes: list[Outcome] = []
    errors: list[OncelyError] = []
    for topic, number, start, end, *counts, replayed, error in rows:
        if error is not None:
            errors.append(pickle.loads(base64.b64decode(str(error))))  # noqa: S301 - our own task's
        else:
            outcomes.append(
                Outcome(
                    TopicPartition(str(topic), _int(number)),
                    OffsetRange(_int(start), _int(end)),
                    Counts(*(_int(c) for c in counts)),
                    bool(replayed),
                )
            )
    worst = max(errors, key=lambda e: (e.exit_code == 3, not e.retryable), default=None)
    return outcomes, worst


def _int(value: object) -> int:
    return int(value)  # type: ignore[call-overload, no-any-return]
