"""The driver's side of a run: its fence, its reject budget, and the housekeeping.

With ``delivery = "none"`` positions move on a timer, independent of the records' outcome. This
corresponds to a consumer with ``enable.auto.commit``. The driver hands a batch's ranges out to
its tasks, and when the timer fires it saves the ends of the ranges that were handed out: their
records may be written by then, or not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic

from oncely.commit import path
from oncely.commit.backoff import Backoff
from oncely.commit.path import (
    AnySink_co,
    Delivery,
    Order,
    Outcome,
    attempts,
    pass_over,
    require_current,
)
from oncely.core.batch import Batch
from oncely.core.claim import (
    NO_RECORDS,
    NOT_COUNTED,
    NOTHING_COUNTED,
    Budget,
    Claim,
    Counts,
    Entry,
    Fence,
    Notes,
    Opened,
    Positions,
    RejectCount,
    Takeover,
)
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.decode.base import Decoder
from oncely.errors import Fenced, InvariantViolation, OncelyError, SourceMismatch, Unavailable
from oncely.kafka.source import KafkaSource
from oncely.kinds.base import PublishesBatches, Sink
from oncely.stores.document import Ledger, MovesPositions
from oncely.threads import Thread

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Interval:
    """The interval between two saves of the positions.

    Attributes:
        seconds: between two saves; None where ``offsets`` decides.
        offsets: offsets handed out between two saves; None where ``seconds`` decide.
    """

    seconds: float | None = 5.0
    offsets: int | None = None


@dataclass
class LocalPositions:
    """Positions of one task, for records whose positions the driver moves by a timer.

    Attributes:
        at: the task's positions.
    """

    at: dict[TopicPartition, Position] = field(default_factory=dict)

    @property
    def one_store(self) -> bool:
        """These positions are not stored."""
        return False

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """The task's positions as ledger entries."""
        del of, settled
        return {tp: Entry(at, fence.epoch, run=fence.run) for tp, at in self.at.items()}

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Advance the task's positions."""
        del counts
        self.at |= {tp: claim.end(tp) for tp in claim.ranges}


class PositionTimer:
    """Saves the ends of handed-out ranges, in a thread of its own if the interval is a time."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._lock, self._over = threading.Lock(), threading.Event()
        self._ends: dict[TopicPartition, Position] = {}
        self._since = 0
        self._thread: Thread | None = None
        self._to: tuple[Ledger, Fence] | None = None

    def begin(self, ledger: Ledger, fence: Fence) -> None:
        """Begin to save into this ledger."""
        self._to = ledger, fence
        if self._interval.seconds is not None and self._thread is None:
            self._over.clear()
            self._thread = Thread(self._tick, "commit-interval")
            self._thread.start()

    def hand_out(self, ranges: Mapping[TopicPartition, OffsetRange]) -> None:
        """Note ranges that tasks are about to read: the timer may save their ends from now on.

        Raises the error with which its thread has ended.
        """
        if self._thread is not None:
            self._thread.check()
        with self._lock:
            self._ends |= {tp: range_.end for tp, range_ in ranges.items()}
            self._since += sum(range_.end - range_.start for range_ in ranges.values())
            offsets = self._interval.offsets
            due = offsets is not None and self._since >= offsets
        if due:
            self._save()

    def forget(self) -> None:
        """Forget unsaved ends: a new epoch begins at the stored positions."""
        with self._lock:
            self._ends, self._since = {}, 0

    def close(self) -> None:
        """Save the ends of the handed-out ranges. Called at the end without an error."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=30)
            self._thread = None
        self._save()

    def _tick(self) -> None:
        while not self._over.wait(self._interval.seconds):
            self._save()

    def _save(self) -> None:
        with self._lock:
            ends, self._ends, self._since = self._ends, {}, 0
        try:
            if self._to is not None and ends:
                for attempt in attempts(Backoff(total=0)):
                    with attempt:
                        save(*self._to, ends)
        except Fenced as error:  # the next batch raises it as well, and ends the run
            log.warning("positions were not saved: %s", error.message)
        except OncelyError as error:
            log.warning("positions were not saved, and are saved again later: %s", error)
            with self._lock:
                self._ends = ends | self._ends


def save(ledger: Ledger, fence: Fence, ends: Mapping[TopicPartition, Position]) -> None:
    """Set positions to the ends of handed-out ranges.

    Raises:
        Fenced: a newer run has opened. The positions that a run of some partitions still holds
            are saved.
    """
    entries = ledger.positions(fence, settled=True)
    if fence.partitions is None:
        fence.refuse_taken(entries)
    held = {
        tp: one for tp, one in entries.items() if fence.partitions is None or fence.is_held(one)
    }
    ranges = {
        tp: OffsetRange(held[tp].position, end)
        for tp, end in ends.items()
        if tp in held and held[tp].position < end
    }
    if ranges:
        ledger.move(Claim(fence, ranges, held), dict.fromkeys(ranges, NOT_COUNTED))
    fence.refuse_taken(entries)


