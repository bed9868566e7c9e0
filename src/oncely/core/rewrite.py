"""Rewrites: rows and dead letters of records below the position are replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from oncely.core.batch import Chunk
from oncely.core.claim import Counts
from oncely.core.ledger import Entry
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import check

RewriteKind = Literal["repair", "backfill"]
"""repair: rows are again what was committed; backfill: rows are what the present transform makes of
the records."""


@dataclass(frozen=True)
class Rewrite:
    """The content of one transaction that rewrites records of one topic-partition.

    Attributes:
        kind: the kind of the amendment in the history.
        partition: the topic-partition.
        offsets: the offsets that are rewritten: ascending, disjoint, and below the position.
            Nothing that they have produced stays.
        expected: the ledger's entry on which that was decided. No run and no reset may have taken
            the position since; it may have moved on.
        chunk: the present outcome of their records. Records that it does not contain produce
            nothing.
        upto: the end of the last range.
    """

    kind: RewriteKind
    partition: TopicPartition
    offsets: Sequence[OffsetRange]
    expected: Entry
    chunk: Chunk

    def __post_init__(self) -> None:
        check(bool(self.offsets), "a rewrite of no offsets")
        check(self.upto <= self.expected.position, "a rewrite beyond the position")

    @property
    def upto(self) -> int:
        """The end of the last range."""
        return self.offsets[-1].end

    @property
    def whole(self) -> OffsetRange:
        """From the first offset to the end of the last range."""
        return OffsetRange(self.offsets[0].start, self.upto)

    def only(self, offsets: Sequence[OffsetRange]) -> Rewrite:
        """The rewrite of some of its offsets."""
        chunk = self.chunk.keep({self.partition: offsets})
        return replace(self, offsets=offsets, chunk=chunk)

    def without(self, left: Collection[int]) -> Rewrite | None:
        """The rewrite of all but some offsets; None if there are no others."""
        ranges = [OffsetRange(at, at + 1) for at in left]
        others = [part for one in self.offsets for part in one.minus(ranges)]
        return self.only(others) if others else None


class Rewritten(NamedTuple):
    """The effect of a rewrite.

    Attributes:
        removed_rows, removed_rejects: what the records had produced before.
        counts: what they have produced now.
        refused: records whose rows the destination refuses now, with the reason: what they had
            produced was left as it is.
    """

    removed_rows: int
    removed_rejects: int
    counts: Counts
    refused: Mapping[tuple[TopicPartition, int], str] = {}


def add_up(a: Rewritten, b: Rewritten) -> Rewritten:
    """The sum of two effects."""
    return Rewritten(
        a.removed_rows + b.removed_rows,
        a.removed_rejects + b.removed_rejects,
        a.counts + b.counts,
        {**a.refused, **b.refused},
    )


Tell = Callable[[RewriteKind, Mapping[TopicPartition, Sequence[OffsetRange]], Rewritten], None]
"""Is called after each transaction, with its offsets; none if they are not known."""


def silent(*_: object) -> None:
    """A :data:`Tell` that does nothing."""


@dataclass(frozen=True)
class Together:
    """Offsets whose rows can't be told apart: they are rewritten together.

    Attributes:
        spans: the offsets; per topic-partition ascending and disjoint.
        names: what contains their rows now, such as paths of files.
        problem: the reason why they can't be rewritten; empty if they can.
    """

    spans: Mapping[TopicPartition, Sequence[OffsetRange]]
    names: Sequence[str] = ()
    problem: str = ""

    @property
    def offsets(self) -> int:
        """The number of offsets."""
        return sum(one.end - one.start for own in self.spans.values() for one in own)


Produce = Callable[[TopicPartition, OffsetRange, Collection[int]], Iterator[Chunk]]
"""The present outcome of the records of a range, in chunks, without some offsets."""
