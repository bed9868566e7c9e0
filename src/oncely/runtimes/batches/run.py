"""The run of a pipeline in batches: plan ranges, run a job, tell what was committed, and mirror the
positions.

The ledger determines the start. A batch is a job whose tasks fetch, decode and transform the
records of planned ranges, and commit or stage them. If it fails with a temporary error, the run
takes the next epoch (which fences remains of the failed batch) and reads the ledger again: a first
start, a restart and a retry use the same procedure.

| | thread of the run | thread of the batch |
|---|---|---|
| plans, tells events, looks for a newer run | x | |
| runs the job, closes holes, publishes | | x |
| sees requests to stop, and cancels the job | x | |
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Protocol

from oncely.commit.backoff import MISSING_TOPIC_TRIES, Retries
from oncely.commit.path import Outcome
from oncely.commit.run import OpenLedger
from oncely.core import events
from oncely.core.ranges import Position, TopicPartition
from oncely.errors import OncelyError, Unavailable, UnreadableBatch
from oncely.kafka.source import KafkaSource
from oncely.kinds.base import Sink
from oncely.phases import Seconds, into, phase
from oncely.runtimes.batches.commit import plan_ranges
from oncely.runtimes.chunks import Ranges
from oncely.runtimes.jobs import Jobs
from oncely.runtimes.takeover import EndOffsets, Takeovers, refuse_shorter, tell_batch
from oncely.threads import StopSignal, Thread

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_LOOK_SECONDS = 5.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1  # seconds between two looks at topics without records
_STALE_LEADER_SECONDS = 30.0  # a broker that has lost its leadership may answer for less than that
_NAMED = 20  # partitions in the description of a job


class CommitsBatches(Protocol):
    """A way to commit batches."""

    @property
    def ledger(self) -> OpenLedger[Sink]:
        """The ledger of the positions."""

    def opened(self) -> None:
        """Called when the ledger was taken over."""

    def run(self, batch_id: int, ranges: Ranges) -> list[Outcome]:
        """Run the jobs of a batch, until it has taken effect.

        Args:
            batch_id: a number that no other batch of the epoch has.
            ranges: the ranges of its topic-partitions.

        Raises:
            OncelyError: it has not taken effect, or only a part of it.
        """


@dataclass
class BatchRun:
    """One run, from its start to its end.

    Attributes:
        jobs: where tasks run.
        batches: commits batches.
        takeovers: takes the ledger over.
        mirror: shows positions to lag tools.
        trigger_seconds: the least time between the starts of two batches.
        max_records_per_batch: the maximum number of Kafka offsets in a batch.
        stop: requests to end.
        retries: failed batches in a row before the run ends.
    """

    jobs: Jobs
    batches: CommitsBatches
    takeovers: Takeovers
    mirror: GroupOffsetPublisher
    trigger_seconds: float
    max_records_per_batch: int
    stop: StopSignal = field(default_factory=StopSignal)
    retries: int = 10

    def __post_init__(self) -> None:
        self._positions: dict[TopicPartition, Position] = {}
        self._goal: EndOffsets | None = None
        self._told_draining = False
        self._look_at = 0.0
        self._shorter_since: float | None = None
        self._unreadable: dict[TopicPartition, UnreadableBatch] = {}
        self._source, self._ledger = self.takeovers.source, self.takeovers.ledger
        self._listener, self._same_log = self.takeovers.listener, self.takeovers.same_log
        self._retries = Retries(self._listener, limit=self.retries)

    def run(self, *, until_latest: bool) -> bool:
        """Run until stopped, or until the records present at the start are committed.

        Returns:
            True if all of these are committed, False if it was stopped before.

        Raises:
            OncelyError: why the run ended otherwise.
        """
        while not self.stop.draining:
            try:
                positions = self._open()
                self._retries.missing = MISSING_TOPIC_TRIES
                done = self._follow(positions, until_latest=until_latest)
                self._ledger.finish()
                return done
            except UnreadableBatch as error:
                self._end_before(error)
            except OncelyError as error:
                self.stop.wait(self._retries.pause(error))
        return False

    def _end_before(self, error: UnreadableBatch) -> None:
        """Let the next batch end before these records; the run ends behind it.

        Records before them that stayed uncommitted would be passed over with them by a reset.
        """
        tp = TopicPartition(error.topic, error.partition)
        if tp in self._unreadable or error.offset <= self._positions.get(tp, 0):
            raise error
        self._unreadable[tp] = error

    # -- beginning -------------------------------------------------------------------------

    def _open(self) -> Mapping[TopicPartition, Position]:
        """Take over the ledger; the start positions."""
        taken = self.takeovers.take()
        self.batches.opened()
        self._positions = {**taken.gone, **taken.positions}
        return taken.positions

    # -- the loop --------------------------------------------------------------------------

    def _follow(self, positions: Mapping[TopicPartition, Position], *, until_latest: bool) -> bool:
        """Run batches; True if the run has ended by itself."""
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self.mirror.start(positions)
        try:
            with ThreadPoolExecutor(1, "oncely-batch") as thread:
                return self._rounds(thread, until_latest=until_latest)
        finally:
            self.mirror.finish()

    def _rounds(self, thread: ThreadPoolExecutor, *, until_latest: bool) -> bool:
        number, pause = 0, _SHORTEST_PAUSE
        while not self.stop.draining:
            began, seconds = time.monotonic(), Seconds()
            with into(seconds):
                ranges = self._planned(until_latest=until_latest)
                outcomes = self._batch(thread, number, ranges) if ranges else []
            if outcomes is None:
                return False
            if ranges:
                self._committed(number, ranges, outcomes, began, seconds)
                number, pause = number + 1, _SHORTEST_PAUSE
            elif until_latest and not self._unreadable and self._reached():
                return True
            else:
                pause = min(2 * pause, _LONGEST_PAUSE)
            for error in self._unreadable.values():  # all that precedes it is committed
                raise error
            next_at = began + (0.0 if until_latest else self.trigger_seconds)
            self._pause(max(0.0 if ranges else pause, next_at - time.monotonic()))
        self._tell_draining()
        return False

    def _reached(self) -> bool:
        """The positions are at the ends that the topics had at the start."""
        goal = self._goal
        if goal is None or all(self._positions.get(tp, 0) >= at for tp, at in goal.ends.items()):
            return True
        goal.look()
        return False

    def _pause(self, seconds: float) -> None:
        """Wait until the next batch, and meanwhile look for a newer run, and for Spark's end."""
        until = time.monotonic() + seconds
        while not self.stop.draining and (now := time.monotonic()) < until:
            self.stop.wait(min(until, self._look_at) - now)
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _LOOK_SECONDS
                self._listener(events.Polled())
                self.jobs.require()
                with suppress(Unavailable):
                    self._ledger.positions()

    def _tell_draining(self) -> None:
        if not self._told_draining:
            self._told_draining = True
            self._listener(events.Draining())

    # -- one batch -------------------------------------------------------------------------

    @phase("plan")
    def _planned(self, *, until_latest: bool) -> Ranges:
        """The ranges of the next batch, after checks that the source is the same."""
        look = self._source.look()
        self._ledger.same_topics(look.topic_ids)
        if look.ends.keys() - self._positions.keys():
            self._add_partitions()
        if until_latest and self._goal is None:  # also that of a retry
            goal = dict(look.ends)
            self._goal = EndOffsets(self._source, self.takeovers.on_gap, goal, time.monotonic)
        ends = look.ends
        if self._goal is not None:
            ends = {tp: min(end, self._goal.ends.get(tp, 0)) for tp, end in ends.items()}
        before = {tp: error.offset for tp, error in self._unreadable.items()}
        ends = {tp: min(end, before.get(tp, end)) for tp, end in ends.items()}
        self._refuse_cut(look.ends)
        self._same_log.check(lambda: self._positions, look.leader_epochs)
        return plan_ranges(self._positions, ends, self.max_records_per_batch)

    def _refuse_cut(self, ends: Mapping[TopicPartition, Position]) -> None:
        """Refuse a log that stays shorter than what was read of it: it was cut, and may never grow
        beyond its position again.

        Raises:
            SourceMismatch: a log has ended before its position for :data:`_STALE_LEADER_SECONDS`.
        """
        if all(end >= self._positions.get(tp, end) for tp, end in ends.items()):
            self._shorter_since = None
        elif self._shorter_since is None:
            self._shorter_since = time.monotonic()
        elif time.monotonic() - self._shorter_since > _STALE_LEADER_SECONDS:
            refuse_shorter(self._positions, self._source.watermarks())

    def _add_partitions(self) -> None:
        """New partitions begin at their first offset."""
        earliest = self._source.earliest()
        added = {tp: at for tp, at in earliest.items() if tp not in self._positions}
        self._ledger.add_partitions(added, self._source.identity())
        self._same_log.forget()
        self._positions |= added
        for tp, at in sorted(added.items()):
            self._listener(events.PartitionAdded(tp, at))

    def _batch(
        self, thread: ThreadPoolExecutor, number: int, ranges: Ranges
    ) -> list[Outcome] | None:
        """Run a batch; None if a second request to stop has ended it."""
        self._listener(events.BatchPlanned(number, ranges))

        def work() -> list[Outcome]:
            self.jobs.enter(self._described(number, ranges))
            return self.batches.run(number, ranges)

        # With the secrets in scope, and the pipeline of log entries.
        job = thread.submit(copy_context().run, work)
        try:
            return self._awaited(job)
        except OncelyError:
            raise
        except Exception as error:
            if self.stop.now:
                return None
            meaning = self.jobs.meaning(error)
            raise meaning from (None if isinstance(meaning, OncelyError) else error.__cause__)

    def _awaited(self, job: Future[list[Outcome]]) -> list[Outcome]:
        """Wait for a batch: the first request to stop lets it finish, the second cancels it."""
        try:
            while not wait([job], _POLL_SECONDS).done:
                if self.stop.draining:
                    self._tell_draining()
                if self.stop.now:
                    self.jobs.cancel()
        except BaseException:  # KeyboardInterrupt in a program of a user
            self.jobs.cancel()
            raise
        return job.result()

    def _described(self, number: int, ranges: Ranges) -> str:
        shown = ", ".join(f"{tp} {range_}" for tp, range_ in list(ranges.items())[:_NAMED])
        more = f" and {len(ranges) - _NAMED} more" if len(ranges) > _NAMED else ""
        return f"oncely {self.takeovers.name}: batch {number}: {shown}{more}"

    def _committed(
        self, number: int, ranges: Ranges, outcomes: list[Outcome], began: float, seconds: Seconds
    ) -> None:
        """Tell what a batch has committed.

        Raises:
            SourceMismatch: a topic was recreated while the batch ran.
        """
        ends = {tp: range_.end for tp, range_ in ranges.items()}
        self._positions |= ends
        self._retries.reset()
        self.mirror.put(ends)
        tell_batch(self._listener, number, outcomes, ends, time.monotonic() - began, seconds)
        self._ledger.same_topics(self._source.topic_ids())


