"""A run's takeover of the ledger, the ends that it is to reach, and what is compared with the logs
of its source.

Whenever a partition has a new leader, the source's log is checked: it must not be truncated. The
ledger keeps a leader epoch for each partition, no older than the record before the position.
The driver notes it before tasks commit a planned batch: every record of a planned range was in the
log when the epoch was requested, so none has a later epoch. While the epoch is the same the log was
not truncated, because a leader never truncates its own. If the epoch has changed, the broker is
queried for the end of the old epoch's records (KIP-320), and only then the new epoch is noted.

:func:`tell_ranges` and :func:`tell_batch` are the events of what was committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from oncely.commit.path import Outcome
from oncely.commit.run import OpenLedger
from oncely.core import events
from oncely.core.claim import NO_RECORDS, Fence, Opened, Takeover
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import DataLost, Fenced, SourceMismatch, Unavailable
from oncely.kafka.source import KafkaSource, Watermarks, refuse_cut
from oncely.kafka.start import Start
from oncely.kinds.base import Sink

Positions = Mapping[TopicPartition, Position]
Partitions = frozenset[TopicPartition]


@dataclass(frozen=True)
class Taken:
    """The result of a takeover.

    Attributes:
        fence: of the run.
        positions: of the partitions that were taken over and are in the topics.
        leader_epochs: those that the ledger knows.
        gone: positions of the ledger whose partitions are not in the topics now.
    """

    fence: Fence
    positions: Positions
    leader_epochs: Mapping[TopicPartition, int]
    gone: Positions = field(default_factory=dict)


@dataclass
class Takeovers:
    """Takes positions over for a run.

    Attributes:
        ledger: the ledger.
        source: the topics.
        name: the pipeline's name.
        start: the value of ``source.start``.
        on_gap: ``fail`` or ``record``.
        listener: called with events.
    """

    ledger: OpenLedger[Sink]
    source: KafkaSource
    name: str
    start: Start
    on_gap: str
    listener: events.Listener

    def __post_init__(self) -> None:
        self.same_log = SameLog(self.source, self.ledger)
        self.since: Fence | None = None  # of a run of some partitions; see Takeover
        self._held: int | None = None  # the last epoch; of all partitions also if a check failed

    def take(self, partitions: Partitions | None = None) -> Taken:
        """Take partitions over, and compare their positions with the source's logs. A run that
        takes all of them again does not take them from a newer run.

        Args:
            partitions: None: all, also those that are added later.

        Raises:
            SourceMismatch: a log ends before its position, or was cut before it.
            DataLost: records are gone and ``on_gap`` is ``fail``.
            The errors of ``Ledger.open``, and of the source.
        """
        marks = self.source.watermarks()
        opened = self.open({tp: mark.low for tp, mark in marks.items()}, partitions)
        asked = opened.positions.keys() if partitions is None else partitions
        positions = {tp: at for tp, at in opened.positions.items() if tp in marks and tp in asked}
        gaps = self._missing_before(positions, marks)
        self.same_log.forget()
        self.same_log.check(lambda: positions, passed=gaps)
        positions |= self._settled(gaps, 0 if partitions is None else opened.fence.epoch)
        gone = {tp: at for tp, at in opened.positions.items() if tp not in marks}
        self._held = opened.fence.epoch
        return Taken(opened.fence, positions, self.ledger.leader_epochs, gone)

    def open(self, earliest: Positions, partitions: Partitions | None) -> Opened:
        """Take over without a look at the logs. Raises the errors of ``Ledger.open``."""
        takeover = Takeover(
            self.source.identity(),
            lambda: self.source.resolve_start(self.start),
            earliest,
            self._held if partitions is None else None,
            partitions=partitions,
            since=self.since,
        )
        try:
            opened = self.ledger.open(takeover)
        except Fenced as error:
            if partitions is None or error.lost:
                raise
            raise Fenced(error.pipeline, max(self._held or 0, error.ours), error.theirs) from error
        if partitions is None:
            self._held = opened.fence.epoch
        self.listener(
            events.PipelineOpened(
                self.name, opened.fence.epoch, opened.positions, opened.first_start,
                partitions is None, opened.beyond, opened.begun,
            )
        )  # fmt: skip
        return opened

    def _missing_before(
        self, positions: Positions, marks: Mapping[TopicPartition, Watermarks]
    ) -> dict[TopicPartition, OffsetRange]:
        """The offsets that were deleted from the topic before they were read."""
        if any(at > marks[tp].high for tp, at in positions.items()):
            # The previous run has continued while this one waited for its locks.
            marks = self.source.watermarks()
        refuse_shorter(positions, marks)
        return {
            tp: OffsetRange(at, marks[tp].low) for tp, at in positions.items() if at < marks[tp].low
        }

    def _settled(self, gaps: Mapping[TopicPartition, OffsetRange], epoch: int) -> Positions:
        """Record lost ranges in the history, or refuse to continue; the positions after them."""
        for tp, missing in sorted(gaps.items()):
            self.listener(events.GapFound(tp, missing))
            if self.on_gap == "fail":
                raise DataLost(
                    f"{tp}: offsets {missing} were deleted from the topic before they were read",
                    way_out='source.on_gap = "record" continues and keeps the range in the history',
                )
        if gaps:
            tell_ranges(self.listener, self.ledger.record_gaps(gaps), epoch)
        return {tp: missing.end for tp, missing in gaps.items()}


def refuse_shorter(positions: Positions, marks: Mapping[TopicPartition, Watermarks]) -> None:
    """Refuse a log whose high watermark is before its position; the end for readers of committed
    records may be, if the position was set beyond an open transaction.

    Raises:
        SourceMismatch: a log ends before its position.
    """
    for tp, mark in sorted(marks.items()):
        if positions.get(tp, 0) > mark.high:
            raise SourceMismatch(
                f"{tp} ends at {mark.high}, and the ledger has read up to {positions[tp]}:"
                " the topic has gone back",
                way_out="restore the topic, or move the position with `oncely offsets reset`",
            )


class SameLog:
    """Compares leader epochs across batches.

    Args:
        log: the source.
        ledger: keeps the leader epochs.
    """

    def __init__(self, log: KafkaSource, ledger: OpenLedger[Sink]) -> None:
        self._log, self._ledger = log, ledger
        self._known: dict[TopicPartition, int] | None = None
        self._noted: dict[TopicPartition, int] | None = None

    def forget(self) -> None:
        """Read the ledger again: it was opened, or partitions were added."""
        self._known = self._noted = None

    def check(
        self,
        positions: Callable[[], Mapping[TopicPartition, Position]],
        now: Mapping[TopicPartition, int] | None = None,
        *,
        passed: Collection[TopicPartition] = (),
    ) -> None:
        """Refuse a log that was truncated before a position; called before tasks read.

        Args:
            positions: returns the ledger's positions; called only if a leader is new.
            now: the source's leader epochs.
            passed: the partitions whose log begins behind the position. The record before their
                next position was deleted and may have had any epoch up to the present one, so that
                is noted, and nothing is compared.

        Raises:
            SourceMismatch: records that were read are gone.
            Fenced: a newer run has opened.
            Unavailable: no answer.
        """
        now = self._log.leader_epochs() if now is None else now
        if now == self._known:
            return
        if self._noted is None:
            self._noted = dict(self._ledger.leader_epochs)
        noted = self._noted
        compared = {tp: epoch for tp, epoch in noted.items() if tp not in passed}
        changed = refuse_cut(self._log, now, positions(), compared)
        try:
            if changed:
                self._ledger.note_leader_epochs(changed)
        except Unavailable:
            # A position without an epoch is not compared. A position that moves under an older
            # epoch would be refused later, although its log is complete.
            if changed.keys() & noted.keys():
                raise
            return
        noted |= changed
        self._known = dict(now)


def tell_ranges(listener: events.Listener, outcomes: Iterable[Outcome], epoch: int = 0) -> None:
    """Tell each range that has taken effect; ``epoch`` as in the event."""
    for one in outcomes:
        done = one.counts
        listener(
            events.RangeCommitted(
                one.partition, one.range, done.records, done.rows, done.rejects, done.filtered,
                one.replayed, one.kind, epoch,
            )
        )  # fmt: skip


def tell_batch(
    listener: events.Listener,
    number: int,
    outcomes: Collection[Outcome],
    ends: Mapping[TopicPartition, Position],
    seconds: float,
    phases: Mapping[str, float],
    epoch: int = 0,
) -> None:
    """Tell a batch of which every range has taken effect, and the ranges before it.

    Args:
        listener: called with the events.
        number: of the batch.
        outcomes: its ranges.
        ends: the positions after it.
        seconds, phases, epoch: as in the event.
    """
    tell_ranges(listener, outcomes, epoch)
    done = sum((one.counts for one in outcomes), NO_RECORDS)
    listener(
        events.BatchCommitted(
            number, done.records, done.rows, done.rejects, seconds, ends, epoch, done.filtered,
            phases,
        )
    )  # fmt: skip


log = logging.getLogger(__name__)
_LOOK_SECONDS = 30.0  # a broker that has lost its leadership may answer for less than that


@dataclass
class EndOffsets:
    """The goal of a run until the latest records: the ends that the topics had at its start.

    Attributes:
        source: the topics.
        on_gap: ``fail`` or ``record``.
        ends: last stable offsets.
        clock: seconds.
    """

    source: KafkaSource
    on_gap: str
    ends: dict[TopicPartition, Position]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._look_at = self.clock() + _LOOK_SECONDS
        self._short: frozenset[TopicPartition] = frozenset()  # at the last look

    def look(self) -> None:
        """While there is nothing to read: a log that ends before the goal at two looks in a row was
        cut, and may never grow so far again. The run ends where the log ends now.

        High watermarks are compared: an open transaction is waited for.

        Raises:
            DataLost: a log was cut, and ``on_gap`` is ``fail``.
            The errors of the source.
        """
        if self.clock() < self._look_at:
            return
        self._look_at = self.clock() + _LOOK_SECONDS
        highs = {tp: mark.high for tp, mark in self.source.watermarks().items()}
        short = frozenset(tp for tp, high in highs.items() if high < self.ends.get(tp, 0))
        for tp in sorted(short & self._short):
            said = (
                f"{tp} ends at {highs[tp]}, and has ended at {self.ends[tp]} when the run began:"
                " its last records are gone from the topic, and were not read"
            )
            if self.on_gap == "fail":
                raise DataLost(
                    said,
                    way_out="start again to read what the topic has now; with source.on_gap ="
                    ' "record" a run goes on without them',
                )
            log.warning("%s", said)
            self.ends[tp] = highs[tp]
        self._short = short
