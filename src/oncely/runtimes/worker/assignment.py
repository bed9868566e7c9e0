"""The partitions of a member, each in one of four stages, and the filters that make their records
wait. Pure: no I/O, no clock, no threads, no sleep.

    (absent) --assigned--> TAKING --taken--> OWNED --revoked--> (absent)
                             ^                 | fenced
                             +--- still ours - ASKING <-- not ours --> LEFT

TAKING: the group has assigned the partition, and the ledger has not given a fence yet. OWNED: its
records are buffered and committed under that fence. ASKING: another process has taken it over; the
group is asked whether it is still assigned to this member (docs/decisions/0036). LEFT: it is not,
and the group's message about that is awaited; the group is asked again from time to time, because
it describes no assignments during a rebalance, and an assignment that a rebalance has not changed
is not told again.

Only an owned partition accepts records and gives them out. Every other transition drops what was
buffered: it is read again from the ledger's position, by whoever takes the partition over next.

A partition whose next record must wait, for a delay or a throttle, is paused, and read again from
that record on when its time has come. Its order is kept, nothing is held in memory, and other
partitions go on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oncely.core.claim import Fence
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import check
from oncely.kafka.inbox import memory_of
from oncely.kafka.records import Records, offsets_of

# Holes of a partition that are remembered. A record before the oldest of so many could be one that
# the client had skipped, and is not told from one that comes again: it is an error, and the process
# that is started next reads from the ledger's position on.
_HOLES = 1_000


class PartitionState(Enum):
    """The stage of an assigned partition."""

    TAKING = "taking"
    OWNED = "owned"
    ASKING = "asking"
    LEFT = "left"


@dataclass(frozen=True)
class BufferLimits:
    """The bounds of memory, and of a commit. Bytes are those in memory.

    Attributes:
        records, bytes: of a commit. It contains whole pieces, and exceeds the bytes by one at most.
        buffered_records: of a partition's buffer.
        buffered_bytes: of all buffers; each partition has an equal share.

    When a bound is reached, the partition, or all of them, are paused until half of it is left.
    """

    records: int = 100_000
    bytes: int = 32 << 20
    buffered_records: int = 100_000
    buffered_bytes: int = 128 << 20


@dataclass(frozen=True)
class Fetched:
    """Consecutive records of a partition.

    Attributes:
        first, last: the offsets of the first and the last one.
        records: their number.
        bytes: their size in memory.
        payload: the records.
        leader_epoch: that of the last one; -1 if it is unknown.
        holes: offsets between them that the log has no records for.
    """

    first: int
    last: int
    records: int
    bytes: int
    payload: Any = None
    leader_epoch: int = -1
    holes: tuple[OffsetRange, ...] = ()

    @classmethod
    def of(cls, records: Records) -> Fetched:
        """Records of the consumer, with ascending offsets."""
        offsets, epoch = offsets_of(records), records[-1].leader_epoch()
        first, last = int(offsets[0]), int(offsets[-1])
        holes: tuple[OffsetRange, ...] = ()
        if last - first + 1 > len(records):
            before = np.flatnonzero(np.diff(offsets) > 1)
            pairs = zip(offsets[before].tolist(), offsets[before + 1].tolist(), strict=True)
            holes = tuple(OffsetRange(a + 1, b) for a, b in pairs)
        size, epoch = memory_of(records), -1 if epoch is None else epoch
        return cls(first, last, len(records), size, records, epoch, holes)


@dataclass(frozen=True)
class PendingCommit:
    """What is committed next, under one fence.

    Attributes:
        fence: the fence of all of its partitions.
        ranges: from each partition's position to the offset after its last record.
        pieces: the records, ascending.
        leader_epochs: those that the ledger must know before the commit.
    """

    fence: Fence
    ranges: Mapping[TopicPartition, OffsetRange]
    pieces: Mapping[TopicPartition, tuple[Fetched, ...]]
    leader_epochs: Mapping[TopicPartition, int]


class _Buffer:
    """Pieces in order, and their sums, which are asked for in each round."""

    def __init__(self) -> None:
        self._pieces: deque[Fetched] = deque()
        self.records = self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def append(self, piece: Fetched) -> None:
        """Add a piece after the others."""
        self._pieces.append(piece)
        self._count(piece, 1)

    def first(self) -> Fetched:
        """The first piece."""
        return self._pieces[0]

    def pop(self) -> Fetched:
        """Remove the first piece."""
        piece = self._pieces.popleft()
        self._count(piece, -1)
        return piece

    def put_back(self, pieces: Sequence[Fetched]) -> None:
        """Add pieces before the others."""
        self._pieces.extendleft(reversed(pieces))
        for piece in pieces:
            self._count(piece, 1)

    def _count(self, piece: Fetched, sign: int) -> None:
        self.records += sign * piece.records
        self.bytes += sign * piece.bytes


@dataclass
class _Partition:
    stage: PartitionState = PartitionState.TAKING
    fence: Fence | None = None
    position: Position = 0  # of the ledger, after the commits that have ended
    given: Position = 0  # the end of what was given out
    next: Position = 0  # the offset after the last buffered record
    end: Position = 0  # a last stable offset that was reached
    leader_epoch: int = -1  # that the ledger knows
    buffer: _Buffer = field(default_factory=_Buffer)
    # The last ones before `next`. A record in one of them was skipped.
    holes: deque[OffsetRange] = field(default_factory=lambda: deque(maxlen=_HOLES))
    full: bool = False  # until half of the buffer is left

    def drop(self, stage: PartitionState) -> int:
        dropped = self.buffer.records
        self.stage, self.fence, self.buffer = stage, None, _Buffer()
        return dropped


class Assignment:
    """The partitions of one member."""

    def __init__(self, limits: BufferLimits | None = None) -> None:
        self._limits = limits or BufferLimits()
        self._all: dict[TopicPartition, _Partition] = {}
        self._turn = 0
        self._full = False  # all buffers together

    # -- the group -------------------------------------------------------------------------

    def assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """The group has assigned partitions; also one that it had assigned before."""
        for tp in partitions:
            self._all[tp] = _Partition()

    def revoked(self, partitions: Iterable[TopicPartition]) -> int:
        """The group takes partitions away; returns the number of dropped records."""
        gone = [self._all.pop(tp) for tp in partitions if tp in self._all]
        return sum(one.buffer.records for one in gone)

    def answered(self, ours: Collection[TopicPartition]) -> None:
        """The group has said which partitions are assigned to this member."""
        for tp in self.staged(PartitionState.ASKING) | self.staged(PartitionState.LEFT):
            self._all[tp].stage = PartitionState.TAKING if tp in ours else PartitionState.LEFT

    # -- the ledger ------------------------------------------------------------------------

    def taken(
        self,
        fence: Fence,
        positions: Mapping[TopicPartition, Position],
        leader_epochs: Mapping[TopicPartition, int],
    ) -> None:
        """The ledger has given a fence; its partitions are read from these positions on."""
        for tp, at in positions.items():
            if tp in self._all:
                known = leader_epochs.get(tp, -1)
                self._all[tp] = _Partition(PartitionState.OWNED, fence, at, at, at, at, known)

    def lost(self, partitions: Iterable[TopicPartition], *, ask: bool) -> int:
        """A takeover or commit has failed; ``ask``: because another process has taken over.

        Returns the number of dropped records.
        """
        stage = PartitionState.ASKING if ask else PartitionState.TAKING
        return sum(self._all[tp].drop(stage) for tp in partitions if tp in self._all)

    def of(self, fence: Fence) -> frozenset[TopicPartition]:
        """The partitions that are owned under a fence."""
        return frozenset(tp for tp, one in self._all.items() if one.fence == fence)

    def committed(self, fence: Fence, ends: Mapping[TopicPartition, Position]) -> None:
        """A commit has ended; positions of a fence that is no longer ours are ignored."""
        for tp in self.of(fence) & ends.keys():
            one = self._all[tp]
            one.position = max(one.position, ends[tp])

    # -- records ---------------------------------------------------------------------------

    def again(self, tp: TopicPartition, offsets: npt.ArrayLike) -> frozenset[int]:
        """The indices of the offsets that come again: they were taken before, or are before the
        position of the takeover. The client may return records twice when an assignment changes.

        Raises:
            InvariantViolation: one comes for the first time, after later ones. The client had
                skipped it, so that it was taken for a hole. Also if the holes are forgotten.
        """
        one = self._all.get(tp)
        if one is None or one.stage is not PartitionState.OWNED:
            return frozenset()
        given = np.asarray(offsets)
        if given[0] >= one.next and bool((np.diff(given) > 0).all()):
            return frozenset()
        came: list[int] = given.tolist()
        next_, found = one.next, set()
        forgotten = one.holes[0].start if len(one.holes) == _HOLES else 0
        for index, offset in enumerate(came):
            if offset >= next_:
                next_ = offset + 1
                continue
            skipped = any(offset in hole for hole in one.holes) or offset < forgotten
            taken = offset in came[:index] if offset >= one.next else not skipped
            check(taken, f"{tp}: offset {offset} came after {next_ - 1}")
            found.add(index)
        return frozenset(found)

    def fetched(self, tp: TopicPartition, piece: Fetched) -> bool:
        """Buffer records; False if they are not of an owned partition, and are dropped."""
        one = self._all.get(tp)
        if one is None or one.stage is not PartitionState.OWNED:
            return False
        check(piece.first >= one.next, f"{tp}: offset {piece.first} came after {one.next - 1}")
        one.buffer.append(piece)
        if piece.first > one.next:
            one.holes.append(OffsetRange(one.next, piece.first))
        one.holes.extend(piece.holes)
        one.next = piece.last + 1
        return True

    def ended(self, tp: TopicPartition, end: Position) -> None:
        """All records before a last stable offset were fetched."""
        one = self._all.get(tp)
        if one is not None and one.stage is PartitionState.OWNED:
            one.end = max(one.end, end)

    def work(self, at_least: int = 1) -> PendingCommit | None:
        """The records to commit next, of the fences in turn; None if no fence has so many."""
        buffered: Counter[Fence] = Counter()
        for one in self._all.values():
            if one.fence is not None:
                buffered[one.fence] += one.buffer.records
        enough = [fence for fence, records in buffered.items() if records >= max(1, at_least)]
        fences = sorted(enough, key=lambda fence: fence.epoch)
        if not fences:
            return None
        self._turn += 1
        fence = fences[self._turn % len(fences)]
        pieces: dict[TopicPartition, tuple[Fetched, ...]] = {}
        records = size = 0
        full = [tp for tp in sorted(self.of(fence)) if self._all[tp].buffer]
        for tp in full[self._turn % len(full) :] + full[: self._turn % len(full)]:
            taken: list[Fetched] = []
            one = self._all[tp]
            while one.buffer and size < self._limits.bytes:
                if records and records + one.buffer.first().records > self._limits.records:
                    break
                taken.append(one.buffer.pop())
                records, size = records + taken[-1].records, size + taken[-1].bytes
            if taken:
                pieces[tp] = tuple(taken)
        return self._given_out(fence, pieces)

    def _given_out(
        self, fence: Fence, pieces: Mapping[TopicPartition, tuple[Fetched, ...]]
    ) -> PendingCommit:
        ranges, epochs = {}, {}
        for tp, taken in pieces.items():
            one = self._all[tp]
            ranges[tp] = OffsetRange(one.given, taken[-1].last + 1)
            one.given = ranges[tp].end
            if taken[-1].leader_epoch > one.leader_epoch:
                epochs[tp] = one.leader_epoch = taken[-1].leader_epoch
        return PendingCommit(fence, ranges, pieces, epochs)

    def put_back(self, work: PendingCommit) -> None:
        """Work that was given out is not done; what is still owned under its fence is buffered
        again, before the rest."""
        for tp in self.of(work.fence) & work.ranges.keys():
            one = self._all[tp]
            one.buffer.put_back(work.pieces[tp])
            one.given, one.leader_epoch = work.ranges[tp].start, -1  # noted again

    def holes(self) -> tuple[Fence, dict[TopicPartition, OffsetRange]] | None:
        """Ranges without records at the ends of logs, under one fence; while nothing is given out
        or buffered of their partitions."""
        found: dict[TopicPartition, OffsetRange] = {}
        fence: Fence | None = None
        for tp, one in sorted(self._all.items()):
            idle = (
                one.stage is PartitionState.OWNED and not one.buffer and one.position == one.given
            )
            if idle and one.end > one.position and fence in (None, one.fence):
                fence = one.fence
                found[tp] = OffsetRange(one.position, one.end)
        return (fence, found) if fence is not None else None

    def pass_over(self, holes: Mapping[TopicPartition, OffsetRange]) -> None:
        """Holes are being committed."""
        for tp, hole in holes.items():
            self._all[tp].given = hole.end

    def restart(self) -> dict[TopicPartition, Position]:
        """Owned partitions drop what is buffered; returns where those that had some go on.

        Neither do they know the ends of their logs any more: what was dropped is before these.
        """
        found = {}
        for tp, one in self._all.items():
            if one.buffer:
                one.buffer, one.next, one.end = _Buffer(), one.given, one.given
                found[tp] = one.given
        return found

    # -- flow ------------------------------------------------------------------------------

    def paused(self) -> set[TopicPartition]:
        """The partitions of which nothing is to be fetched now."""
        limits, shares = self._limits, max(1, len(self._all))
        for one in self._all.values():
            one.full = self._is_full(one.buffer, limits.buffered_bytes // shares, one.full)
        size = sum(one.buffer.bytes for one in self._all.values())
        self._full = size * (2 if self._full else 1) >= limits.buffered_bytes
        return {
            tp for tp, one in self._all.items()
            if self._full or one.full or one.stage is not PartitionState.OWNED
        }  # fmt: skip

    def _is_full(self, buffer: _Buffer, share: int, was: bool) -> bool:
        half = 2 if was else 1
        records = buffer.records * half >= self._limits.buffered_records
        return records or buffer.bytes * half >= share

    # -- questions -------------------------------------------------------------------------

    def staged(self, stage: PartitionState) -> frozenset[TopicPartition]:
        """The partitions in a stage."""
        return frozenset(tp for tp, one in self._all.items() if one.stage is stage)

    @property
    def fences(self) -> frozenset[Fence]:
        """The fences under which partitions are owned."""
        return frozenset(one.fence for one in self._all.values() if one.fence is not None)

    @property
    def positions(self) -> dict[TopicPartition, Position]:
        """The ledger's positions of the owned partitions."""
        return {tp: o.position for tp, o in self._all.items() if o.stage is PartitionState.OWNED}

    @property
    def in_memory(self) -> frozenset[TopicPartition]:
        """The partitions with records that were fetched and are not committed."""
        return frozenset(
            tp for tp, one in self._all.items() if one.buffer or one.given > one.position
        )

    @property
    def buffered(self) -> int:
        """The number of records in memory that were not given out."""
        return sum(one.buffer.records for one in self._all.values())