_TIDY_AFTER = 10_000  # rows added to the history


def take_over(sink: Sink, store: Ledger | None, takeover: Takeover) -> Opened:
    """Prepare the destination, and take over the ledger of its positions.

    Args:
        sink: the destination.
        store: the ledger of the positions; None: the sink's own ledger.
        takeover: the run and its source.
    """
    if store is None:
        return sink.open(takeover)
    if takeover.reset is None:
        sink.prepare()
    return store.open(takeover)


class Housekeeping:
    """Maintenance between batches: it can be deferred, and its errors must not fail committed work.

    The history is tidied at the beginning, because a run may have a few batches only, and by the
    number of rows that batches add to it.
    """

    def __init__(self) -> None:
        self._added = _TIDY_AFTER

    def do(self, tidy: Callable[[], object], added: int, *more: Callable[[], object]) -> None:
        """Do ``more``, and ``tidy`` if enough rows were added since the last time."""
        works = list(more)
        self._added += added
        if self._added >= _TIDY_AFTER:
            self._added = 0
            works.append(tidy)
        for work in works:
            try:
                work()
            except Unavailable as error:
                log.warning("housekeeping is postponed: %s", error.message)


@dataclass(frozen=True)
class CommitContext(Generic[AnySink_co]):
    """What a run commits with, whichever way it commits.

    Attributes:
        sink: the destination.
        source: reads ranges, and rejected records again, for their dead letters.
        decoder: decodes the records.
        allowed: the reject budget, of which nothing is counted.
        store: the ledger of the positions; None: the sink's own ledger.
        order: the order in which records and positions take effect.
        interval: the interval of a position timer; None: positions move with each commit.
    """

    sink: AnySink_co
    source: KafkaSource
    decoder: Decoder
    allowed: Budget = field(default_factory=Budget)
    store: Ledger | None = None
    order: Order = "together"
    interval: Interval | None = None

    @property
    def ledger(self) -> Ledger:
        """The ledger of the positions."""
        return self.sink.ledger if self.store is None else self.store

    @property
    def delivery(self) -> Delivery[AnySink_co]:
        """The delivery of commits by the driver itself."""
        return Delivery(self.sink, self.ledger, self.order)

    @property
    def needs(self) -> frozenset[str]:
        """The columns of the records that decoder and sink read, and the value."""
        return self.decoder.needs | self.sink.needs | {"value"}


