"""The ledger of runs in batches, in memory: takeovers of all partitions, gaps, leader epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from oncely.core.claim import Claim, Entry, Fence, Notes, Opened, Positions, Takeover
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.errors import Fenced
from simulate.logs import Logs
from simulate.schedule import Violation, step
from simulate.store import PIPELINE, MemoryLedger, Store


@dataclass
class BatchStore(Store):
    """The shared state, with positions that begin at the first takeover.

    Attributes:
        logs: the topics.
        begun: where a partition begins.
        gaps: ranges that were recorded as gaps.
        noted: the leader epochs of the ledger.
        opened: the runs that know that they have opened.
        sure: the partitions whose epoch is known to the run that holds them.
        seen: the number of cuts at the look of each run's last plan.
        cut: positions beyond a cut of their log, and where it was cut.
    """

    begun: dict[TopicPartition, int] = field(default_factory=dict)
    gaps: dict[TopicPartition, list[OffsetRange]] = field(default_factory=dict)
    noted: dict[TopicPartition, int] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    sure: set[TopicPartition] = field(default_factory=set)
    seen: dict[str, int] = field(default_factory=dict)
    cut: dict[TopicPartition, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """No position yet."""

    @property
    def logs(self) -> Logs:
        """The topics."""
        assert isinstance(self.topic, Logs)
        return self.topic

    def holds(self, run: str) -> bool:
        """True if no newer run has opened."""
        return self.whole is not None and self.whole.run == run

    def add(self, positions: Positions) -> None:
        """Positions of partitions that have none."""
        for tp, at in positions.items():
            if tp not in self.entries:
                if at > self.logs.low[tp]:
                    raise Violation(f"{tp} begins at {at}, its log at {self.logs.low[tp]}")
                self.entries[tp] = Entry(at, 0)
                self.effects[tp], self.gaps[tp], self.begun[tp] = [], [], at

    def unread(self, claim: Claim, tp: TopicPartition) -> set[int]:
        """A gap may have records, all of which were deleted."""
        range_ = claim.ranges[tp]
        if claim.kind != "gap":
            # What was read of a log that is cut meanwhile is compared before the next batch.
            cut = [at for one, at in self.logs.cuts[self.seen[claim.fence.run] :] if one == tp]
            for at in cut:
                self.beyond(tp, range_.end, at)
            return {one for one in super().unread(claim, tp) if one < min(cut, default=one + 1)}
        if range_.end > self.logs.low[tp]:
            raise Violation(f"{tp}: {range_} is taken for a gap, the log has {self.logs.low[tp]}")
        self.gaps[tp].append(range_)
        return set()

    def beyond(self, tp: TopicPartition, position: int, at: int) -> None:
        """A log was cut before a position; a run notices that if it knows the leader epoch."""
        if position > at and tp in self.sure:
            self.cut[tp] = min(at, self.cut.get(tp, at))

    def cuts(self) -> dict[TopicPartition, int]:
        """The least cut before each position, noticed or not."""
        found: dict[TopicPartition, int] = {}
        for tp, at in self.logs.cuts:
            if tp in self.entries and self.entries[tp].position > at:
                found[tp] = min(at, found.get(tp, at))
        return found

    def reset(self) -> None:
        """An operator moves positions back to where logs were cut; the rows from there on are
        removed."""
        self.take(frozenset(self.entries), "an operator", whole=True)
        for tp, at in self.cuts().items():
            self.entries[tp] = replace(self.entries[tp], position=at)
            self.effects[tp] = [one for one in self.effects[tp] if one < at]
            before = [one for one in self.gaps[tp] if one.start < at]
            self.gaps[tp] = [replace(one, end=min(one.end, at)) for one in before]
            self.begun[tp] = min(self.begun[tp], at)
            self.noted.pop(tp, None)
            self.sure.discard(tp)
            self.cut.pop(tp, None)


@dataclass
class BatchLedger(MemoryLedger):
    """The ledger's port, as one driver and its tasks see it."""

    store: BatchStore

    def open(self, takeover: Takeover) -> Opened:
        """Take all partitions over; the answer may be lost."""
        step()
        store = self.store
        store.schedule.may_fail("open")
        if not store.holds(self.run):
            if takeover.expected is not None:
                raise Fenced(PIPELINE, takeover.expected, store.epoch)
            if self.run in store.opened:
                raise Violation(f"{self.run} takes the ledger back from a newer run")
        first = not store.entries
        store.add(takeover.start() if first else takeover.earliest)
        fence = store.take(frozenset(store.entries), self.run, whole=True)
        store.schedule.may_fail("open")
        store.opened.add(self.run)
        store.sure = set(store.noted)
        positions = {tp: entry.position for tp, entry in store.entries.items()}
        return Opened(fence, positions, first, leader_epochs=dict(store.noted), whole=fence)

    def commit(self, claim: Claim, records: Mapping[TopicPartition, list[int]]) -> None:
        """One transaction; the process may also end after it has taken effect."""
        super().commit(claim, records)
        step()

    @contextmanager
    def _held(self, what: str, fence: Fence) -> Iterator[None]:
        step()
        self.store.schedule.may_fail(what)
        if self.store.whole != fence:
            raise Fenced(PIPELINE, fence.epoch, self.store.epoch)
        yield
        self.store.schedule.may_fail(what)

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Add positions with the run's epoch."""
        with self._held("add partitions", fence):
            new = positions.keys() - self.store.entries.keys()
            self.store.add(positions)
            for tp in new:
                entry = self.store.entries[tp]
                self.store.entries[tp] = replace(entry, epoch=fence.epoch, run=fence.run)

    def note(self, fence: Fence, notes: Notes) -> None:
        """Leader epochs."""
        with self._held("note", fence):
            self.store.noted |= notes.leader_epochs
            self.store.sure -= notes.leader_epochs.keys()
        self.store.sure |= notes.leader_epochs.keys()

    def tidy(self, fence: Fence) -> None:
        """Refused to a run that is fenced."""
        with self._held("tidy", fence):
            pass
