"""A member of a consumer group: polls, buffers, commits, and follows the group's assignments.

One thread owns the consumer, and decodes; a second one commits (docs/decisions/0008). The callbacks
of a rebalance run in the first one:

- Partitions were assigned: they are taken over at once, and reading begins at the ledger's
  positions. If the ledger does not answer, they are assigned paused, and it is tried again.
- Partitions are revoked: the commit in hand is awaited, up to a deadline. The ledger fences what
  did not end in time.
- A member that restarts commits at each of both what it has in memory of all partitions, up to that
  deadline; what is left is dropped, and partitions that stay are read again from there.

A failed commit drops what is in memory of its fence's partitions; they are taken over again, with a
new fence. If it was fenced, the group is asked first (docs/decisions/0036).

:class:`WorkerRun` is the ledger's side: takeovers of some partitions, and housekeeping between
commits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from oncely.commit.backoff import MISSING_TOPIC_TRIES, Backoff, Retries
from oncely.commit.path import Outcome, pass_over
from oncely.commit.run import OpenLedger
from oncely.core import events
from oncely.core.batch import Chunk
from oncely.core.claim import NO_RECORDS, Fence, Notes
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import Fenced, OncelyError, TopicMissing, Unavailable
from oncely.kafka.group import GroupConsumer, Rebalances
from oncely.kafka.inbox import PollResult
from oncely.kafka.records import Records, offsets_of, table_of, timestamps_of, without
from oncely.kinds.base import CommitsChunks, PreparesChunks
from oncely.per_process import rare_collections
from oncely.phases import Seconds, into, phase
from oncely.runtimes.chunks import PipelinedCommit, RangeReader
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.takeover import EndOffsets, Taken, Takeovers, tell_batch
from oncely.runtimes.worker.assignment import (
    Assignment,
    BufferLimits,
    Fetched,
    PartitionState,
    PendingCommit,
    Throttle,
)
from oncely.threads import StopSignal

log = logging.getLogger(__name__)

_IDLE = 0.1  # seconds that a poll may wait for records
_BUSY = 0.005  # seconds to wait for the end of a commit between two polls
_ASK_AGAIN = 3.0  # seconds between two questions about partitions that are not ours
_WATCH = 5.0  # seconds between two looks at topics and ledger while there is nothing to do
_AHEAD = 4  # a chunk of this part of the limit is decoded while another one is committed
_LOOK = 1.0  # seconds between two looks at positions
_TELL = 5.0  # seconds between two signs of life
_QUIET = 60.0  # seconds without an error, and without anything to commit, after which all is well
_RETRIED = (Unavailable, TopicMissing)


class _InHand(NamedTuple):
    fence: Fence
    ranges: dict[TopicPartition, OffsetRange]
    began: float
    seconds: Seconds


class _Ready(NamedTuple):
    work: PendingCommit
    chunk: Chunk
    seconds: Seconds
    topic_ids: Callable[[], Mapping[str, str]]  # asked for after the records were fetched


@dataclass
class Member(Rebalances):
    """One member, from its first poll to its last.

    Attributes:
        run: the ledger's side.
        join: joins the group; called once.
        limits: bounds of memory and of commits.
        revoke_seconds: the deadline for the commit in hand when partitions are revoked.
        restarts: all partitions end at each rebalance, and those that stay begin again.
        stop: ends it.
        listener: called with its events.
        overlap: commit in a second thread.
        patience: seconds of errors without a commit, of a partition or of all, after which it ends.
        gates: the filters that make records wait.
        clock: seconds.
        now: milliseconds since 1970, to which timestamps of records are compared.
    """

    run: WorkerRun
    join: Callable[[Rebalances], GroupConsumer]
    limits: BufferLimits = field(default_factory=BufferLimits)
    revoke_seconds: float = 10.0
    restarts: bool = False
    stop: StopSignal = field(default_factory=StopSignal)
    listener: events.Listener = lambda _: None
    overlap: bool = True
    patience: float = 300.0
    gates: Throttle = field(default_factory=Throttle)
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], int] = lambda: time.time_ns() // 1_000_000

    def __post_init__(self) -> None:
        self.assignment = Assignment(self.limits)
        self._group: GroupConsumer
        self._hand: PipelinedCommit
        self._in_hand: _InHand | None = None
        self._marks: dict[TopicPartition, Position] = {}
        self._ready: _Ready | None = None
        self._read = 0.0
        self._more = False
        self._held: dict[TopicPartition, tuple[Position, float]] = {}
        self._came: set[TopicPartition] = set()  # something of them, since the last sign of life
        self._repeated = 0  # records, since then
        self._batch = 0
        self._not_before = self._look_at = self._ask_at = self._tell_at = self._watch_at = 0.0
        backoff = Backoff(first=0.5, longest=30.0, total=self.patience, clock=self.clock)
        self._retries = Retries(self.listener, backoff, math.inf, MISSING_TOPIC_TRIES)
        self._failed_at = 0.0
        self._stuck: dict[TopicPartition, float] = {}  # since an error that no commit has followed
        self._joined = self._closing = False
        self._strangers: Callable[[], dict[TopicPartition, str]] = dict  # the last question
        self._unread: frozenset[TopicPartition] = frozenset()  # of this pipeline by anybody

    def work(self, goal: EndOffsets | None = None) -> bool:
        """Work until stopped, or until the ledger has reached the goal; True if it has.

        Raises:
            OncelyError: why it ended otherwise.
        """
        with (
            rare_collections(),
            PipelinedCommit(
                self.run.ledger.budget, overlap=self.overlap, patience=self.patience
            ) as self._hand,
        ):
            self._group = self.join(self)
            try:
                while not self.stop.draining:
                    self.turn()
                    if goal is not None and self._reached(goal):
                        return True
                self.listener(events.Draining())
                return False
            finally:
                self._leave()

    def turn(self) -> None:
        """One round: poll, and act on what has happened."""
        waiting = self._hand.busy and (self.assignment.buffered or self._ready)
        if waiting and not self._more:
            self._hand.pause(_BUSY)
        self._poll(0.0 if waiting else _IDLE)
        if self.clock() >= self._tell_at:
            self._tell()
        if self._hand.busy and self._hand.ended:
            self._finish()
        if self.clock() >= self._not_before:
            self._ask()
            self._take_again()
        if not self._hand.busy:
            self._begin()
        elif self._ready is None:
            self._ready = self._decoded(self.assignment.work(self.limits.records // _AHEAD))
        self._release()
        self._group.pause(self.assignment.paused() | self._held.keys())

    def _tell(self) -> None:
        """Give a sign of life. Before the first partitions the coordinator is asked whether it is a
        member: the client does not tell, if it gets none (KIP-848)."""
        if not self._joined:
            with suppress(Unavailable):
                self._joined = self._group.joined()
            if self._joined:
                self.listener(events.PartitionsChanged("assigned", frozenset()))
        if self._joined:
            self._look_around()
        self._tell_at = self.clock() + (_TELL if self._joined else _LOOK)
        owned, busy = frozenset(self.assignment.positions), self.assignment.in_memory
        read, self._came = owned & (busy | self._came), set()
        waiting, (repeated, self._repeated) = self._held.keys() - busy, (self._repeated, 0)
        self.listener(events.Polled(owned, read, owned & waiting, repeated, self._unread))

    def _look_around(self) -> None:
        """Log partitions that no member of this pipeline reads. The group is asked meanwhile, and
        the answer is read at the next sign of life."""
        found: dict[TopicPartition, str] = {}
        with suppress(Unavailable):
            found = self._strangers()
        self._strangers = self._hand.ask(self._group.strangers)
        for tp in sorted(found.keys() - self._unread):
            log.warning("%s: no member of this pipeline reads it: %s holds it", tp, found[tp])
        self._unread = frozenset(found)

    def _leave(self) -> None:
        """Finish the commit in hand, and return the partitions."""
        try:
            if not self.stop.now and self._hand.wait(self.revoke_seconds):
                self._finish()
        finally:
            self._closing = True
            self._group.close()

    # -- the group -------------------------------------------------------------------------

    def assigned(self, partitions: frozenset[TopicPartition]) -> Mapping[TopicPartition, Position]:
        """Take over at once; what can't be taken over is left out, and paused."""
        self._joined = True
        self.listener(events.PartitionsChanged("assigned", partitions))
        if self.restarts:
            self._flush()
            self._restart()
        self._put_back(partitions)
        self.assignment.assigned(partitions)
        return self._take(partitions)

    def revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """Finish the commit in hand; what is buffered is dropped."""
        working = self._in_hand is not None and partitions & self._in_hand.ranges.keys()
        try:
            if self.restarts and not self._closing:
                self._flush()
            elif working and self._hand.wait(self.revoke_seconds):
                self._finish()
        finally:
            self._put_back(partitions)
            dropped = self.assignment.revoked(partitions)
            for tp in partitions:
                self._marks.pop(tp, None)
                self._held.pop(tp, None)
                self._stuck.pop(tp, None)
            self.listener(events.PartitionsChanged("lost" if lost else "revoked", partitions))
            log.debug("dropped %d records of revoked partitions", dropped)
            if self.restarts:
                self._restart()

    def _flush(self) -> None:
        """Commit what is in memory of all partitions, up to the deadline."""
        until = self.clock() + self.revoke_seconds
        while self._hand.wait(max(0.0, until - self.clock())):
            self._finish()
            if self.clock() >= until or not self._begin_records():
                return

    def _restart(self) -> None:
        """Drop what could not be committed; it is fetched again."""
        self._put_back(self.assignment.positions.keys())
        for tp, at in self.assignment.restart().items():
            self._held.pop(tp, None)
            self._group.seek(tp, at)

    def _ask(self) -> None:
        """Ask the group for the partitions that were taken over by others."""
        asking, left = (
            self.assignment.staged(PartitionState.ASKING),
            self.assignment.staged(PartitionState.LEFT),
        )
        if not (asking or (left and self.clock() >= self._ask_at)):
            return
        self._ask_at = self.clock() + _ASK_AGAIN
        try:
            self.run.look_for_a_whole_run()
            self.assignment.answered(self._group.assigned_now())
        except _RETRIED as error:
            self._failed(error, asking)

    # -- the ledger ------------------------------------------------------------------------

    def _take(self, partitions: frozenset[TopicPartition]) -> Mapping[TopicPartition, Position]:
        """The positions of the partitions that were taken over: all, or none."""
        try:
            taken = self.run.take(partitions)
        except Fenced as error:
            if not error.lost:
                raise
            self._lost(partitions, ask=True)
        except _RETRIED as error:
            self._failed(error, partitions)
        else:
            self._retries.found_topics()
            self.assignment.taken(taken.fence, taken.positions, taken.leader_epochs)
            for tp in taken.positions:  # it is fetched from the ledger's position
                self._held.pop(tp, None)
            self._marks |= taken.positions
            return taken.positions
        return {}

    def _take_again(self) -> None:
        waiting = self.assignment.staged(PartitionState.TAKING)
        if waiting:
            for tp, at in self._take(waiting).items():
                self._group.seek(tp, at)

    def _failed(
        self, error: OncelyError, of: Collection[TopicPartition], epoch: int | None = None
    ) -> None:
        """Try again after a pause.

        Args:
            error: the error.
            of: the partitions with which it goes on no further. Commits of others do not begin
                their patience anew.
            epoch: that of the commit that has failed.

        Raises:
            OncelyError: the time for that is up.
        """
        self._failed_at = self.clock()
        spent = max([self._retries.backoff.spent, *map(self._spent, of)])
        if spent >= self.patience:
            log.warning("nothing was committed for %.0f s: the worker ends", spent)
            raise error
        self._not_before = self._failed_at + self._retries.pause(error, epoch)
        self._watch_at = min(self._watch_at, self._not_before)

    def _spent(self, tp: TopicPartition) -> float:
        """The seconds since the first error of a partition that no commit of it has followed."""
        return self._failed_at - self._stuck.setdefault(tp, self._failed_at)

    def _progressed(self, of: Collection[TopicPartition]) -> None:
        """Partitions were committed, or there has been nothing to commit, and no error, for a
        while."""
        for tp in of or list(self._stuck):
            self._stuck.pop(tp, None)
        self._retries.reset()

    # -- records ---------------------------------------------------------------------------

    def _poll(self, seconds: float) -> None:
        began = self.clock()
        polled = self._group.poll(seconds)
        self._more = polled.more
        if polled.messages:
            self._read += self.clock() - began
        self._receive(polled)

    def _receive(self, polled: PollResult) -> None:
        self._came |= polled.messages.keys() | polled.ends.keys()
        for tp, records in polled.messages.items():
            if tp not in self._held:
                self._admit(tp, records)
        for tp, end in polled.ends.items():
            if tp not in self._held:
                self.assignment.ended(tp, end)
                if end <= self.assignment.positions.get(tp, -1):  # nothing is left to commit
                    self._stuck.pop(tp, None)
        for tp, error in polled.failed.items():
            log.warning("%s: %s", tp, error.str())
            self._lost([tp], ask=False)

    def _admit(self, tp: TopicPartition, records: Records) -> None:
        """Buffer the records that need not wait; the others are fetched again when they may."""
        if again := self.assignment.again(tp, offsets_of(records)):
            self._repeated += len(again)
            records = without(records, again)
            log.info("%s: passed over %d records that had come before", tp, len(again))
        count, wait_ms = len(records), 0
        if self.gates.waits:
            count, wait_ms, ahead = self.gates.admit(tp, timestamps_of(records), self.now())
            if ahead:
                log.warning(
                    "%s: the timestamp of offset %d is %.0f s in the future: it waits for"
                    " filter.delay from now on, not until then",
                    tp, records[count].offset(), ahead / 1000,
                )  # fmt: skip
        most = self.limits.records  # of a piece, as a commit contains whole ones
        for at in range(0, count, most):
            self.assignment.fetched(tp, Fetched.of(records[at : min(at + most, count)]))
        if wait_ms:
            self._held[tp] = records[count].offset(), self.clock() + wait_ms / 1000

    def _release(self) -> None:
        """Fetch records whose time has come."""
        for tp, (position, until) in list(self._held.items()):
            if self.clock() >= until:
                del self._held[tp]
                self._group.seek(tp, position)

    def _begin(self) -> None:
        """Begin the next commit, or what there is to do without one."""
        if self._begin_records():
            return
        if found := self.assignment.holes():
            fence, holes = found
            self.assignment.pass_over(holes)
            seconds = Seconds()
            self._planned(fence, holes, seconds)
            with into(seconds):
                self._hand.begin_work(self.run.close_holes(fence, holes))
        elif self.clock() >= self._watch_at:
            self._watch()

    def _begin_records(self) -> bool:
        """Begin to commit records; False if there are none."""
        ready, self._ready = self._ready or self._decoded(self.assignment.work()), None
        if ready is not None:
            self._commit(ready)
        return ready is not None

    def _watch(self) -> None:
        """While there is nothing to commit: are topics and ledger still ours?"""
        self._watch_at = self.clock() + _WATCH
        fences = self.assignment.fences
        fence = max(fences, key=lambda one: one.epoch, default=self.run.ledger.fence)
        self._in_hand = _InHand(fence, {}, self.clock(), {})
        # Partitions of the fence that were returned may be others' by now.
        owned = replace(fence, partitions=self.assignment.of(fence)) if fences else None
        self._hand.begin_work(partial(self.run.watch, owned))

    def _decoded(self, work: PendingCommit | None) -> _Ready | None:
        """Work with its chunk; None if there is none, or it can't be decoded now. The broker is
        asked for the ids of the topics meanwhile."""
        if work is None:
            return None
        seconds, self._read = Seconds(read=self._read), 0.0
        topic_ids = self._hand.ask(self.run.topic_ids)
        try:
            with into(seconds):
                return _Ready(work, self.run.chunk(work), seconds, topic_ids)
        except Unavailable as error:  # of a schema registry
            self._lost(self.assignment.of(work.fence), ask=False)
            self._failed(error, work.ranges)
            return None

    def _commit(self, ready: _Ready) -> None:
        work, before = ready.work, partial(self.run.before, ready.work, ready.topic_ids)
        self._planned(work.fence, dict(work.ranges), ready.seconds)
        with into(ready.seconds):
            self._hand.begin(self.run.ledger.context.delivery, work.fence, ready.chunk, before)

    def _put_back(self, partitions: Collection[TopicPartition]) -> None:
        """These partitions are about to change hands: what was decoded ahead of them is not
        committed. The others' records are buffered again."""
        if self._ready is not None and not self._ready.work.ranges.keys().isdisjoint(partitions):
            self.assignment.put_back(self._ready.work)
            self._ready = None

    def _lost(self, partitions: Collection[TopicPartition], *, ask: bool) -> None:
        self._put_back(partitions)
        self.assignment.lost(partitions, ask=ask)

    def _planned(
        self, fence: Fence, ranges: dict[TopicPartition, OffsetRange], seconds: Seconds
    ) -> None:
        self._in_hand = _InHand(fence, ranges, self.clock(), seconds)
        self.listener(events.BatchPlanned(self._batch, ranges, fence.epoch))

    def _finish(self) -> None:
        """Act on the end of the commit in hand."""
        if self._in_hand is None:
            return
        (fence, ranges, began, seconds), self._in_hand = self._in_hand, None
        batch, self._batch = self._batch, self._batch + 1
        try:
            outcomes = self._hand.finish()
        except Fenced as error:
            lost = frozenset(self.assignment.of(fence))
            self.listener(events.FencedOut(fence.epoch, error.theirs, lost))
            self._lost(lost, ask=True)
            return
        except _RETRIED as error:
            self._lost(self.assignment.of(fence), ask=False)
            self._failed(error, ranges, fence.epoch)
            return
        if ranges or (self.assignment.fences and self.clock() - self._failed_at > _QUIET):
            self._progressed(ranges)
        if not ranges:
            return
        ends = {tp: range_.end for tp, range_ in ranges.items()}
        self.assignment.committed(fence, ends)
        spent = self.clock() - began
        tell_batch(self.listener, batch, outcomes, ends, spent, seconds, fence.epoch)
        self._mark({tp: at for tp, at in ends.items() if tp in self.assignment.positions})
        self.run.keep_house(self.assignment.fences, outcomes)

    def _mark(self, ends: Mapping[TopicPartition, Position]) -> None:
        """Mark positions in the group, forward only."""
        ahead = {tp: at for tp, at in ends.items() if at > self._marks.get(tp, at)}
        self._marks |= ahead
        if ahead and not self._closing:
            self._group.mark(ahead)

    def _reached(self, goal: EndOffsets) -> bool:
        """True if the positions of all partitions, also those of other members, are at the ends."""
        own, ends = self.assignment.positions, goal.ends
        if self._hand.busy:
            return False
        behind = any(at < ends.get(tp, 0) for tp, at in own.items())
        if not behind and own.keys() >= ends.keys():
            return True
        if self.clock() < self._look_at:
            return False
        self._look_at = self.clock() + _LOOK
        try:
            goal.look()
            everywhere = {} if behind else self.run.everywhere()
        except _RETRIED as error:
            log.debug("no answer: %s", error.message)
            return False
        return all(everywhere.get(tp, -1) >= end for tp, end in ends.items())


