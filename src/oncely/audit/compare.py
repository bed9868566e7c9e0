"""The comparison, offset by offset and range by range. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oncely.audit.evidence import ExpectedRecords, IntArray, Readable, Tally, clipped, runs_of
from oncely.audit.layout import Part
from oncely.audit.report import Finding, FindingKind, Undecided
from oncely.audit.tally import sum_of
from oncely.core.expected import FILTERED
from oncely.core.ranges import OffsetRange, TopicPartition

Flags = npt.NDArray[np.bool_]
Digests = npt.NDArray[np.uint64]

_LISTED = 5  # runs of offsets that are listed separately

COUNTS_CHANGED = (
    "the rows are those of the ledger's digest, and its counts are not theirs: the ledger was"
    " changed, in its amendments or ranges; no row is lost"
)
NO_RECORD = "the topic has no committed record at this offset"
NOT_WANTED = "its record should have no row"
NEITHER = "neither a row nor a dead letter"
BOTH = "a row and a dead letter"
OTHER = "other values"


class Stored(NamedTuple):
    """The destination's content of one cell, by offset.

    Attributes:
        offsets: ascending offsets that have rows.
        rows: the number of rows of each.
        digests: the digest sum of the rows of each; None if it is not known.
        rejects: ascending offsets that have a dead letter.
    """

    offsets: IntArray
    rows: IntArray
    digests: Digests | None
    rejects: IntArray


class Rules(NamedTuple):
    """What may be concluded in a cell.

    Attributes:
        compacted: a record may vanish from the topic after its commit.
        several: a record may have several rows, and their number is not known.
        filters: a record may have been filtered.
    """

    compacted: bool = False
    several: bool = False
    filters: bool = False


class Damage(NamedTuple):
    """Findings of one kind at some offsets, with the same explanation."""

    kind: FindingKind
    offsets: IntArray
    detail: str


@dataclass
class Compared:
    """The result of a cell, and the sum of several.

    Attributes:
        records: readable records, and records that were deleted from the topic after their commit.
        accounted: those with their rows, or their reject, or filtered.
        holes: offsets without a record.
        rows: the number of rows.
        damage: the findings.
        maybe_filtered: readable offsets without row and reject that the transform may have
            filtered; not decided.
        deleted: offsets that the topic no longer holds, without row and reject; not decided.
    """

    records: int = 0
    accounted: int = 0
    holes: int = 0
    rows: int = 0
    damage: list[Damage] = field(default_factory=list)
    maybe_filtered: list[IntArray] = field(default_factory=list)
    deleted: list[IntArray] = field(default_factory=list)

    def add(self, other: Compared) -> None:
        """Add another cell."""
        self.records += other.records
        self.accounted += other.accounted
        self.holes += other.holes
        self.rows += other.rows
        self.damage += other.damage
        self.maybe_filtered += other.maybe_filtered
        self.deleted += other.deleted


def is_full(range_: OffsetRange, tally: Tally, whole_sum: int) -> bool:
    """True if each offset of the range has exactly one row or dead letter.

    Args:
        range_: the offsets.
        tally: the destination's.
        whole_sum: the sum of the digests of all offsets of the range.
    """
    width = range_.end - range_.start
    return tally.rows + tally.rejects == width and tally.offsets == whole_sum


def is_exact(read: Readable, tally: Tally) -> bool:
    """True if each readable offset has exactly one row or dead letter, no other offset has any, and
    all readable offsets are known."""
    return (
        read.first <= read.span.range.start
        and tally.rows + tally.rejects == read.records
        and tally.offsets == sum_of(read.runs)
    )


def accounted(range_: OffsetRange, tally: Tally) -> Compared:
    """A cell in which each record has exactly one row or dead letter: its other offsets are
    holes."""
    records = tally.rows + tally.rejects
    return Compared(records, records, range_.end - range_.start - records, tally.rows)


class _Expected(NamedTuple):
    """What each offset of a cell should have; ``rows`` is -1 where it is not known."""

    rows: IntArray
    outcome: npt.NDArray[np.int8]
    digest: Digests | None


def compare(
    read: Readable,
    stored: Stored,
    rules: Rules,
    expected: ExpectedRecords | None = None,
) -> Compared:
    """Compare a cell offset by offset.

    Args:
        read: the topic's readable offsets.
        stored: the destination's content.
        rules: what may be concluded.
        expected: what the readable records should have become, if that is known.
    """
    return _Comparison(read, stored, rules, expected).result()


class _Comparison:
    """Dense arrays over the offsets of a cell."""

    def __init__(
        self,
        read: Readable,
        stored: Stored,
        rules: Rules,
        expected: ExpectedRecords | None,
    ) -> None:
        self._range, self._rules, self._stored = read.span.range, rules, stored
        start, width = self._range.start, self._range.end - self._range.start
        self._readable = np.zeros(width, dtype=bool)
        for first, end in clipped(read.runs, self._range):
            self._readable[first - start : end - start] = True
        self._rows = np.zeros(width, dtype=np.int64)
        np.add.at(self._rows, stored.offsets - start, stored.rows)
        self._reject = np.zeros(width, dtype=bool)
        self._reject[stored.rejects - start] = True
        self._present = (self._rows > 0) | self._reject
        self._known = np.arange(start, self._range.end) >= read.first
        self._expected = None if expected is None else self._dense(expected)
        self._found = Compared()
        self._bad = np.zeros(width, dtype=bool)

    def _dense(self, expected: ExpectedRecords) -> _Expected:
        start, width = self._range.start, self._range.end - self._range.start
        at = expected.offset - start
        rows, outcome = np.full(width, -1, dtype=np.int64), np.full(width, -1, dtype=np.int8)
        rows[at], outcome[at] = expected.rows, expected.outcome
        digest = None
        if expected.digest is not None:
            digest = np.zeros(width, dtype=np.uint64)
            digest[at] = expected.digest
        return _Expected(rows, outcome, digest)

    def result(self) -> Compared:
        phantom = self._phantoms()
        records = self._readable | (self._present & ~phantom)
        self._absent()
        self._both()
        self._numbers(phantom)
        self._values()
        found = self._found
        found.records = int(records.sum())
        found.accounted = int((records & ~self._bad).sum())
        found.rows = int(self._rows.sum())
        found.holes = int((self._known & ~self._readable & ~self._present).sum())
        deleted = ~self._known & ~self._readable & ~self._present
        self._keep(found.deleted, deleted)
        return found

    def _phantoms(self) -> Flags:
        """Rows and dead letters at offsets that never had a committed record."""
        gone = ~self._readable & self._present
        phantom = gone & self._known
        if self._rules.compacted:
            phantom = np.zeros_like(gone)
        self._report("unexpected", phantom, NO_RECORD)
        return phantom

    def _absent(self) -> None:
        """Readable records without row and dead letter."""
        absent = self._readable & ~self._present
        if self._expected is not None:
            filtered = self._expected.outcome == FILTERED
            self._report("lost", absent & ~filtered, NEITHER)
        elif self._rules.filters:
            self._keep(self._found.maybe_filtered, absent)
            self._bad |= absent
        else:
            self._report("lost", absent, NEITHER)

    def _both(self) -> None:
        self._report("duplicated", self._reject & (self._rows > 0), BOTH)

    def _numbers(self, phantom: Flags) -> None:
        """Too many rows of a record, or too few."""
        single = (self._rows > 0) & ~self._reject & ~phantom
        if self._expected is None:
            if not self._rules.several:
                self._by_number("duplicated", single & (self._rows > 1), None)
            return
        wanted = self._expected.rows
        known = single & (wanted >= 0)
        self._report("unexpected", known & (wanted == 0), NOT_WANTED)
        self._by_number("duplicated", known & (wanted > 0) & (self._rows > wanted), wanted)
        self._by_number("lost", known & (self._rows < wanted), wanted)
        if not self._rules.several:
            self._by_number("duplicated", single & (wanted < 0) & (self._rows > 1), None)

    def _values(self) -> None:
        """Rows with other values than their record gives."""
        stored, expected = self._stored.digests, self._expected
        if stored is None or expected is None or expected.digest is None:
            return
        digest = np.zeros(len(self._rows), dtype=np.uint64)
        np.add.at(digest, self._stored.offsets - self._range.start, stored)
        same_number = (self._rows > 0) & ~self._reject & (self._rows == expected.rows)
        self._report("altered", same_number & (digest != expected.digest), OTHER)

    def _by_number(self, kind: FindingKind, where: Flags, wanted: IntArray | None) -> None:
        """One finding with the numbers for each pair of numbers."""
        if not where.any():
            return
        pairs = np.stack([self._rows, self._rows * 0 + 1 if wanted is None else wanted], axis=1)
        for rows, of in np.unique(pairs[where], axis=0):
            same = where & (self._rows == rows) & (pairs[:, 1] == of)
            self._report(kind, same, f"{rows} rows instead of {of}")

    def _report(self, kind: FindingKind, where: Flags, detail: str) -> None:
        self._bad |= where
        if where.any():
            offsets = np.flatnonzero(where) + self._range.start
            self._found.damage.append(Damage(kind, offsets, detail))

    def _keep(self, into: list[IntArray], where: Flags) -> None:
        if where.any():
            into.append(np.flatnonzero(where) + self._range.start)


# -- ranges --------------------------------------------------------------------------------


@dataclass
class Settled:
    """The conclusion about a committed range.

    Attributes:
        result: its records and damage.
        findings: damage whose offset is not known, and the number of its records.
        undecided: offsets of which nothing can be proved.
    """

    result: Compared
    findings: list[tuple[Finding, int]] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)

    def find(self, finding: Finding, number: int) -> None:
        """Add damage to records whose offsets are not known."""
        self.findings.append((finding, number))


def settle(
    part: Part, result: Compared, *, recomputed: bool = False, stored: bool = False
) -> Settled:
    """Decide on the offsets of a range that no single cell decides.

    Args:
        part: the range.
        result: the sum of its cells.
        recomputed: the expected rows of each record were compared.
        stored: the rows are those of the history's digest.
    """
    done = Settled(result)
    if not (stored and _are_filtered(part, done)):
        _settle_filtered(part, done)
    _settle_deleted(part, done)
    if part.several and not (recomputed or stored):
        _settle_numbers(part, done)
    return done


def _settle_numbers(part: Part, done: Settled) -> None:
    """Records have several rows, of which only the total number is known."""
    partition, range_ = part.span
    reason = "records have several rows; how many can't be recomputed"
    done.undecided.append(Undecided(partition, range_, reason))
    if part.counts is None:
        return
    more = done.result.rows - part.counts.rows
    detail = f"{done.result.rows:,} rows of {range_}, and the ledger counts"
    if more:
        finding = Finding(
            partition, None, "duplicated" if more > 0 else "lost",
            f"{detail} {part.counts.rows:,}",
        )  # fmt: skip
        done.find(finding, abs(more))


def _are_filtered(part: Part, done: Settled) -> bool:
    """Count records without row and dead letter as filtered: the rows are those of the history's
    digest. False if there are not as many as the ledger counts."""
    absent = sum(len(one) for one in done.result.maybe_filtered)
    if part.counts is None or absent != part.counts.filtered:
        return False
    done.result.accounted += absent
    return True


def _settle_filtered(part: Part, done: Settled) -> None:
    """Records without row and dead letter: at most as many as the ledger counts were filtered."""
    if not done.result.maybe_filtered:
        return
    partition, offsets = part.span.partition, np.concatenate(done.result.maybe_filtered)
    filtered = 0 if part.counts is None else part.counts.filtered
    lost = len(offsets) - filtered
    if lost > 0:
        detail = (
            f"{lost:,} of {len(offsets):,} records of {_hull(offsets)} with {NEITHER}: the ledger"
            f" counts {filtered:,} as filtered"
        )
        done.find(Finding(partition, None, "lost", detail), lost)
    reason = (
        f"{len(offsets):,} records have {NEITHER}; whether the transform filters them can't be"
        " recomputed"
    )
    done.undecided += _undecided(partition, offsets, reason)


def _settle_deleted(part: Part, done: Settled) -> None:
    """Offsets that the topic no longer holds: the ledger's count may show that records are lost."""
    if not done.result.deleted:
        return
    partition, offsets = part.span.partition, np.concatenate(done.result.deleted)
    if part.kind == "gap":
        reason = "deleted from the topic before they were read (a gap in the history)"
        done.undecided += _undecided(partition, offsets, reason)
        return
    counts = part.counts
    lost = 0 if counts is None else counts.records - counts.filtered - done.result.records
    if lost > 0 and lost == len(offsets):
        done.result.damage.append(Damage("lost", offsets, f"{NEITHER}; the ledger counts them"))
        done.result.records += lost
        return
    if lost > 0:
        detail = (
            f"{lost:,} records of {_hull(offsets)} that the ledger counts have {NEITHER}, and the"
            " topic no longer holds these offsets"
        )
        done.find(Finding(partition, None, "lost", detail), lost)
    reason = (
        f"the topic no longer holds {len(offsets):,} offsets that have {NEITHER}: holes, or lost"
        " records"
    )
    done.undecided += _undecided(partition, offsets, reason)


def _undecided(partition: TopicPartition, offsets: IntArray, reason: str) -> list[Undecided]:
    """Offsets as few ranges."""
    runs = runs_of(offsets)
    if len(runs) > _LISTED:
        return [Undecided(partition, _hull(offsets), reason)]
    return [Undecided(partition, OffsetRange(int(a), int(b)), reason) for a, b in runs]


def _hull(offsets: IntArray) -> OffsetRange:
    return OffsetRange(int(offsets.min()), int(offsets.max()) + 1)
