"""Sinks whose rewrites are events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oncely.core import events
from oncely.core.ledger import Entry
from oncely.core.ranges import OffsetRange
from oncely.core.rewrite import Produce, Rewrite, RewriteKind, Rewritten, Together
from oncely.core.topics import TopicPartition
from oncely.sinks.base import RewritesRecords, RewritesTogether


@dataclass(frozen=True)
class _Told:
    tell: events.Listener

    def told(
        self,
        kind: RewriteKind,
        ranges: Mapping[TopicPartition, Sequence[OffsetRange]],
        done: Rewritten,
    ) -> Rewritten:
        """The result, after it was told."""
        counts = done.counts
        numbers = (done.removed_rows, done.removed_rejects, counts.rows, counts.rejects)
        self.tell(events.RecordsRewritten(kind, ranges, *numbers, counts.filtered))
        return done


@dataclass(frozen=True)
class ToldRecords(_Told):
    """Each transaction is told when it has ended: :class:`oncely.sinks.base.RewritesRecords`."""

    sink: RewritesRecords

    def check(self) -> None:
        """As the sink."""
        self.sink.check()

    def lacks(self, kind: str) -> str:
        """As the sink."""
        return self.sink.lacks(kind)

    def entries(self) -> Mapping[TopicPartition, Entry]:
        """As the sink."""
        return self.sink.entries()

    def committed(self, partition: TopicPartition, within: OffsetRange) -> Sequence[OffsetRange]:
        """As the sink."""
        return self.sink.committed(partition, within)

    def rewrite(self, work: Rewrite) -> Rewritten:
        """Rewrite, and tell."""
        return self.told(work.kind, {work.partition: work.offsets}, self.sink.rewrite(work))

    def remove_beyond(
        self, partition: TopicPartition, offsets: Sequence[OffsetRange], expected: Entry
    ) -> Rewritten:
        """Remove, and tell."""
        done = self.sink.remove_beyond(partition, offsets, expected)
        return self.told("repair", {partition: offsets}, done)


@dataclass(frozen=True)
class ToldTogether(_Told):
    """Each transaction is told when it has ended: :class:`oncely.sinks.base.RewritesTogether`."""

    sink: RewritesTogether

    def check(self) -> None:
        """As the sink."""
        self.sink.check()

    def entries(self) -> Mapping[TopicPartition, Entry]:
        """As the sink."""
        return self.sink.entries()

    def groups(self, wanted: Mapping[TopicPartition, Sequence[OffsetRange]]) -> Sequence[Together]:
        """As the sink."""
        return self.sink.groups(wanted)

    def rewrite_together(
        self,
        kind: RewriteKind,
        group: Together,
        entries: Mapping[TopicPartition, Entry],
        produce: Produce,
    ) -> Rewritten:
        """Rewrite, and tell."""
        done = self.sink.rewrite_together(kind, group, entries, produce)
        return self.told(kind, group.spans, done)

    def remove_unexpected(self, names: Sequence[str]) -> Rewritten:
        """Remove, and tell; the offsets are not known."""
        return self.told("repair", {}, self.sink.remove_unexpected(names))


def telling(
    sink: RewritesRecords | RewritesTogether, tell: events.Listener
) -> ToldRecords | ToldTogether:
    """The sink, with ``tell`` called after each of its transactions."""
    if isinstance(sink, RewritesTogether):
        return ToldTogether(tell, sink)
    return ToldRecords(tell, sink)
