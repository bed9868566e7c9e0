"""The run of a pipeline on Spark Structured Streaming.

The ledger decides where a query starts; its checkpoint is thrown away at the end. When a batch
fails in a way that may pass, the run takes the next epoch (which fences what the failed batch
left behind), reads the ledger and starts a new query: there is one way to begin, and it is used
for a first start, a restart and a retry alike.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oncely.commit.backoff import Backoff
from oncely.core import events
from oncely.core.claim import Takeover
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.errors import (
    DataLost,
    Fenced,
    OncelyError,
    SourceMismatch,
    TopicMissing,
    Unavailable,
    WrongInput,
)
from oncely.runtimes.mirror import Mirror
from oncely.runtimes.same_log import SameLog
from oncely.runtimes.spark.errors import is_java, spark_error
from oncely.runtimes.spark.offset_log import batch_ranges
from oncely.runtimes.spark.options import reader_options
from oncely.runtimes.spark.own_checkpoint import sweep_checkpoints, throwaway_checkpoint
from oncely.runtimes.spark.partition_commit import BatchRunner
from oncely.runtimes.stop import StopSignal
from oncely.secrets import in_scope, scope
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
_FEW = 100  # records of a partition that are read without a look at their size
_MISSING_TOPIC_TRIES = 4  # some 15 s


@dataclass(frozen=True)
class RunSettings:
    """What the loop needs to know beyond its parts.

    Attributes:
        name: the pipeline.
        start: what ``source.start`` says.
        on_gap: ``fail`` or ``record``.
        trigger_seconds: the pause between micro-batches' starts, 0 for none.
        max_records_per_batch: Kafka offsets that a micro-batch spans at most.
        retries: failed batches in a row before the run gives up.
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
    batches: BatchRunner
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
        """Run until asked to stop, or until what was readable at the start is committed.

        Returns:
            True when all that was readable is committed, False when it was asked to stop first.

        Raises:
            OncelyError: why the run ended otherwise.
        """
        sweep_checkpoints()
        backoff = Backoff(first=1.0, longest=30.0, total=300.0, wait=self.stop.wait)
        attempt, epoch = 0, None
        while not self.stop.draining:
            try:
                positions = self._open(epoch)
                epoch = self.batches.fence.epoch
                done = self._query(positions, until_latest)
                self.batches.finish()
                return done
            except OncelyError as error:
                if self._progress:
                    backoff.reset()
                    attempt, self._progress = 0, False
                attempt += 1
                tries = self.settings.retries if error.retryable else _tries(error, epoch)
                if attempt > tries:
                    raise
                log.warning("%s", error.message)
                pause = backoff.pause() or 30.0
                self.listener(events.BatchFailed(error.message, attempt, pause))
                self.stop.wait(pause)
        return False

    # -- beginning -------------------------------------------------------------------------

    def _open(self, expected: int | None) -> dict[TopicPartition, Position]:
        """Take the ledger and settle where to read from, gaps and foreign topics looked at."""
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
        if any(at > marks[tp].high for tp, at in positions.items()):
            # The run that we took over from went on while we waited for its locks.
            marks = self.source.watermarks()
        for tp, at in sorted(positions.items()):
            if at > marks[tp].high:
                raise SourceMismatch(
                    f"{tp} ends at {marks[tp].high}, and the ledger has read up to {at}:"
                    " the topic has gone back",
                    way_out="restore the topic, or move the position with `oncely offsets reset`",
                )
        gaps = {
            tp: OffsetRange(at, marks[tp].low) for tp, at in positions.items() if at < marks[tp].low
        }
        self._same_log.forget()
        self._same_log.check(lambda: {tp: at for tp, at in positions.items() if tp not in gaps})
        return positions | self._settle_gaps(gaps)

    def _settle_gaps(
        self, gaps: Mapping[TopicPartition, OffsetRange]
    ) -> dict[TopicPartition, Position]:
        """Record lost ranges in the history, or refuse to go on.

        Raises:
            DataLost: records are gone and ``on_gap`` is ``fail``.
        """
        for tp, missing in sorted(gaps.items()):
            self.listener(events.GapFound(tp, missing))
            if self.settings.on_gap == "fail":
                raise DataLost(
                    f"{tp}: offsets {missing} left the topic before they were read",
                    way_out='source.on_gap = "record" goes on and keeps the range in the history',
                )
        if gaps:
            self.batches.record_gaps(gaps)
        return {tp: missing.end for tp, missing in gaps.items()}

    # -- one query -------------------------------------------------------------------------

    def _query(self, positions: Mapping[TopicPartition, Position], until_latest: bool) -> bool:
        """One query from its start to its end; True when it ended by itself."""
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

        secrets = in_scope()

        def on_batch(frame: DataFrame, batch_id: int) -> None:
            with self._in_batch:
                if self.stop.draining or self._ending:
                    self._skipped = True
                    return  # nothing is committed, and the checkpoint is thrown away
                try:
                    with scope(secrets):  # py4j calls in a thread of its own
                        self._batch(frame, batch_id, checkpoint)
                except BaseException as error:
                    self._failure = error
                    # Spark matches a failure's text by regular expressions that overflow its
                    # stack on a page-long one, so it gets a short one; the real one is kept.
                    raise _BatchFailed("the batch failed; the driver knows why") from None

        writer = (
            reader.load()
            .select(*self.batches.columns)
            .writeStream.queryName(f"oncely_{self.settings.name}")
            .option("checkpointLocation", checkpoint.as_uri())
            .foreachBatch(on_batch)
        )
        if until_latest:
            writer = writer.trigger(availableNow=True)
        else:
            pause = int(self.settings.trigger_seconds * 1000)
            writer = writer.trigger(processingTime=f"{pause} milliseconds")
        with _arrow_batches_bounded(self.session, largest):
            return writer.start()

    def _largest_record(self, positions: Mapping[TopicPartition, Position]) -> int:
        """Look at some of the records that the first batch will read, where there are many."""
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
        """Wait for the query's end; when asked to stop, let the batch in hand finish first.

        Returns:
            True when the query ended by itself.
        """
        from pyspark.errors import StreamingQueryException

        look_at = time.monotonic() + _LOOK_SECONDS
        ended_by_itself = True
        try:
            while not query.awaitTermination(_POLL_SECONDS):
                if self.stop.draining:
                    self.listener(events.Draining())
                    self._drain(query)
                    ended_by_itself = False
                    break
                if time.monotonic() >= look_at:
                    self._look_for_a_newer_run(query)
                    look_at = time.monotonic() + _LOOK_SECONDS
        except StreamingQueryException as error:
            raise self._meaning(error) from None
        if isinstance(self._failure, OncelyError):
            raise self._failure
        return ended_by_itself

    def _look_for_a_newer_run(self, query: StreamingQuery) -> None:
        """A run without work would not notice that it was taken over; so it looks.

        Raises:
            Fenced: a newer run holds the ledger.
        """
        if not self._in_batch.acquire(blocking=False):
            return  # the batch in hand finds out by itself
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
        """Let the batch in hand finish, unless asked twice; then end the query."""
        while not self.stop.now and not self._in_batch.acquire(timeout=_POLL_SECONDS):
            pass
        self._ending = True
        if self._in_batch.locked() and not self.stop.now:
            self._in_batch.release()
        query.stop()

    def _meaning(self, error: Exception) -> OncelyError:
        """Why a query failed: our own error when a batch raised it, else what Spark says."""
        from pyspark.errors import AnalysisException

        if isinstance(self._failure, OncelyError):
            return self._failure
        if isinstance(self._failure, AnalysisException):
            return WrongInput(
                f"transform.spark: {str(self._failure).splitlines()[0]}",
                way_out="mend the function: Spark can't plan what it returns",
            )
        if self._failure is not None and not is_java(self._failure):
            raise self._failure
        return spark_error(str(self._failure or error))

    # -- one batch -------------------------------------------------------------------------

    def _batch(self, frame: DataFrame, batch_id: int, checkpoint: Any) -> None:
        began = time.monotonic()
        self._same_source()
        ranges = self._plan(checkpoint, batch_id)
        if not ranges:
            return
        self._same_log.check(self.batches.positions)
        self.listener(events.BatchPlanned(batch_id, ranges))
        outcomes = self.batches.run(frame, batch_id, ranges)
        self._same_source()
        for one in outcomes:
            self.listener(
                events.RangeCommitted(
                    one.partition,
                    one.range,
                    one.counts.records,
                    one.counts.rows,
                    one.counts.rejects,
                    one.counts.filtered,
                    one.replayed,
                )
            )
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
            )
        )

    def _plan(self, checkpoint: Any, batch_id: int) -> dict[TopicPartition, OffsetRange]:
        """The batch's exact ranges; a partition that Spark has found since begins at its first."""
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
                f"Spark reads partition {unknown}, which the brokers we ask don't know yet"
            ) from None

    def _same_source(self) -> None:
        """Refuse to go on with a topic that was made anew under the query.

        Raises:
            SourceMismatch: cluster or topic ids differ from those at the start.
        """
        self.batches.same_source(self.source.identity())


@contextmanager
def _arrow_batches_bounded(session: SparkSession, largest_record: int) -> Iterator[None]:
    """Bound the bytes of Arrow batches for a query that is started meanwhile.

    Only where records are large: Spark then adds up what a batch holds after each row. A query
    has a copy of the session's settings, made when it starts.
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
    """How often to try again after an error that does not pass by itself."""
    # A broker that has just come back does not know every topic for a moment (metadata reaches
    # it later), and answers as if a topic that this run has read were not there.
    return _MISSING_TOPIC_TRIES if isinstance(error, TopicMissing) and epoch is not None else 0


class _BatchFailed(Exception):
    """What Spark is told of a failure."""