class GroupOffsetPublisher:
    """Mirrors positions to the Kafka consumer group, for lag tools: for display only, never read
    back, always after the commit.

    It sends the newest positions; those that arrive during a request replace the waiting ones. It
    has a thread of its own: a slow broker must not slow commits, and a failure to mirror is only
    logged.
    """

    def __init__(self, source: KafkaSource, group: str | None) -> None:
        # Separate clients, which it may discard independently of other threads.
        self._source = KafkaSource(source.brokers, source.topics, source.kafka)
        self._group = group or ""
        self._condition = threading.Condition()
        self._waiting: dict[TopicPartition, Position] = {}
        self._ending = False
        self._thread: Thread | None = None

    def start(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Begin, with the start positions of the run (a reset may have moved them back)."""
        if not self._group:
            return
        self._ending = False
        self._thread = Thread(self._send_all, "mirror")
        self._thread.start()
        self.put(positions)

    def put(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Mirror these positions soon. Raises the error with which the thread has ended."""
        if self._thread is not None:
            self._thread.check()
        with self._condition:
            self._waiting.update(positions)
            self._condition.notify()

    def finish(self) -> None:
        """Send the waiting positions, then end."""
        with self._condition:
            self._ending = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout=15)
            self._thread = None

    def _send_all(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._ending)
                positions, self._waiting = self._waiting, {}
            if not positions:
                return
            self._send(positions)

    def _send(self, positions: Mapping[TopicPartition, Position]) -> None:
        try:
            try:
                self._source.mirror(self._group, positions)
            except Unavailable:
                # After a broker's restart an old client may never reconnect to the coordinator.
                self._source.close()
                self._source.mirror(self._group, positions)
        except OncelyError as error:
            log.warning("positions were not mirrored to group %s: %s", self._group, error.message)
