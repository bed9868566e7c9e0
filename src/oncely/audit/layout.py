"""The ranges and cells of an audit: the history, cut to the offsets that are compared. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

from oncely.audit.evidence import Cell, Committed, Span
from oncely.audit.report import Undecided
from oncely.core.claim import NO_RECORDS, SKIPPED, Counts
from oncely.core.ranges import OffsetRange, TopicPartition, grouped

_CELL = 8_192  # offsets: what is read of a range that differs
_CELLS = 50_000  # beyond so many they are larger

ENTRIES = ("data", "hole", "gap", "joined", SKIPPED)
"""Kinds of entries that moved a position; all others are amendments of them."""


@dataclass(frozen=True)
class Part:
    """Offsets that are compared together.

    Attributes:
        span: the offsets.
        kind: of the history's entry of these offsets; empty if it has none.
        entry: the counts of that entry, with its amendments.
        whole: the entry is about exactly these offsets.
        recipe: of the rows' digests; empty if they have none.
        cells: the units of comparison.
    """

    span: Span
    kind: str
    entry: Counts | None
    whole: bool
    recipe: str
    cells: tuple[Cell, ...]

    @property
    def counts(self) -> Counts | None:
        """The history's counts, if they are comparable."""
        return self.entry if self.whole else None

    @property
    def digest(self) -> int | None:
        """The history's digest, if it is comparable."""
        return None if self.counts is None else self.counts.digest

    @property
    def filters(self) -> bool:
        """True if records may have been filtered, according to the history."""
        return self.entry is not None and self.entry.filtered > 0

    @property
    def several(self) -> bool:
        """True if a record has several rows, according to the history."""
        one = self.entry
        return one is not None and one.rows > one.records - one.rejects - one.filtered


class _OfSpan(Protocol):
    @property
    def span(self) -> Span: ...


S = TypeVar("S", bound=_OfSpan)


def by_partition(some: Iterable[S]) -> dict[TopicPartition, list[S]]:
    """Entries, parts or cells by their partition, in their order."""
    return grouped((one.span.partition, one) for one in some)


def parts(
    committed: Sequence[Committed], whole: Mapping[TopicPartition, OffsetRange], recipe: str = ""
) -> list[Part]:
    """Each partition's offsets, divided by the history.

    Args:
        committed: entries and amendments.
        whole: the offsets that are compared.
        recipe: for digests of ranges that have none in the history.
    """
    size = max(_CELL, sum(one.end - one.start for one in whole.values()) // _CELLS)
    found, of = [], by_partition(committed)
    for tp, range_ in sorted(whole.items()):
        own = sorted(of.get(tp, ()), key=lambda one: one.span.range)
        entries = [one for one in own if one.kind in ENTRIES]
        changes = _changes([one for one in own if one.kind not in ENTRIES], entries)
        for inside, entry in _divided(range_, entries):
            found.append(_part(Span(tp, inside), entry, changes, recipe, size))
    return found


def _part(
    span: Span,
    entry: Committed | None,
    changes: Mapping[OffsetRange, Counts],
    recipe: str,
    size: int,
) -> Part:
    if entry is None:
        return Part(span, "", None, False, recipe, tuple(_cells(span, recipe, size)))
    counts = entry.counts
    if entry.span.range in changes:
        counts += changes[entry.span.range]
    known = counts.recipe if counts.digest is not None else ""
    own = known or (recipe if counts.rows else "")
    whole = entry.span == span
    return Part(span, entry.kind, counts, whole, own, tuple(_cells(span, own, size)))


def _changes(
    amendments: Sequence[Committed], entries: Sequence[Committed]
) -> dict[OffsetRange, Counts]:
    """By range of an entry, the sum of its amendments. Entries may have been joined since."""
    starts = [one.span.range.start for one in entries]
    found: dict[OffsetRange, Counts] = {}
    for one in amendments:
        at = bisect_right(starts, one.span.range.start) - 1
        if at < 0:
            continue
        range_ = entries[at].span.range
        found[range_] = found[range_] + one.counts if range_ in found else one.counts
    return found


def _divided(
    range_: OffsetRange, entries: Sequence[Committed]
) -> list[tuple[OffsetRange, Committed | None]]:
    """The range, cut at the entries; offsets that no entry covers are ranges without one."""
    found: list[tuple[OffsetRange, Committed | None]] = []
    at = range_.start
    for entry in entries:
        start, end = max(entry.span.range.start, at), min(entry.span.range.end, range_.end)
        if start >= end:
            continue
        if at < start:
            found.append((OffsetRange(at, start), None))
        inside = OffsetRange(start, end)
        found.append((inside, entry))
        at = end
    if at < range_.end:
        found.append((OffsetRange(at, range_.end), None))
    return found


def _cells(span: Span, recipe: str, size: int) -> list[Cell]:
    """Cut at multiples of the size, so that a cell without holes has few distinct sums."""
    start, end = span.range.start, span.range.end
    cuts = [start, *range((start // size + 1) * size, end, size), end]
    return [Cell(Span(span.partition, OffsetRange(a, b)), recipe) for a, b in pairwise(cuts)]


def adjacent(cells: Iterable[Cell], most: int) -> Iterator[list[Cell]]:
    """Runs of adjacent cells with the same recipe, of so many offsets at most; one cell may have
    more."""
    some: list[Cell] = []
    for cell in cells:
        start = some[0].span.range.start if some else 0
        if some and not (
            cell.recipe == some[0].recipe
            and cell.span.partition == some[0].span.partition
            and cell.span.range.start == some[-1].span.range.end
            and cell.span.range.end - start <= most
        ):
            yield some
            some = []
        some.append(cell)
    if some:
        yield some


def disorder(committed: Sequence[Committed]) -> list[Undecided]:
    """Entries that were not committed in the order of their offsets, or overlap.

    Ranges that were joined have the time of the joining.
    """
    found = []
    entries = [one for one in committed if one.kind in ENTRIES]
    entries.sort(key=lambda one: one.span)
    for before, after in pairwise(entries):
        if before.span.partition != after.span.partition:
            continue
        problem = _problem(before, after)
        if problem:
            found.append(Undecided(after.span.partition, after.span.range, problem))
    return found


def _problem(before: Committed, after: Committed) -> str:
    first = before.span.range
    if first.overlaps(after.span.range):
        return f"the history has two entries for the same offsets: {first} and this one"
    if None not in (before.epoch, after.epoch) and before.epoch > after.epoch:  # type: ignore[operator]
        return (
            f"the history is not in order: epoch {before.epoch} committed {first}, an earlier epoch"
            f" {after.epoch} the records after them"
        )
    joined = "joined" in (before.kind, after.kind)
    if before.at and after.at and not joined and before.at > after.at:
        return (
            f"the history is not in order: {first} was committed at {before.at.isoformat()}, the"
            f" records after them before that, at {after.at.isoformat()}"
        )
    return ""


def skips(tp: TopicPartition, ranges: Iterable[OffsetRange]) -> list[Committed]:
    """Entries of the history about offsets that a reset has passed over."""
    return [Committed(Span(tp, one), SKIPPED, NO_RECORDS) for one in ranges]