class OpenLedger(Generic[AnySink_co]):
    """The ledger as a run has taken it over: the fence, and what the run has counted under it.

    Attributes:
        context: what the run commits with; the sink is bound to its destination by :meth:`open`.
        leader_epochs: the source's leader epochs that the ledger has noted.
    """

    def __init__(self, context: CommitContext[AnySink_co]) -> None:
        self.context = context
        self.leader_epochs: Mapping[TopicPartition, int] = {}
        self._fence: Fence | None = None
        self._topic_ids: Mapping[str, str] | None = None
        self._opened: tuple[TopicPartition, ...] = ()
        self._housekeeping = Housekeeping()
        self._counted = self._noted = NOTHING_COUNTED
        self._timer = PositionTimer(context.interval) if context.interval is not None else None

    @property
    def fence(self) -> Fence:
        """The epoch of this run, after :meth:`open`."""
        if self._fence is None:
            raise InvariantViolation("the ledger was not opened")
        return self._fence

    @fence.setter
    def fence(self, held: Fence) -> None:
        self._fence = held

    def open(self, takeover: Takeover) -> Opened:
        """Take over the ledger and bind the sink to its destination in its present state.

        Housekeeping of a run of some partitions follows its commits: it may hold none yet.
        """
        if self._timer is not None:
            self._timer.forget()
        context = self.context
        opened = take_over(context.sink, context.store, takeover)
        self.context = replace(context, sink=context.sink.bind())
        if self._fence is None:  # a run that opens again continues its counts
            setting = context.allowed.setting
            self._noted = opened.counted
            same = opened.counted.setting == setting
            self._counted = opened.counted if same else RejectCount(setting)
        self._fence, self._topic_ids = opened.fence, takeover.source.topic_ids
        self._opened = tuple(opened.positions)
        self.leader_epochs = opened.leader_epochs
        if self._timer is not None:
            self._timer.begin(self.context.ledger, opened.fence)
        if takeover.partitions is None:
            self.tidy(0)
        return opened

    def close(self) -> None:
        """Save positions that wait for a timer, and close connections."""
        if self._timer is not None:
            self._timer.close()
        self.context.sink.close()
        self.context.ledger.close()

    def same_topics(self, topic_ids: Mapping[str, str]) -> None:
        """Refuse topics other than at :meth:`open`. Their ids are unique, so the cluster is the
        same, too (KIP-516).

        Raises:
            SourceMismatch: the topic was recreated under the running query.
        """
        if self._topic_ids is None or topic_ids == self._topic_ids:
            return
        raise SourceMismatch(
            "the topic or its cluster changed while the pipeline ran:"
            f" {dict(self._topic_ids)} at start, {dict(topic_ids)} now",
            way_out="give the pipeline a new name if the topic was recreated on purpose",
        )

    def positions(self) -> dict[TopicPartition, Position]:
        """The ledger's current positions. A run without records would not notice a newer one, or a
        ledger that was put back to an older state, otherwise.

        Raises:
            Fenced: a newer run holds the ledger.
            LedgerWentBack: the ledger is older than at :meth:`open`.
            Unavailable: no answer.
        """
        return {tp: entry.position for tp, entry in self.entries().items()}

    def entries(self, ledger: MovesPositions | None = None) -> dict[TopicPartition, Entry]:
        """The entries of the run's partitions, of another ledger if one is given. Raises the
        errors of :meth:`positions`."""
        ledger = ledger or self.context.ledger
        try:
            entries = ledger.positions(self.fence, settled=True)
        except Unavailable:
            # The idle session may have been ended; a new one may work.
            entries = ledger.positions(self.fence, settled=True)
        own = {tp: entry for tp, entry in entries.items() if self.fence.covers(tp)}
        self.fence.refuse_taken(own)
        delivery = self.context.delivery
        if delivery.one_store:
            require_current(delivery, self.fence, dict.fromkeys(self._opened, None) | own)
        return own

    def add_partitions(self, positions: Positions, source: SourceIdentity) -> None:
        """Add positions for partitions that were discovered during the run."""
        self.context.ledger.add_partitions(self.fence, positions, source)

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int]) -> None:
        """Note leader epochs in the ledger."""
        self.context.ledger.note(self.fence, Notes(leader_epochs=epochs))
        self.leader_epochs = {**self.leader_epochs, **epochs}

    def record_gaps(self, gaps: Mapping[TopicPartition, OffsetRange]) -> list[Outcome]:
        """Move positions over lost ranges and store those in the history."""
        return pass_over(self.context.delivery, gaps, self.fence, "gap")

    def for_batch(self, ranges: Mapping[TopicPartition, OffsetRange]) -> Delivery[AnySink_co]:
        """The delivery of a batch. With a timer, its tasks neither read nor move positions."""
        if self._timer is None:
            return self.context.delivery
        self._timer.hand_out(ranges)
        starts = {tp: range_.start for tp, range_ in ranges.items()}
        return Delivery(self.context.sink, LocalPositions(starts), "records_first")

    def publish(
        self: OpenLedger[PublishesBatches], batch: Batch, *more: Callable[[], object]
    ) -> list[Outcome]:
        """Publish a batch; then count it, and do the housekeeping, with ``more``."""
        delivery = self.for_batch(batch.ranges)
        entries = partial(self.entries, delivery.ledger)
        replayed = path.publish(delivery, batch, self.fence, entries)
        counts = batch.history
        self.count(sum(counts.values(), NO_RECORDS))
        self.tidy(len(batch.ranges), *more)
        return [Outcome(tp, batch.ranges[tp], counts[tp], replayed) for tp in sorted(batch.ranges)]

    def tidy(self, added: int, *more: Callable[[], object]) -> None:
        """Housekeeping after a batch that has added so many rows to the history."""
        self._housekeeping.do(
            lambda: self.context.ledger.tidy(self.fence), added, self._note_rejects, *more
        )

    # -- rejects ---------------------------------------------------------------------------

    @property
    def budget(self) -> Budget:
        """The remaining reject budget after the batches so far."""
        counted = self._counted
        return replace(self.context.allowed, records=counted.records, rejects=counted.rejects)

    def count(self, done: Counts) -> None:
        """Count a batch, or the part of it that has taken effect."""
        self._counted = replace(
            self._counted,
            records=self._counted.records + done.records,
            rejects=self._counted.rejects + done.rejects,
        )

    def finish(self) -> None:
        """Called at the end without an error: note the records of batches without rejects, too."""
        if self._counted.rejects and self.budget.left(0, 0) is not None:
            try:
                self._note()
            except OncelyError as error:
                log.warning("the count of rejects is not noted: %s", error.message)

    def _note_rejects(self) -> None:
        """Note the count if there are more rejects, or a changed setting has restarted it."""
        noted, counted = self._noted, self._counted
        more = noted.rejects != counted.rejects and self.budget.left(0, 0) is not None
        if (more or noted.setting != counted.setting) and (noted.rejects or counted.rejects):
            self._note()

    def _note(self) -> None:
        if self._noted != self._counted:
            notes = Notes(counted=self._counted, noted=self._noted)
            self.context.ledger.note(self.fence, notes)
            self._noted = self._counted
