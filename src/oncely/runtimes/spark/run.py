"""The run of a pipeline on Spark Structured Streaming.

The ledger determines the start of a query; its checkpoint is deleted at the end. If a batch fails
with a temporary error, the run takes the next epoch (which fences remains of the failed batch),
reads the ledger and starts a new query: a first start, a restart and a retry use the same
procedure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oncely.commit.path import Outcome
from oncely.core import events
from oncely.core.claim import Takeover
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.errors import (
    Fenced,
    OncelyError,
    TopicMissing,
    Unavailable,
    WrongInput,
)
from oncely.phases import Seconds, into, phase
from oncely.runtimes.mirror import Mirror
from oncely.runtimes.opening import missing_before, settle_gaps
from oncely.runtimes.retries import Retries
from oncely.runtimes.same_log import SameLog
from oncely.runtimes.spark.batch_commit import BatchCommit
from oncely.runtimes.spark.errors import is_java, spark_error
from oncely.runtimes.spark.offset_log import batch_ranges
from oncely.runtimes.spark.options import reader_options
from oncely.runtimes.spark.own_checkpoint import sweep_checkpoints, throwaway_checkpoint
from oncely.runtimes.spark.partition_commit import PartitionCommit
from oncely.runtimes.spark.range_commit import RangeCommit
from oncely.runtimes.stop import StopSignal
from oncely.sources.kafka import KafkaSource
from oncely.sources.start import Start

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_LOOK_SECONDS = 5.0
_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_ARROW_BATCH = str(32 << 20)
_LARGE = 1_000  # bytes
_FEW = 100  # records of a partition that are read without checking their size
_MISSING_TOPIC_TRIES = 4  # about 15 s
_STARTING = threading.Lock()
"""For the start of a query: with its first one PySpark starts the server that Spark calls back, and
two threads would start two."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of the loop.

    Attributes:
        name: the name of the pipeline.
        start: the value of ``source.start``.
        on_gap: ``fail`` or ``record``.
        trigger_seconds: the pause between micro-batches' starts, 0 for none.
        max_records_per_batch: the maximum number of Kafka offsets in a micro-batch.
        retries: failed batches in a row before the run ends.
    """

    name: str
    start: Start
    on_gap: str
    trigger_seconds: float
    max_records_per_batch: int
    retries: int = 10


@dataclass
class SparkRun:
    """One run: opened once, queries started until it ends."""

    session: SparkSession
    source: KafkaSource
    batches: PartitionCommit | BatchCommit | RangeCommit
    settings: RunSettings
    mirror: Mirror
    stop: StopSignal = field(default_factory=StopSignal)
    listener: events.Listener = lambda _: None

    def __post_init__(self) -> None:
        self._failure: BaseException | None = None
        self._in_batch = threading.Lock()
        self._progress = self._ending = self._skipped = False
        self._same_log = SameLog(self.source, self.batches)

    def run(self, *, until_latest: bool) -> bool:
        """Run until stopped, or until the records present at the start are committed.

        Returns:
            True if all of these are committed, False if it was stopped before.

        Raises:
            OncelyError: why the run ended otherwise.
        """
        sweep_checkpoints()
        retries = Retries(self.stop, self.listener, self.settings.retries)
        epoch = None
        while not self.stop.draining:
            try:
                positions = self._open(epoch)
                epoch = self.batches.fence.epoch
                done = self._query(positions, until_latest)
                self.batches.finish()
                return done
            except OncelyError as error:
                if self._progress:
                    retries.reset()
                    self._progress = False
                retries.wait(error, _tries(error, epoch))
        return False

    # -- beginning -------------------------------------------------------------------------

    def _open(self, expected: int | None) -> dict[TopicPartition, Position]:
        """Take over the ledger and determine the start positions, after checks for gaps and
        other topics."""
        identity = self.source.identity()
        marks = self.source.watermarks()
        earliest = {tp: mark.low for tp, mark in marks.items()}
        opened = self.batches.open(
            Takeover(
                identity,
                lambda: self.source.resolve_start(self.settings.start),
                earliest,
                expected,
            )
        )
        self.listener(
            events.PipelineOpened(
                self.settings.name, opened.fence.epoch, opened.positions, opened.first_start
            )
        )
        positions = {tp: at for tp, at in opened.positions.items() if tp in marks}
        gaps = missing_before(self.source, positions, marks)
        self._same_log.forget()
        self._same_log.check(lambda: {tp: at for tp, at in positions.items() if tp not in gaps})
        return positions | settle_gaps(
            gaps,
            self.settings.on_gap,
            self.listener,
            lambda lost: self._tell(self.batches.record_gaps(lost)),
        )

    # -- one query -------------------------------------------------------------------------

    def _query(self, positions: Mapping[TopicPartition, Position], until_latest: bool) -> bool:
        """Run one query from its start to its end; True if it ended by itself."""
        self._failure, self._progress, self._ending, self._skipped = None, False, False, False
        self.mirror.start(positions)
        try:
            with throwaway_checkpoint() as checkpoint:
                query = self._start(positions, checkpoint, until_latest)
                return self._watch(query) and not self._skipped
        finally:
            self.mirror.finish()

    def _start(
        self, positions: Mapping[TopicPartition, Position], checkpoint: Any, until_latest: bool
    ) -> StreamingQuery:
        largest = self._largest_record(positions)
        options = reader_options(
            self.source.brokers,
            self.source.topics,
            positions,
            kafka=self.source.kafka,
            max_records=self.settings.max_records_per_batch,
            headers="headers" in self.batches.columns,
            largest_record=largest,
        )
        reader = self.session.readStream.format("kafka")
        for key, value in options.items():
            reader = reader.option(key, value)

        context = copy_context()  # secrets in scope, and the pipeline of log entries

        def on_batch(frame: DataFrame, batch_id: int) -> None:
            with self._in_batch:
                if self.stop.draining or self._ending:
                    self._skipped = True
                    return  # nothing is committed, and the checkpoint is deleted
                try:
                    # py4j calls in a thread of its own
                    context.copy().run(self._batch, frame, batch_id, checkpoint)
                except BaseException as error:
                    self._failure = error
                    # Spark matches a failure's text by regular expressions that overflow its stack
                    # on a page-long one, so it gets a short one; the original error is kept.
                    raise _BatchFailed("the batch failed; the driver has the error") from None

        writer = (
            reader.load()
            .select(*self.batches.columns)
            .writeStream.queryName(f"oncely_{self.settings.name}")
            .option("checkpointLocation", checkpoint.as_uri())
        )
        if until_latest:
            writer = writer.trigger(availableNow=True)
        else:
            pause = int(self.settings.trigger_seconds * 1000)
            writer = writer.trigger(processingTime=f"{pause} milliseconds")
        with _STARTING, _arrow_batches_bounded(self.session, largest):
            return writer.foreachBatch(on_batch).start()

    def _largest_record(self, positions: Mapping[TopicPartition, Position]) -> int:
        """Sample the records that the first batch will read, if there are many."""
        ends = self.source.stable_end()
        longest = self.settings.max_records_per_batch
        ranges = {
            tp: OffsetRange(at, min(ends[tp], at + longest))
            for tp, at in positions.items()
            if ends.get(tp, 0) - at > _FEW
        }
        try:
            return self.source.largest_record(ranges)
        except Unavailable as error:
            log.debug("records were not looked at: %s", error.message)
            return 0

    def _watch(self, query: StreamingQuery) -> bool:
        """Wait for the query's end; when stopped, let the current batch finish first.

        Returns:
            True if the query ended by itself.
        """
        from pyspark.errors import StreamingQueryException

        look_at = tell_at = time.monotonic() + _LOOK_SECONDS
        ended_by_itself = True
        try:
            while not query.awaitTermination(_POLL_SECONDS):
                if self.stop.draining:
                    self.listener(events.Draining())
                    self._drain(query)
                    ended_by_itself = False
                    break
                if time.monotonic() >= tell_at and not query.status["isTriggerActive"]:
                    self.listener(events.Polled())
                    tell_at = time.monotonic() + _LOOK_SECONDS
                if time.monotonic() >= look_at:
                    self._look_for_a_newer_run(query)
                    look_at = time.monotonic() + _LOOK_SECONDS
        except StreamingQueryException as error:
            raise self._meaning(error) from None
        if isinstance(self._failure, OncelyError):
            raise self._failure
        return ended_by_itself

    def _look_for_a_newer_run(self, query: StreamingQuery) -> None:
        """Check for a takeover, which a run without work would not notice otherwise.

        Raises:
            Fenced: a newer run holds the ledger.
        """
        if not self._in_batch.acquire(blocking=False):
            return  # the current batch notices it by itself
        fenced: Fenced | None = None
        try:
            self.batches.positions()
        except Unavailable as error:
            log.debug("the ledger did not answer: %s", error.message)
        except Fenced as error:
            fenced = error
            self._ending = True
        finally:
            self._in_batch.release()
        if fenced is not None:
            query.stop()  # without the lock: Spark waits for a batch that may wait for it
            raise fenced

    def _drain(self, query: StreamingQuery) -> None:
        """Let the current batch finish, unless stopped twice; then end the query."""
        between_batches = False
        while not (between_batches or self.stop.now):
            between_batches = self._in_batch.acquire(timeout=_POLL_SECONDS)
        self._ending = True
        if between_batches:  # Spark waits for the next batch, and that one for the lock
            self._in_batch.release()
        query.stop()

    def _meaning(self, error: Exception) -> OncelyError:
        """The reason of a query's failure: our own error if a batch raised it, else Spark's
        message."""
        from pyspark.errors import AnalysisException

        if isinstance(self._failure, OncelyError):
            return self._failure
        if isinstance(self._failure, AnalysisException):
            return WrongInput(
                f"transform.spark: {str(self._failure).splitlines()[0]}",
                way_out="correct the function: Spark can't plan what it returns",
            )
        if self._failure is not None and not is_java(self._failure):
            raise self._failure
        return spark_error(str(self._failure or error))

    # -- one batch -------------------------------------------------------------------------

    def _batch(self, frame: DataFrame, batch_id: int, checkpoint: Any) -> None:
        began, seconds = time.monotonic(), Seconds()
        with into(seconds):
            ranges = self._planned(checkpoint, batch_id)
            if not ranges:
                return
            self.listener(events.BatchPlanned(batch_id, ranges))
            outcomes = self.batches.run(frame, batch_id, ranges)
        self._same_source()
        self._tell(outcomes)
        ends = {tp: range_.end for tp, range_ in ranges.items()}
        self._progress = True
        self.mirror.put(ends)
        self.listener(
            events.BatchCommitted(
                batch_id,
                sum(one.counts.records for one in outcomes),
                sum(one.counts.rows for one in outcomes),
                sum(one.counts.rejects for one in outcomes),
                time.monotonic() - began,
                ends,
                filtered=sum(one.counts.filtered for one in outcomes),
                phases=seconds,
            )
        )

    def _tell(self, outcomes: Iterable[Outcome]) -> None:
        for one in outcomes:
            done = one.counts
            self.listener(
                events.RangeCommitted(
                    one.partition, one.range, done.records, done.rows, done.rejects, done.filtered,
                    one.replayed, one.kind,
                )
            )  # fmt: skip

    @phase("plan")
    def _planned(self, checkpoint: Any, batch_id: int) -> dict[TopicPartition, OffsetRange]:
        """The batch's ranges, after checks that the source is the same."""
        self._same_source()
        if ranges := self._plan(checkpoint, batch_id):
            self._same_log.check(self.batches.positions)
        return ranges

    def _plan(self, checkpoint: Any, batch_id: int) -> dict[TopicPartition, OffsetRange]:
        """The batch's exact ranges; a new partition begins at its first offset."""
        known = self.batches.positions()
        try:
            return batch_ranges(checkpoint, batch_id, known)
        except KeyError:
            earliest = self.source.earliest()
            added = {tp: at for tp, at in earliest.items() if tp not in known}
            self.batches.add_partitions(added, self.source.identity())
            self._same_log.forget()
            for tp, at in sorted(added.items()):
                self.listener(events.PartitionAdded(tp, at))
        try:
            return batch_ranges(checkpoint, batch_id, self.batches.positions())
        except KeyError as unknown:
            raise Unavailable(
                f"Spark reads partition {unknown}, which is not in the brokers' metadata yet"
            ) from None

    def _same_source(self) -> None:
        """Refuse to continue with a topic that was recreated under the query.

        Raises:
            SourceMismatch: cluster or topic ids differ from those at the start.
        """
        self.batches.same_source(self.source.identity())


@contextmanager
def _arrow_batches_bounded(session: SparkSession, largest_record: int) -> Iterator[None]:
    """Bound the bytes of Arrow batches for a query that is started within the block.

    Only if records are large: Spark then computes the size of a batch after each row. A query has a
    copy of the session's settings, created at its start.
    """
    before = session.conf.get(_ARROW_BYTES, None)
    if largest_record > _LARGE:
        session.conf.set(_ARROW_BYTES, _ARROW_BATCH)
    try:
        yield
    finally:
        if before is None:
            session.conf.unset(_ARROW_BYTES)
        else:
            session.conf.set(_ARROW_BYTES, before)


def _tries(error: OncelyError, epoch: int | None) -> int:
    """The number of retries after an error that is not temporary by itself."""
    # A broker that has just restarted does not have every topic for a moment (metadata arrives
    # later), and answers as if a topic that this run has read did not exist.
    return _MISSING_TOPIC_TRIES if isinstance(error, TopicMissing) and epoch is not None else 0


class _BatchFailed(Exception):
    """The short text of a failure for Spark."""
