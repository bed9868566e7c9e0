"""Topic-partitions, positions, offset ranges ``[start, end)`` and their algebra.

A position is always the NEXT offset to read, as in Kafka. ``end - start`` is not a record count:
transaction markers and compaction leave holes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from oncely.errors import Stopped, check

Position = int
"""The next offset to read. ``0 <= position``."""

T = TypeVar("T")
K = TypeVar("K")


class TopicPartition(NamedTuple):
    """A partition of a topic. Sorts by topic, then partition: the order of taking locks."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True)
class SourceIdentity:
    """Ids that distinguish a topic from another topic of the same name.

    Attributes:
        cluster_id: Kafka's cluster id.
        topic_ids: topic name to topic id (KIP-516), as text.
    """

    cluster_id: str
    topic_ids: Mapping[str, str]


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The values of each key, such as a partition's, in their order."""
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def by_topic(values: Mapping[TopicPartition, T]) -> dict[str, dict[int, T]]:
    """Values by topic, then partition: the form in which they are stored as JSON."""
    tree: dict[str, dict[int, T]] = {}
    for tp, value in sorted(values.items(), key=lambda item: item[0]):
        tree.setdefault(tp.topic, {})[tp.partition] = value
    return tree


def from_tree(tree: Mapping[str, Mapping[int, T]]) -> dict[TopicPartition, T]:
    """The inverse of :func:`by_topic`."""
    return {TopicPartition(t, n): value for t, own in tree.items() for n, value in own.items()}


@dataclass(frozen=True, order=True)
class OffsetRange:
    """Offsets ``start <= offset < end`` of a topic-partition; empty when they are equal."""

    start: int
    end: int

    def __post_init__(self) -> None:
        check(0 <= self.start <= self.end, f"not an offset range: [{self.start}, {self.end})")

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"

    @property
    def is_empty(self) -> bool:
        """True when the range contains no offset."""
        return self.start == self.end

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.end

    def overlaps(self, other: OffsetRange) -> bool:
        """True when the ranges share at least one offset."""
        return max(self.start, other.start) < min(self.end, other.end)

    def touches(self, other: OffsetRange) -> bool:
        """True when joining the ranges covers no offset that is in neither."""
        return max(self.start, other.start) <= min(self.end, other.end)

    def join(self, other: OffsetRange) -> OffsetRange:
        """The range that covers both.

        Raises:
            InvariantViolation: there is a gap between them.
        """
        check(self.touches(other), f"a gap lies between {self} and {other}")
        return OffsetRange(min(self.start, other.start), max(self.end, other.end))

    def minus(self, done: Iterable[OffsetRange]) -> tuple[OffsetRange, ...]:
        """Offsets of this range that are not in ``done``: disjoint, ascending, never empty."""
        left: list[OffsetRange] = []
        at = self.start
        for other in normalize(done):
            if not self.overlaps(other):
                continue
            if other.start > at:
                left.append(OffsetRange(at, other.start))
            at = max(at, other.end)
        if at < self.end:
            left.append(OffsetRange(at, self.end))
        return tuple(left)


def stored_range(of: object, start: int, end: int) -> OffsetRange:
    """A range as the ledger contains it.

    Args:
        of: its topic-partition.
        start, end: its offsets.

    Raises:
        Stopped: they are no range of offsets.
    """
    if 0 <= start <= end:
        return OffsetRange(start, end)
    raise Stopped(
        f"the ledger is damaged: it contains [{start}, {end}) of {of}, which is no range of"
        " offsets: another program has changed it",
        way_out="`oncely verify` shows the ranges around it: restore them from a backup",
    )


def normalize(ranges: Iterable[OffsetRange]) -> tuple[OffsetRange, ...]:
    """The same offsets as few ranges as possible: ascending, disjoint, not touching."""
    joined: list[OffsetRange] = []
    for one in sorted(r for r in ranges if not r.is_empty):
        if joined and joined[-1].touches(one):
            joined[-1] = joined[-1].join(one)
        else:
            joined.append(one)
    return tuple(joined)


def gaps(ranges: Iterable[OffsetRange]) -> tuple[OffsetRange, ...]:
    """The offsets between the first and the last range that no range covers."""
    whole = normalize(ranges)
    return tuple(OffsetRange(a.end, b.start) for a, b in itertools.pairwise(whole))


def cut(ranges: Iterable[OffsetRange], end: int) -> list[OffsetRange]:
    """The offsets of ranges before ``end``."""
    return [OffsetRange(one.start, min(one.end, end)) for one in ranges if one.start < end]


def halved(ranges: Sequence[OffsetRange]) -> list[Sequence[OffsetRange]]:
    """Two halves of disjoint, ascending ranges that are not empty; one offset as it is."""
    if len(ranges) > 1:
        middle = len(ranges) // 2
        return [ranges[:middle], ranges[middle:]]
    one = ranges[0]
    at = (one.start + one.end) // 2
    if at == one.start:
        return [ranges]
    return [[OffsetRange(one.start, at)], [OffsetRange(at, one.end)]]


def connected(
    nodes: Sequence[Iterable[tuple[TopicPartition, OffsetRange]]],
) -> Callable[[int], int]:
    """A function from a node's index to that of the first node of its component: nodes whose ranges
    share offsets are connected."""
    parent = list(range(len(nodes)))

    def leader(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    edges = grouped((tp, (one, at)) for at, node in enumerate(nodes) for tp, one in node)
    for own in edges.values():
        end, before = -1, 0
        for range_, at in sorted(own):
            if range_.start < end:
                first, second = sorted((leader(at), leader(before)))
                parent[second] = first
            end, before = max(end, range_.end), at
    return leader
