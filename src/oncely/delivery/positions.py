"""Where positions live when they are written apart from the records: a ledger, or a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from oncely.core.ledger import Entry, advance
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.errors import Fenced
from oncely.sinks.base import (
    Fence,
    Halves,
    Opened,
    PositionMoved,
    RangeKind,
    RejectCount,
    Reset,
    Written,
)
from oncely.sinks.same_source import same_cluster, same_topics
from oncely.stores.base import OffsetStore, Stored

Start = Callable[[], Mapping[TopicPartition, Position]]


class Positions(Protocol):
    """Epoch and positions of one pipeline. Picklable; connects lazily."""

    def open(
        self,
        source: SourceIdentity,
        start: Start,
        earliest: Mapping[TopicPartition, Position],
        expected: int | None,
    ) -> Opened:
        """As :meth:`oncely.sinks.base.Sink.open`."""

    def reset(
        self,
        source: SourceIdentity,
        start: Start,
        earliest: Mapping[TopicPartition, Position],
        positions: Reset,
    ) -> Opened:
        """As :meth:`oncely.sinks.base.Sink.reset`."""

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity, fence: Fence
    ) -> None:
        """As :meth:`oncely.sinks.base.Sink.add_partitions`."""

    def entries(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """Every position; as :meth:`oncely.sinks.base.Committer.entries`."""

    def committed(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """Every position; as :meth:`oncely.sinks.base.Committer.committed`."""

    def move(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        written: Mapping[TopicPartition, Written],
        kind: RangeKind,
    ) -> None:
        """Move positions over ranges.

        Raises:
            PositionMoved: they are not where the decision was made on.
            Unavailable: nobody knows whether they were moved.
        """

    def leader_epochs(self, fence: Fence) -> Mapping[TopicPartition, int]:
        """As :meth:`oncely.sinks.base.Sink.leader_epochs`."""

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int], fence: Fence) -> None:
        """As :meth:`oncely.sinks.base.Sink.note_leader_epochs`."""

    def note_rejects(self, count: RejectCount, fence: Fence) -> None:
        """As :meth:`oncely.sinks.base.Sink.note_rejects`."""

    def tidy(self, fence: Fence) -> None:
        """Housekeeping between batches."""

    def close(self) -> None:
        """End the connections; never raises."""


@dataclass(frozen=True)
class LedgerPositions:
    """The sink's own ledger, written in transactions of its own."""

    sink: Halves

    def open(
        self,
        source: SourceIdentity,
        start: Start,
        earliest: Mapping[TopicPartition, Position],
        expected: int | None,
    ) -> Opened:
        """Take the sink's next epoch."""
        return self.sink.open(source, start, earliest, expected)

    def reset(
        self,
        source: SourceIdentity,
        start: Start,
        earliest: Mapping[TopicPartition, Position],
        positions: Reset,
    ) -> Opened:
        """Put positions elsewhere."""
        return self.sink.reset(source, start, earliest, positions)

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity, fence: Fence
    ) -> None:
        """Give new partitions their position."""
        self.sink.add_partitions(positions, source, fence)

    def entries(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """Every position."""
        return self.sink.entries(fence)

    def committed(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """Every position, as it stands for certain."""
        return self.sink.committed(fence)

    def move(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        written: Mapping[TopicPartition, Written],
        kind: RangeKind,
    ) -> None:
        """Move positions by compare-and-set."""
        self.sink.move(ranges, entries, fence, written, kind)

    def leader_epochs(self, fence: Fence) -> Mapping[TopicPartition, int]:
        """What the ledger has noted."""
        return self.sink.leader_epochs(fence)

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int], fence: Fence) -> None:
        """Note them in the ledger."""
        self.sink.note_leader_epochs(epochs, fence)

    def note_rejects(self, count: RejectCount, fence: Fence) -> None:
        """Note it in the ledger."""
        self.sink.note_rejects(count, fence)

    def tidy(self, fence: Fence) -> None:
        """The ledger's own housekeeping."""
        self.sink.tidy(fence)

    def close(self) -> None:
        """The connections are the sink's."""