@dataclass
class WorkerRun:
    """A run that takes partitions over one assignment after another.

    Attributes:
        ledger: the ledger of the positions.
        takeovers: takes partitions of it over.
        transform: transforms the decoded rows.
    """

    ledger: OpenLedger[CommitsChunks]
    takeovers: Takeovers
    transform: RowTransform

    def begin(self) -> None:
        """Compare source and destination, settle ``start``, and find the last run of all
        partitions; takes nothing over.

        Raises the errors of ``Ledger.open``.
        """
        self.takeovers.since = self.takeovers.open({}, frozenset()).whole

    def look_for_a_whole_run(self) -> None:
        """Raise Fenced if a run has taken all partitions since :meth:`begin`."""
        self.takeovers.open({}, frozenset())

    def take(self, partitions: frozenset[TopicPartition]) -> Taken:
        """Take partitions over, and compare their positions with the source's logs.

        Raises:
            Fenced: with ``lost``, another process was faster; without, a run has taken all
                partitions since :meth:`begin`.
            The errors of :meth:`Takeovers.take`.
        """
        return self.takeovers.take(partitions)

    def topic_ids(self) -> dict[str, str]:
        """The ids of the topics, read from the cluster now; for any thread."""
        return self.takeovers.source.topic_ids()

    def everywhere(self) -> dict[TopicPartition, Position]:
        """The positions of all partitions, whoever holds them."""
        found = self.ledger.context.ledger.positions(self.ledger.fence, settled=True)
        return {tp: entry.position for tp, entry in found.items()}

    # -- commits ---------------------------------------------------------------------------

    @phase("decode")
    def chunk(self, work: PendingCommit) -> Chunk:
        """Decode and transform records."""
        runs = [(tp, piece.payload) for tp, pieces in work.pieces.items() for piece in pieces]
        context = self.ledger.context
        table = table_of(runs, context.needs)
        starts = {tp: range_.start for tp, range_ in work.ranges.items()}
        (chunk,) = RangeReader.of(context, self.transform).processing().chunks(starts, [table])
        if self.by_key:
            return replace(chunk, keys=table.column("key"))
        if isinstance(context.sink, PreparesChunks):
            context.sink.prepare_chunk(chunk)
        return chunk

    @property
    def by_key(self) -> bool:
        """True if several threads commit a chunk, divided by key."""
        return bool(getattr(self.ledger.context.sink, "threads", None))

    def watch(self, fence: Fence | None) -> list[Outcome]:
        """Check that the topics are the same, and that the partitions of a fence are held.

        Args:
            fence: None if no partitions are owned.

        Raises:
            TopicMissing, SourceMismatch: a topic was deleted, or recreated.
            Fenced: another process has taken over.
        """
        self.ledger.same_topics(self.topic_ids())
        if fence is not None:
            fence.refuse_taken(self.ledger.context.ledger.positions(fence))
        return []

    @phase("plan")
    def before(self, work: PendingCommit, topic_ids: Callable[[], Mapping[str, str]]) -> None:
        """Before a commit: the topics are the same, and the ledger knows the leader epochs.

        Args:
            work: what is committed.
            topic_ids: the ids of the topics at a time when its records had been fetched.

        Raises:
            SourceMismatch: a topic was recreated.
            Fenced, Unavailable: nothing was noted.
        """
        self.ledger.same_topics(topic_ids())
        if work.leader_epochs:
            self.ledger.context.ledger.note(work.fence, Notes(leader_epochs=work.leader_epochs))

    def close_holes(
        self, fence: Fence, holes: Mapping[TopicPartition, OffsetRange]
    ) -> Callable[[], list[Outcome]]:
        """Work that moves positions over holes."""
        return partial(pass_over, self.ledger.context.delivery, holes, fence, "hole")

    def keep_house(self, held: Collection[Fence], outcomes: Collection[Outcome]) -> None:
        """Count what was committed, and do the housekeeping, under a fence that is held."""
        ledger = self.ledger
        ledger.count(sum((one.counts for one in outcomes), NO_RECORDS))
        ledger.fence = max(held, key=lambda one: one.epoch, default=ledger.fence)
        with suppress(Fenced):  # a commit finds it, and the group is asked
            ledger.tidy(len(outcomes))