# -- filters --------------------------------------------------------------------------------


class Admitted(NamedTuple):
    """The records that need not wait.

    Attributes:
        number: of the first ones.
        wait_ms: the time after which the next one may follow; 0 if all are admitted.
        ahead_ms: how far the timestamp of that one is in the future, when its wait begins.
    """

    number: int
    wait_ms: int = 0
    ahead_ms: int = 0


@dataclass(frozen=True)
class Delay:
    """The settings of the filters; None: there is no such filter.

    Attributes:
        delay_ms: the age that a record must have.
        rate: the records of a partition in a number of milliseconds.
    """

    delay_ms: int | None = None
    rate: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return self.delay_ms is not None or self.rate is not None


@dataclass
class _Window:
    began: int
    used: int = 0


@dataclass
class Throttle:
    """The state of the filters of each partition.

    A partition's window of the throttle begins with the first record after the last window's end.

    The age of a record from the future is not known. The first one waits for the delay from when it
    is seen, and those that come behind it within the same time again do not wait: no record waits
    longer than the delay.
    """

    waits: Delay = field(default_factory=Delay)
    _windows: dict[TopicPartition, _Window] = field(default_factory=dict)
    _ahead: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    """When the first record from the future was seen, and its timestamp."""

    def admit(self, tp: TopicPartition, timestamps: Sequence[int | None], now: int) -> Admitted:
        """How many of these records need not wait.

        Args:
            tp: their partition.
            timestamps: of consecutive records, in ms since 1970; None: the record has none.
            now: the present, in the same form.
        """
        old = self._old_enough(tp, timestamps, now)
        count, wait, _ = old
        if self.waits.rate is None or not count:
            return old
        most, length = self.waits.rate
        window = self._windows.get(tp)
        if window is None or not window.began <= now < window.began + length:
            window = self._windows[tp] = _Window(now)
        admitted = min(count, most - window.used)
        window.used += admitted
        if admitted < count:
            wait = max(1, window.began + length - now)
        return Admitted(admitted, wait)

    def _old_enough(
        self, tp: TopicPartition, timestamps: Sequence[int | None], now: int
    ) -> Admitted:
        delay = self.waits.delay_ms
        if delay is None:
            return Admitted(len(timestamps))
        for count, at in enumerate(timestamps):
            if at is None:
                continue
            seen, first = self._ahead.get(tp, (now + 1, -1))
            if at > now and not seen <= now < seen + 2 * delay:
                self._ahead[tp] = now, at
                return Admitted(count, delay, at - now)
            since = seen if at > now or at == first else at
            if since + delay > now:
                return Admitted(count, since + delay - now)
        return Admitted(len(timestamps))
