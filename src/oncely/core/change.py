"""Values of a change of committed records.

A rewrite replaces rows and dead letters of records below the position, a replay processes dead
letters again; an amendment of the history tells what either changes in committed ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from oncely.core.batch import Chunk, IntArray, Reject, Rejection
from oncely.core.claim import UNKNOWN, Amendment, Counts, Entry
from oncely.core.digest import Digests, digest_sums
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import check

Containing = Callable[[TopicPartition, Sequence[int]], Mapping[int, OffsetRange]]
"""Returns the committed range of each offset; offsets of none are left out."""


def changed(new: Counts, old: Counts) -> Counts:
    """What replacing the content of a range changes.

    If the digest of the change is not known, neither is that of a sum with it.
    """
    counts = (
        new.records - old.records,
        new.rows - old.rows,
        new.rejects - old.rejects,
        new.filtered - old.filtered,
    )
    with_rows = [one for one in (new, old) if one.rows]
    recipes = {one.recipe for one in with_rows}
    if len(recipes) > 1 or any(one.digest is None for one in with_rows):
        return Counts(*counts, None, UNKNOWN)
    digests = [one.digest or 0 if one.rows else 0 for one in (new, old)]
    return Counts(*counts, (digests[0] - digests[1]) % (1 << 64), "".join(recipes))


def replayed(
    chunk: Chunk,
    row_record: IntArray,
    failed: Collection[int],
    digests: Digests | None,
    containing: Containing,
) -> list[Amendment]:
    """One amendment for each committed range of which dead letters were replayed.

    Args:
        chunk: the replayed records.
        row_record: the record of each row that was written.
        failed: the records that are dead letters still.
        digests: the digests of these rows.
        containing: finds committed ranges. The letters of no range have an amendment together.
    """
    rows = np.bincount(row_record, minlength=chunk.records).tolist()
    sums: Sequence[int | None] = [None] * chunk.records
    recipe = ""
    if digests is not None:
        sums = digest_sums(digests.of_row, row_record, chunk.records)
        recipe = digests.recipe
    moved: dict[TopicPartition, dict[int, Counts]] = {}
    for record in set(range(chunk.records)).difference(failed):
        one = Counts(0, rows[record], -1, 0 if rows[record] else 1, sums[record], recipe)
        tp = chunk.partitions[chunk.partition[record]]
        moved.setdefault(tp, {})[int(chunk.offset[record])] = one
    return [one for tp, own in sorted(moved.items()) for one in _of(tp, own, containing)]


def _of(tp: TopicPartition, moved: Mapping[int, Counts], containing: Containing) -> list[Amendment]:
    ranges = containing(tp, sorted(moved))
    groups: dict[OffsetRange | None, list[int]] = {}
    for at in sorted(moved):
        groups.setdefault(ranges.get(at), []).append(at)
    return [
        Amendment(
            tp,
            OffsetRange(own[0], own[-1] + 1),
            "replay",
            sum((moved[at] for at in own[1:]), moved[own[0]]),
        )
        for own in groups.values()
    ]


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
class FileGroup:
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


@dataclass(frozen=True)
class Reprocessed:
    """The result of decoding and transforming dead letters again.

    Attributes:
        chunk: records in the order of the dead letters; rows of the valid ones.
        records: the dead letters, with the content that was processed.
        traceable: False if rows belong to no single record (after a Spark transform).
    """

    chunk: Chunk
    records: Sequence[Reject]
    traceable: bool = True

    def again(self, why: Rejection) -> Reject:
        """The dead letter of a record that still fails."""
        return self.records[why.record].because(why)

    def own(self, row_record: IntArray, failed: Collection[int]) -> IntArray:
        """The record of each written row; rows of no single record are counted as those of the
        first one that has not failed."""
        if self.traceable or not len(row_record):
            return row_record
        first = min(set(range(self.chunk.records)).difference(failed))
        return np.full(len(row_record), first)


Judge = Callable[[Sequence[Reject]], Reprocessed]
"""Decodes and transforms rejects again. They are sorted by topic, partition and offset."""


class ReplayResult(NamedTuple):
    """The counts of a replay.

    Attributes:
        moved: rejects that were written, or filtered.
        kept: rejects that still fail.
    """

    moved: int = 0
    kept: int = 0


@dataclass(frozen=True)
class LockedDeadLetters:
    """Dead letters for one transaction of a replay.

    Attributes:
        rejects: the dead letters to decode again; truncated ones are not included.
        commit: writes the valid records, and keeps the others with their newer reasons; None if
            there is no dead letter to decode.
    """

    rejects: Sequence[Reject]
    commit: Callable[[Reprocessed | None], ReplayResult]
