"""A run's takeover of the ledger, and what is compared with the logs of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oncely.commit.run import OpenRun
from oncely.core import events
from oncely.core.claim import Fence, Opened, Takeover
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import DataLost, SourceMismatch
from oncely.runtimes.same_log import SameLog
from oncely.runtimes.told import tell_ranges
from oncely.sources.kafka import KafkaSource, Watermarks
from oncely.sources.start import Start

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
        run: has the ledger.
        source: the topics.
        name: the pipeline's name.
        start: the value of ``source.start``.
        on_gap: ``fail`` or ``record``.
        listener: called with events.
    """

    run: OpenRun[Any, Any]
    source: KafkaSource
    name: str
    start: Start
    on_gap: str
    listener: events.Listener

    def __post_init__(self) -> None:
        self.same_log = SameLog(self.source, self.run)
        self._held: int | None = None  # the last epoch of all partitions, also if a check failed

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
        return Taken(opened.fence, positions, self.run.leader_epochs(), gone)

    def open(self, earliest: Positions, partitions: Partitions | None) -> Opened:
        """Take over without a look at the logs. Raises the errors of ``Ledger.open``."""
        opened = self.run.open(
            Takeover(
                self.source.identity(),
                lambda: self.source.resolve_start(self.start),
                earliest,
                self._held if partitions is None else None,
                partitions=partitions,
            )
        )
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
            tell_ranges(self.listener, self.run.record_gaps(gaps), epoch)
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
