"""The audit of an upsert: a table that has, of each key, the newest row.

Rows are replaced, so no range of the history can be compared with the table. All records are
recomputed, which gives the rows that the table should have, each with the offset of its record.
They are compared with the table cell by cell, by sums that the destination computes. Only cells
that differ are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import chain

import numpy as np

from oncely.audit.compare import BOTH, NO_RECORD, NOT_WANTED, OTHER, Damage, Rules, compare
from oncely.audit.engine import ByOffset, Ends
from oncely.audit.evidence import (
    Cell,
    Expected,
    ExpectedRecords,
    IntArray,
    KeyedEvidence,
    Readable,
    Span,
    Tally,
    runs_of,
    within,
)
from oncely.audit.layout import ENTRIES, by_partition, parts
from oncely.audit.newest import DELETED, Newest, NewestRows, OtherWriters, Settled
from oncely.audit.ranges import stored_by_cell
from oncely.audit.report import Finding, FindingKind, Report, Undecided
from oncely.audit.tally import added, offset_digests
from oncely.core.expected import ROWS, Changes
from oncely.core.ranges import OffsetRange, TopicPartition, grouped
from oncely.errors import WrongInput

_DIFFERING_AT_ONCE = 100  # cells

_NO_RECORDS = "the rows of an upsert can be compared only if their records are recomputed"
_GONE = "the topic no longer holds these records: rows of keys that they have changed last"
_COMPACTED = "rows of records that were compacted away: a newer record of the key may be pending"
_SEVERAL = (
    "rows of keys whose records are in several partitions: without versions their order is not"
    " known"
)
_REPLAYED = "rows of keys that were deleted; replayed dead letters may have restored them"
_CHANGED = (
    "most rows have other values than today's decode and transform give, and the history of an"
    " upsert has no digest that tells a changed transform from damage"
)


@dataclass
class Upsert(ByOffset):
    """Compares a table of an upsert.

    Attributes:
        version: the name of the version column; None if there is none.
    """

    snapshot: KeyedEvidence
    version: str | None
    _bad: dict[TopicPartition, set[int]] = field(default_factory=dict, init=False)
    _doubts: dict[tuple[TopicPartition, str], list[int]] = field(default_factory=dict, init=False)
    _altered: list[Finding] = field(default_factory=list, init=False)

    def run(self, until: datetime | None) -> Report:
        """See :meth:`Audit.run`; a time is refused."""
        if until is not None:
            raise WrongInput(
                "an upsert can't be compared up to a time: newer records have replaced its rows",
                way_out="audit it without --until",
            )
        return super().run(None)

    def _compare(self, ends: Ends) -> None:
        readable = {tp: one for tp, one in ends.compared.items() if tp not in ends.gone}
        if self.expected is None or not self.expected.recipe:
            for tp, range_ in readable.items():
                self.leave(Undecided(tp, range_, _NO_RECORDS))
            return
        rejects = self._rejects(readable)
        newest = self._newest(self.expected, readable, rejects, ends)
        divided = parts((), readable, self.expected.recipe)
        cells = [cell for part in divided for cell in part.cells]
        finals = {tp: newest.rows(tp) for tp in readable}
        unsure = {tp: newest.rows(tp, sure=False).offset for tp in readable}
        differing = [
            cell
            for cell, tally in zip(cells, self.snapshot.tallies(cells), strict=True)
            if not _matches(cell, tally, finals, rejects) or _some(unsure, cell)
        ]
        others = OtherWriters(self.snapshot, self.expected, newest, ends, self.version)
        comparison = _Cells(self, newest, finals, rejects, ends, others)
        for at in range(0, len(differing), _DIFFERING_AT_ONCE):
            some = differing[at : at + _DIFFERING_AT_ONCE]
            comparison.compare(some, self.expected)
            for cell in some:
                self.tabs[cell.span.partition].differing.append(cell.span.range)
        comparison.conclude()
        for tp, offsets in unsure.items():
            for offset in offsets.tolist():
                self.doubt(tp, offset, _SEVERAL)
        self._conclude(ends, sum(len(one.offset) for one in finals.values()))

    def _rejects(
        self, whole: Mapping[TopicPartition, OffsetRange]
    ) -> dict[TopicPartition, IntArray]:
        found = grouped(self.snapshot.rejects([Span(*one) for one in whole.items()]))
        return {tp: np.array(sorted(found.get(tp, ())), dtype=np.int64) for tp in whole}

    def _newest(
        self,
        expected: Expected,
        whole: Mapping[TopicPartition, OffsetRange],
        rejects: Mapping[TopicPartition, IntArray],
        ends: Ends,
    ) -> Settled:
        """Recompute all records; note their number, and records that are neither."""
        rows, committed = (
            NewestRows(versioned=self.version is not None),
            by_partition(self.snapshot.committed),
        )
        for tp, range_ in whole.items():
            tab = self.tabs[tp]
            read = [Span(tp, one) for one in range_.minus(self._skipped.get(tp, ()))]
            changes = chain.from_iterable(map(expected.changes, read))
            rows.add(tp, self._noted(tp, changes, rejects[tp]), rejects[tp])
            tab.ranges = sum(one.kind in ENTRIES for one in committed.get(tp, ()))
            first = ends.bounds[tp].first
            tab.holes += sum(one.end - max(one.start, min(first, one.end)) for _, one in read)
            tab.holes -= tab.records
        return rows.settle()

    def _noted(
        self, tp: TopicPartition, changes: Iterable[Changes], rejects: IntArray
    ) -> Iterator[Changes]:
        for one in changes:
            self.tabs[tp].records += len(one.records)
            for offset in one.rejected[~np.isin(one.rejected, rejects)].tolist():
                self.damage("lost", tp, offset, "it is no row, and there is no dead letter")
            yield one

    # -- conclusions -----------------------------------------------------------------------

    def damage(self, kind: FindingKind, tp: TopicPartition, offset: int, detail: str) -> None:
        """Add damage to a record."""
        if not len(self._ours(tp, Damage(kind, np.array([offset]), detail))):
            return
        finding = Finding(tp, offset, kind, detail)
        self._bad.setdefault(tp, set()).add(offset)
        self.tabs[tp].unproved(offset)
        if kind == "altered" and detail == OTHER:
            self._altered.append(finding)
        else:
            self.find(finding, 1)

    def _contested(self, tp: TopicPartition, range_: OffsetRange) -> None:
        self.doubt(tp, range_.start, self._contest(tp, range_))

    def doubt(self, tp: TopicPartition, offset: int, reason: str) -> None:
        """Nothing is proved of a row."""
        self._doubts.setdefault((tp, reason), []).append(offset)

    def _conclude(self, ends: Ends, finals: int) -> None:
        if self._altered and 2 * len(self._altered) > finals:
            for one in self._altered:
                if one.partition is not None and one.offset is not None:
                    self.doubt(one.partition, one.offset, _CHANGED)
        else:
            for one in self._altered:
                self.find(one, 1)
        for (tp, reason), offsets in self._doubts.items():
            self.leave(Undecided(tp, OffsetRange(min(offsets), max(offsets) + 1), reason))
        for tp, range_ in ends.compared.items():
            tab = self.tabs[tp]
            tab.accounted = max(0, tab.records - len(self._bad.get(tp, ())))
            if tp not in ends.gone and ends.bounds[tp].first > range_.start:
                end = min(ends.bounds[tp].first, range_.end)
                self.leave(Undecided(tp, OffsetRange(range_.start, end), _GONE))


def _some(offsets: Mapping[TopicPartition, IntArray], cell: Cell) -> bool:
    own = offsets[cell.span.partition]
    return len(own[within(own, cell.span.range)]) > 0


def _matches(
    cell: Cell,
    tally: Tally,
    finals: Mapping[TopicPartition, Newest],
    rejects: Mapping[TopicPartition, IntArray],
) -> bool:
    """True if the cell has exactly the newest rows of its records, by their sums."""
    tp, range_ = cell.span
    own, letters = finals[tp], rejects[tp]
    at, of_letters = within(own.offset, range_), within(letters, range_)
    offsets = np.concatenate([own.offset[at], letters[of_letters]])
    if (tally.rows, tally.rejects) != (at.stop - at.start, of_letters.stop - of_letters.start):
        return False
    if tally.offsets != added(offset_digests(offsets)):
        return False
    digest: int = added(own.digest[at])
    return tally.rows == 0 or tally.digest == digest


@dataclass
class _Cells:
    """The comparison of cells that differ, by offset."""

    audit: Upsert
    newest: Settled
    finals: Mapping[TopicPartition, Newest]
    rejects: Mapping[TopicPartition, IntArray]
    ends: Ends
    others: OtherWriters
    _missing: dict[tuple[TopicPartition, int], str] = field(default_factory=dict)
    _stale: dict[tuple[TopicPartition, int], int] = field(default_factory=dict)

    @cached_property
    def _replayed(self) -> bool:
        return any(one.kind not in ENTRIES for one in self.audit.snapshot.committed)

    def compare(self, cells: Sequence[Cell], expected: Expected) -> None:
        """Compare the rows of cells with those that they should have."""
        stored = stored_by_cell(self.audit.snapshot, cells)
        for cell in cells:
            tp, wanted = cell.span.partition, self._wanted(cell)
            content = stored[cell.span]._replace(rejects=np.zeros(0, np.int64))
            read = Readable(cell.span, runs_of(wanted.offset), 0)
            for kind, offsets, detail in compare(read, content, Rules(), wanted).damage:
                if kind == "unexpected":
                    self._extra(cell, offsets.tolist(), expected)
                    continue
                for offset in offsets.tolist():
                    if kind == "lost":
                        self._missing[tp, offset] = detail
                    else:
                        self.audit.damage(kind, tp, offset, detail)

    def _wanted(self, cell: Cell) -> ExpectedRecords:
        """The newest rows by offset."""
        own = self.finals[cell.span.partition]
        at = within(own.offset, cell.span.range)
        offsets, place = np.unique(own.offset[at], return_inverse=True)
        digest = np.zeros(len(offsets), dtype=np.uint64)
        np.add.at(digest, place, own.digest[at])
        outcome = np.full(len(offsets), ROWS, np.int8)
        return ExpectedRecords(offsets, outcome, np.bincount(place), digest)

    def _extra(self, cell: Cell, offsets: Sequence[int], expected: Expected) -> None:
        """Rows of records that are not the newest of their keys."""
        tp = cell.span.partition
        records: set[int] = set()
        keys: dict[int, list[int]] = {}
        for one in expected.changes(cell.span):
            records |= set(one.records.tolist())
            for offset, key, deleted in zip(
                one.offset.tolist(), one.key.tolist(), one.deleted.tolist(), strict=True
            ):
                if not deleted:
                    keys.setdefault(offset, []).append(key)
        for offset in offsets:
            self._judge(tp, offset, keys.get(offset, []), readable=offset in records)

    def _judge(
        self, tp: TopicPartition, offset: int, keys: Sequence[int], *, readable: bool
    ) -> None:
        audit = self.audit
        if not readable:
            if offset < self.ends.bounds[tp].first:
                audit.doubt(tp, offset, _GONE)
            elif tp.topic in self.ends.compacted:
                audit.doubt(tp, offset, _COMPACTED)
            else:
                audit.damage("unexpected", tp, offset, NO_RECORD)
        elif not keys:
            audit.damage("unexpected", tp, offset, NOT_WANTED)
        elif offset in set(self.rejects[tp].tolist()):
            audit.damage("duplicated", tp, offset, BOTH)
        else:
            self._older(tp, offset, keys)

    def _older(self, tp: TopicPartition, offset: int, keys: Sequence[int]) -> None:
        audit = self.audit
        for key in keys:
            fate = self.newest.fate(key)
            if fate is None or (fate.partition, fate.offset) == (tp, offset):
                continue
            if not fate.sure:
                continue  # all rows of such keys are in doubt
            if not fate.deleted:
                self._stale[fate.partition, fate.offset] = offset
            elif self._replayed:
                audit.doubt(tp, offset, _REPLAYED)
            else:
                detail = f"the record at {fate.partition} offset {fate.offset} deletes its key"
                audit.damage("unexpected", tp, offset, detail)

    def conclude(self) -> None:
        """Report rows that are missing, and older rows in their place."""
        missing = {place: why for place, why in self._missing.items() if place not in self._stale}
        explained = self.others.explain(missing) if missing else {}
        for (tp, offset), detail in missing.items():
            if (tp, offset) not in explained:
                self.audit.damage("lost", tp, offset, f"the newest record of its key: {detail}")
            elif reason := explained[tp, offset]:
                self.audit.doubt(tp, offset, reason)
        for (tp, offset), older in self._stale.items():
            if older > offset and self.others.may_delete(tp, offset):
                self.audit.doubt(tp, offset, DELETED)  # a row of a lower version came after that
                continue
            detail = f"the table has the row of an older record of the key, offset {older}"
            self.audit.damage("altered", tp, offset, detail)
