"""Sums over all committed ranges since an offset, for ledgers without a history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from oncely.core.claim import Amendment, Counts
from oncely.core.ranges import OffsetRange, Position, TopicPartition


class Totals(msgspec.Struct, frozen=True, array_like=True):
    """Counts and digest of the ranges from an offset up to the position.

    They begin anew with a reset, and when another recipe covers the rows.

    Attributes:
        since: the offset.
        begun: the epoch of the first range: totals that begin at one offset twice differ.
        digest: the digest of the rows; None if it is not known.
        recipe: the columns that it covers.
    """

    since: int
    begun: int = 0
    records: int = 0
    rows: int = 0
    rejects: int = 0
    filtered: int = 0
    digest: int | None = 0
    recipe: str = ""

    @property
    def counts(self) -> Counts:
        """The sums."""
        return Counts(
            self.records, self.rows, self.rejects, self.filtered, self.digest, self.recipe
        )

    def plus(self, done: Counts) -> Totals:
        """The totals with these counts added."""
        sums = self.counts + done
        counts = (sums.records, sums.rows, sums.rejects, sums.filtered)
        return Totals(self.since, self.begun, *counts, sums.digest, sums.recipe)


def add_range(before: Totals | None, start: Position, done: Counts, epoch: int) -> Totals:
    """The totals after a range.

    Args:
        before: the totals at ``start``; None: they begin there.
        start: the first offset of the range.
        done: the counts of the range.
        epoch: the epoch of its commit.
    """
    if before is None or (before.rows and done.rows and before.recipe != done.recipe):
        before = Totals(start, epoch)
    return before.plus(done)


def add_amendment(before: Totals | None, of: Totals, change: Counts) -> Totals:
    """The sums of all changes to the ranges of some totals.

    Args:
        before: the changes so far; None, or those of totals that began elsewhere: these are the
            first.
        of: the totals of the ranges.
        change: the change.
    """
    if before is None or (before.since, before.begun) != (of.since, of.begun):
        before = Totals(of.since, of.begun)
    return before.plus(change)


def covered_by(totals: Mapping[TopicPartition, Totals]) -> _Covered:
    """Finds the offsets that are covered by totals, for :func:`oncely.core.batch.replayed`."""
    return _Covered(totals)


class _Covered:
    def __init__(self, totals: Mapping[TopicPartition, Totals]) -> None:
        self._totals = totals

    def __call__(self, tp: TopicPartition, offsets: Sequence[int]) -> dict[int, OffsetRange]:
        since = self._totals[tp].since if tp in self._totals else None
        if since is None:
            return {}
        whole = OffsetRange(since, max(offsets) + 1) if max(offsets) >= since else None
        return {at: whole for at in offsets if whole is not None and at in whole}

    def changes(self, amendments: Sequence[Amendment]) -> dict[TopicPartition, Counts]:
        """The change of each partition's totals."""
        return {
            one.partition: one.counts
            for one in amendments
            if one.partition in self._totals
            and one.range.start >= self._totals[one.partition].since
        }
