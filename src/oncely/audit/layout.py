"""The ranges and cells of an audit: the history, cut to the offsets that are compared; and columns
that the rows of ranges lack."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa

from oncely.audit.evidence import Cell, Committed, Expected, Span
from oncely.audit.report import Undecided
from oncely.core.claim import NO_RECORDS, SKIPPED, Counts
from oncely.core.digest import Kind, Recipe, row_digests
from oncely.core.ranges import OffsetRange, Position, TopicPartition, grouped
from oncely.wording import plural

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


_LOOK = 100_000  # offsets of a partition, at most
_NULL = row_digests(pa.table({"a": pa.nulls(1, pa.string())}), None,
                    Recipe((("a", Kind("text")),), offset=False))[0]  # fmt: skip
"""The digest of a row whose values are null."""

Columns = tuple[tuple[str, Kind], ...]


def lacking(
    parts: Sequence[Part], expected: Expected | None, first: Mapping[TopicPartition, Position]
) -> Iterator[Undecided]:
    """The offsets of rows that were written without columns of which their records have values, for
    each partition and the columns that they lack.

    A range's recipe names the columns of its rows. Rows of an earlier schema lack columns of
    today's, and are right if their records have no values of them. The history does not tell; so
    records are decoded again, the newest ones of each partition, behind which the column came.

    Args:
        parts: the compared offsets.
        expected: recomputes records.
        first: the first offset that the topic holds, by partition.
    """
    if expected is None or not expected.recipe:
        return
    for (tp, columns), own in _without(parts, Recipe.parse(expected.recipe).columns).items():
        start, end = own[0].start, own[-1].end
        low, recipe = max(first[tp], end - _LOOK), str(Recipe(columns, offset=False))
        read = valued = 0
        for inside in (OffsetRange(max(one.start, low), one.end) for one in own if one.end > low):
            for records in expected.of(Span(tp, inside), recipe):
                read += len(records.offset)
                if records.digest is not None:
                    without = records.rows.astype(np.uint64) * _NULL
                    valued += int(np.count_nonzero(records.digest != without))
        if valued:
            names = ", ".join(name for name, _ in columns)
            reason = (
                f"rows were written without {names}, and {valued} of the last"
                f" {plural(read, 'record')} have values of it:"
                f" `oncely backfill FILE --offsets {tp.topic}:{tp.partition}:{start}-{end}`"
            )
            yield Undecided(tp, OffsetRange(start, end), reason)


def _without(
    parts: Sequence[Part], today: Columns
) -> dict[tuple[TopicPartition, Columns], list[OffsetRange]]:
    """The ranges with rows that lack some of today's columns, ascending."""
    found: dict[tuple[TopicPartition, Columns], list[OffsetRange]] = {}
    for part in parts:
        if part.digest is not None and part.entry and part.entry.rows:
            try:
                there = {name for name, _ in Recipe.parse(part.recipe).columns}
            except ValueError:  # of a later version
                continue
            missing = tuple(one for one in today if one[0] not in there)
            if missing:
                found.setdefault((part.span.partition, missing), []).append(part.span.range)
    return found
