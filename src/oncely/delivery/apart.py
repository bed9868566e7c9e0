"""A sink whose records and positions are written one after the other.

It is a sink like any other to the runtimes: they read a range, ask what has been committed,
decide, commit. Only what "commit" does differs, and with it what a crash in its middle shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self, cast

import pyarrow as pa

from oncely.core.ledger import Entry
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.delivery.positions import LedgerPositions, Positions
from oncely.errors import Unavailable
from oncely.sinks.base import (
    BudgetSpent,
    Chunk,
    Fence,
    Halves,
    Opened,
    Publication,
    RangeKind,
    RangeSink,
    RejectCount,
    Reset,
    Sink,
    Staged,
    StagingTask,
    Written,
)

log = logging.getLogger(__name__)


@dataclass
class Apart:
    """Records and positions in two steps.

    Attributes:
        records: writes rows and rejects.
        positions: where positions live.
        position_first: at most once; otherwise at least once.
    """

    records: Halves
    positions: Positions
    position_first: bool

    @property
    def needs(self) -> frozenset[str]:
        """What is read beside what the decoder reads."""
        return self.records.needs

    @property
    def one_store(self) -> bool:
        """Records and positions are written apart."""
        return False

    @property
    def timed(self) -> bool:
        """Positions follow, or lead, the records."""
        return False

    def in_hand(self, ranges: Mapping[TopicPartition, OffsetRange]) -> Sink:
        """The same for every batch; the records' sink may have to know that one begins."""
        self.records = self.records.in_hand(ranges)
        return self

    def bind(self) -> Self:
        """Look at the destination as it is now."""
        self.records = self.records.bind()
        if isinstance(self.positions, LedgerPositions):
            self.positions = LedgerPositions(self.records)
        return self

    def open(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None = None,
    ) -> Opened:
        """Make the destination ready, and take the next epoch where positions live."""
        if not isinstance(self.positions, LedgerPositions):
            self.records.prepare()
        return self.positions.open(source, start, earliest, expected)

    def reset(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        positions: Reset,
    ) -> Opened:
        """Take the next epoch, and put positions elsewhere."""
        return self.positions.reset(source, start, earliest, positions)

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity, fence: Fence
    ) -> None:
        """Give new partitions their position."""
        self.positions.add_partitions(positions, source, fence)

    def leader_epochs(self, fence: Fence) -> Mapping[TopicPartition, int]:
        """Noted where positions live."""
        return self.positions.leader_epochs(fence)

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int], fence: Fence) -> None:
        """Note them where positions live."""
        self.positions.note_leader_epochs(epochs, fence)

    def note_rejects(self, count: RejectCount, fence: Fence) -> None:
        """Note them where positions live."""
        self.positions.note_rejects(count, fence)

    def tidy(self, fence: Fence) -> None:
        """Housekeeping where positions live."""
        self.positions.tidy(fence)

    def close(self) -> None:
        """End the connections; the next call makes new ones."""
        self.records.close()
        self.positions.close()

    def entries(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """Every position, read now."""
        return self.positions.entries(fence)

    def committed(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """Every position, as it stands for certain."""
        return self.positions.committed(fence)

    def commit(
        self,
        chunk: Chunk,
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        max_rejects: int | None = None,
        kind: RangeKind = "data",
    ) -> dict[TopicPartition, Written]:
        """The two steps for a chunk; see the port."""
        written = dict.fromkeys(chunk.ranges, Written(0, 0, 0, 0))
        if kind != "data":
            self.positions.move(chunk.ranges, entries, fence, written, kind)
            return written
        if not self.position_first:
            written = self.records.write(chunk, fence, max_rejects)
            self.positions.move(chunk.ranges, entries, fence, written, kind)
            return written
        _spend(chunk, max_rejects)  # before the position: a mistake in decode should lose nothing
        self._move_first(chunk.ranges, entries, fence, written)
        try:
            return self.records.write(chunk, fence, max_rejects)
        except Unavailable as error:
            _tell_lost(chunk.ranges, error)
            return dict.fromkeys(chunk.ranges, Written(0, 0, 0, 0))

    def staging(self, fence: Fence, batch_id: int, attempt: int) -> StagingTask:
        """Begin a task's staging, of a sink whose tasks stage ranges."""
        return cast(RangeSink, self.records).staging(fence, batch_id, attempt)

    def agree(self, staged: Staged) -> bool:
        """Settle what each task could only guess, of such a sink."""
        return cast(RangeSink, self.records).agree(staged)

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Keep a task's rows where nobody reads them yet."""
        return self.records.stage(fence, batch_id, attempt, rows)

    def publish(
        self, what: Publication, entries: Mapping[TopicPartition, Entry], fence: Fence
    ) -> None:
        """The two steps for a micro-batch; see the port."""
        data = {tp: range_ for tp, range_ in what.ranges.items() if not range_.is_empty}
        if not self.position_first:
            self.records.write_staged(what, fence)
            self.positions.move(data, entries, fence, what.written, "data")
            return
        self._move_first(data, entries, fence, what.written)
        try:
            self.records.write_staged(what, fence)
        except Unavailable as error:
            _tell_lost(data, error)

    def _move_first(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        written: Mapping[TopicPartition, Written],
    ) -> None:
        """Move positions ahead of their records.

        Raises:
            Unavailable: nobody knows whether they were moved. Whoever asks again and finds them
                moved takes the records for written, so it is told here.
        """
        try:
            self.positions.move(ranges, entries, fence, written, "data")
        except Unavailable as error:
            _tell_unknown(ranges, error)
            raise

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> int:
        """Remove what was staged and will not be published."""
        return self.records.sweep(fence, keep_batches_from)


def _spend(chunk: Chunk, limit: int | None) -> None:
    if limit is not None and len(chunk.rejections) > limit:
        raise BudgetSpent(chunk.rejections, "decode or transform")


def _tell_lost(ranges: Mapping[TopicPartition, OffsetRange], error: Unavailable) -> None:
    """At most once means that nobody tries again; it does not mean that nobody tells."""
    log.warning(
        "at most once: some or all records of %s are lost: %s", _named(ranges), error.message
    )


def _tell_unknown(ranges: Mapping[TopicPartition, OffsetRange], error: Unavailable) -> None:
    log.warning(
        "at most once: the records of %s are lost if their position was moved, which nobody"
        " knows: %s",
        _named(ranges),
        error.message,
    )


def _named(ranges: Mapping[TopicPartition, OffsetRange]) -> str:
    return ", ".join(f"{tp} {range_}" for tp, range_ in sorted(ranges.items()))