@dataclass(frozen=True)
class StorePositions:
    """An offset store. It fences nobody for certain: positions are compared, then written.

    Attributes:
        store: of the pipeline.
        pipeline: its name.
    """

    store: OffsetStore
    pipeline: str
    _taken: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    """Epochs that this run has tried to take. A store keeps no run's name by which it could find
    itself when the answer to a save was lost."""

    def open(
        self,
        source: SourceIdentity,
        start: Start,
        earliest: Mapping[TopicPartition, Position],
        expected: int | None,
    ) -> Opened:
        """Take the next epoch, and settle a position for every partition."""
        return self._open(source, start, earliest, expected, lambda _: {})

    def reset(
        self,
        source: SourceIdentity,
        start: Start,
        earliest: Mapping[TopicPartition, Position],
        positions: Reset,
    ) -> Opened:
        """Take the next epoch, and put positions elsewhere."""
        return self._open(source, start, earliest, None, positions)

    def _open(
        self,
        source: SourceIdentity,
        start: Start,
        earliest: Mapping[TopicPartition, Position],
        expected: int | None,
        elsewhere: Reset,
    ) -> Opened:
        known = self.store.load()
        for tp, stored in known.items():
            same_cluster(stored.cluster_id, source, self.pipeline)
            same_topics({tp.topic: stored.topic_id}, source, self.pipeline)
        newest = max((stored.epoch for stored in known.values()), default=0)
        if expected is not None and newest > expected and newest not in self._taken:
            raise Fenced(self.pipeline, expected, newest)
        begin = {**earliest, **(start() if not known else {})}
        positions = begin | {tp: stored.position for tp, stored in known.items()}
        positions |= elsewhere(positions)
        fence = Fence(self.pipeline, newest + 1)
        self._taken.add(fence.epoch)
        self.store.save({tp: _stored(tp, at, fence, source) for tp, at in positions.items()})
        return Opened(fence, positions, not known)

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity, fence: Fence
    ) -> None:
        """Give new partitions their position."""
        known = self.store.load()
        self._same_epoch(known, fence)
        new = {tp: at for tp, at in positions.items() if tp not in known}
        self.store.save({tp: _stored(tp, at, fence, source) for tp, at in new.items()})

    def entries(self, fence: Fence) -> dict[TopicPartition, Entry]:  # noqa: ARG002 - the protocol's
        """Every position."""
        return {tp: Entry(one.position, one.epoch) for tp, one in self.store.load().items()}

    def committed(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """The same: what was saved is there."""
        return self.entries(fence)

    def move(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        written: Mapping[TopicPartition, Written],  # noqa: ARG002 - a store keeps no history
        kind: RangeKind,  # noqa: ARG002
    ) -> None:
        """Compare positions, then save the new ones."""
        known = self.store.load()
        self._same_epoch(known, fence)
        moved = {}
        for tp, range_ in ranges.items():
            now = known.get(tp)
            if now is None or Entry(now.position, now.epoch) != entries[tp]:
                raise PositionMoved(str(tp))
            moved[tp] = replace(now, position=advance(entries[tp], [range_]))
        self.store.save(moved)

    def leader_epochs(self, fence: Fence) -> Mapping[TopicPartition, int]:  # noqa: ARG002
        """A store keeps none."""
        return {}

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int], fence: Fence) -> None:
        """A store keeps none."""

    def note_rejects(self, count: RejectCount, fence: Fence) -> None:
        """A store keeps none: each process counts for itself."""

    def tidy(self, fence: Fence) -> None:
        """A store has nothing to tidy."""

    def close(self) -> None:
        """End the store's connection."""
        self.store.close()

    def _same_epoch(self, known: Mapping[TopicPartition, Stored], fence: Fence) -> None:
        newest = max((stored.epoch for stored in known.values()), default=fence.epoch)
        if newest > fence.epoch:
            raise Fenced(fence.pipeline, fence.epoch, newest)


def _stored(tp: TopicPartition, at: Position, fence: Fence, source: SourceIdentity) -> Stored:
    return Stored(at, fence.epoch, source.cluster_id, source.topic_ids.get(tp.topic, ""))
