"""A ledger and a destination in memory, which check every commit that takes effect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from oncely.core.batch import Chunk
from oncely.core.claim import (
    NO_RECORDS,
    Claim,
    Counts,
    Entry,
    Fence,
    Finished,
    Notes,
    Opened,
    PositionMoved,
    Positions,
    Takeover,
    Trim,
    advance,
    decide_parts,
)
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition, normalize
from oncely.errors import Fenced, Unavailable
from simulate.broker import Topic
from simulate.schedule import Schedule, Violation, step

PIPELINE = "simulated"


@dataclass
class Store:
    """The shared state: one entry for each partition, and the records that have taken effect.

    Attributes:
        compares: the parts of an entry that a commit compares.
        together: rows and positions take effect at once.
        lanes: the number of threads that divide a partition by key; 0: its order is kept.
    """

    compares: ClassVar[tuple[str, ...]] = ("position", "epoch", "run")
    together: ClassVar[bool] = True

    schedule: Schedule
    topic: Topic
    entries: dict[TopicPartition, Entry] = field(default_factory=dict)
    effects: dict[TopicPartition, list[int]] = field(default_factory=dict)
    epoch: int = 0
    whole: Fence | None = None
    lanes: int = 0

    def __post_init__(self) -> None:
        for tp in self.topic.partitions:
            self.entries[tp] = Entry(0, 0)
            self.effects[tp] = []

    def take(self, partitions: frozenset[TopicPartition], run: str, *, whole: bool) -> Fence:
        """Give partitions a new epoch."""
        self.epoch += 1
        fence = Fence(PIPELINE, self.epoch, run, None if whole else partitions)
        for tp in partitions:
            self.entries[tp] = replace(self.entries[tp], epoch=self.epoch, run=run)
        if whole:
            self.whole = fence
        return fence

    def apply(self, claim: Claim, records: Mapping[TopicPartition, list[int]]) -> None:
        """Records and positions take effect.

        Raises:
            PositionMoved: a position differs from that of the decision.
            Violation: a record is lost, doubled, or out of order.
        """
        for tp in claim.ranges:
            now, then = self.entries[tp], claim.expected[tp]
            if any(getattr(now, part) != getattr(then, part) for part in self.compares):
                raise PositionMoved(str(tp))
            if not claim.fence.is_held(now):
                raise Violation(f"{tp}: {claim.fence.run} commits, and {now.run} holds it")
        if self.together:
            self.write(records)
        for tp, range_ in claim.ranges.items():
            missing = self.unread(claim, tp) - set(records.get(tp, []))
            if missing and self.together:
                raise Violation(f"{tp}: {sorted(missing)} of {range_} are lost")
            self.entries[tp] = moved(self.entries[tp], [range_])
        if not self.together:
            step()
            self.write(records)

    def unread(self, claim: Claim, tp: TopicPartition) -> set[int]:
        """The records that a claim of a range must have read."""
        return self.topic.within(tp, claim.ranges[tp])

    def finish(self, claim: Claim, records: Mapping[TopicPartition, list[int]]) -> None:
        """Records and finished ranges take effect. Raises the errors of :meth:`apply`."""
        for tp, parts in claim.parts.items():
            now = self.entries[tp]
            if not claim.fence.is_held(now) or self.refuses(now, parts, claim.fence.epoch):
                raise PositionMoved(str(tp))
        self.write(records)
        for tp, parts in claim.parts.items():
            missing = {at for one in parts for at in self.topic.within(tp, one)}
            if missing ^ set(records.get(tp, [])):
                raise Violation(f"{tp}: {sorted(missing)} of {parts} are lost")
            self.entries[tp] = moved(self.entries[tp], parts)

    @staticmethod
    def refuses(now: Entry, parts: tuple[OffsetRange, ...], epoch: int) -> bool:
        """True if a part has taken effect."""
        return decide_parts(now, parts, epoch) != Trim(parts)

    def write(self, records: Mapping[TopicPartition, list[int]]) -> None:
        """Records take effect."""
        for tp, offsets in records.items():
            done = self.effects[tp]
            for offset in offsets:
                before = done
                if self.lanes:
                    before = [one for one in done if key_of(one) == key_of(offset)]
                if before and offset <= before[-1]:
                    raise Violation(f"{tp}: offset {offset} takes effect after {before[-1]}")
                done.append(offset)


def moved(entry: Entry, taken: Iterable[OffsetRange]) -> Entry:
    """The entry after ranges have taken effect."""
    position, done = advance(entry, taken), (*entry.done, *taken)
    left = [one for each in done for one in each.minus([OffsetRange(0, position)])]
    return replace(entry, position=position, done=normalize(left))


def key_of(offset: int) -> bytes:
    """The key of a record."""
    return b"%d" % (offset * 7 % 5)


@dataclass
class MemoryLedger:
    """The ledger's port, as one process sees it.

    Attributes:
        run: the name of the process.
        assigned: the partitions that were assigned to it.
    """

    store: Store
    run: str
    assigned: set[TopicPartition]

    one_store = True

    def open(self, takeover: Takeover) -> Opened:
        """Take partitions over; the answer may be lost."""
        store, wanted = self.store, takeover.partitions or frozenset()
        store.schedule.may_fail("open")
        whole = store.whole or Fence(PIPELINE, 0)
        if takeover.since is not None and takeover.since != whole:
            raise Fenced(PIPELINE, 0, store.epoch)
        if foreign := wanted - self.assigned:
            raise Violation(f"{self.run} takes {sorted(foreign)} over, which it was not assigned")
        if wanted:
            fence = store.take(wanted, self.run, whole=False)
        else:
            fence = Fence(PIPELINE, store.epoch, self.run, wanted)
        store.schedule.may_fail("open")
        positions = {tp: entry.position for tp, entry in store.entries.items()}
        beyond = {tp: store.entries[tp].done for tp in wanted}
        return Opened(fence, positions, False, whole=whole, beyond=beyond)

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """Every entry."""
        step()
        self.store.schedule.may_fail("positions")
        return dict(self.store.entries)

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Move positions over holes."""
        self.commit(claim, {})

    def commit(self, claim: Claim, records: Mapping[TopicPartition, list[int]]) -> None:
        """One transaction; it may fail before or after it has taken effect."""
        step()
        self.store.schedule.may_fail("commit")
        self.store.apply(claim, records)
        self.store.schedule.may_fail("commit")

    def finish(self, claim: Claim, records: Mapping[TopicPartition, list[int]]) -> None:
        """One transaction of a thread."""
        step()
        self.store.schedule.may_fail("commit")
        self.store.finish(claim, records)
        self.store.schedule.may_fail("commit")

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Not used by workers."""
        raise Violation("a worker adds partitions")

    def note(self, fence: Fence, notes: Notes) -> None:
        """Nothing is kept."""
        self.store.schedule.may_fail("note")

    def tidy(self, fence: Fence) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class MemorySink:
    """The sink's port, as one process sees it."""

    ledger: MemoryLedger

    needs = frozenset[str]()

    def bind(self) -> MemorySink:
        """Nothing to inspect."""
        return self

    def prepare(self) -> None:
        """Nothing to create."""

    def open(self, takeover: Takeover) -> Opened:
        """Take over the ledger."""
        return self.ledger.open(takeover)

    def close(self) -> None:
        """Nothing to close."""

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> dict[TopicPartition, Counts]:
        """Commit the records of a chunk."""
        if claim is None:
            raise Unavailable("only exactly once")
        self.ledger.commit(claim, _records(chunk))
        return dict.fromkeys(claim.ranges, NO_RECORDS)

    @property
    def threads(self) -> Mapping[str, int]:
        """The threads that divide a partition."""
        lanes = self.ledger.store.lanes
        return {tp.topic: lanes for tp in self.ledger.store.topic.partitions} if lanes else {}

    def finish(
        self, chunk: Chunk, fence: Fence, claim: Claim, max_rejects: int | None = None
    ) -> dict[TopicPartition, list[Finished]]:
        """Commit the records of a thread."""
        self.ledger.finish(claim, _records(chunk))
        return {tp: [Finished(one, NO_RECORDS, "ahead") for one in parts]
                for tp, parts in claim.parts.items()}  # fmt: skip


def _records(chunk: Chunk) -> dict[TopicPartition, list[int]]:
    records: dict[TopicPartition, list[int]] = {}
    for partition, offset in zip(chunk.partition, chunk.offset, strict=True):
        if partition >= 0:
            records.setdefault(chunk.partitions[partition], []).append(int(offset))
    return records
