"""The comparison of committed ranges: by sums, then by offset, then by value.

    full      each offset has one row or dead letter, and the history shows that none of them is a
              hole: the topic is not read
    exact     each readable offset has one: the rows are not read
    differing rows and dead letters are read by offset, and their records are recomputed

The values of a range's rows are compared by its digest in the history. Only if that differs, or the
history has none, its records are recomputed and compared cell by cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, groupby, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.audit.compare import (
    COUNTS_CHANGED,
    NOT_WANTED,
    OTHER,
    Compared,
    Damage,
    Rules,
    Settled,
    Stored,
    accounted,
    compare,
    is_exact,
    is_full,
    settle,
)
from oncely.audit.evidence import (
    PRESENT,
    Cell,
    Evidence,
    Expected,
    ExpectedRecords,
    IntArray,
    Log,
    Readable,
    Span,
    Tally,
    joined,
    no_runs,
    within,
)
from oncely.audit.layout import Part, adjacent, parts
from oncely.audit.report import Finding, Undecided
from oncely.audit.tally import MODULUS, added, sum_of
from oncely.core.digest import Recipe
from oncely.core.expected import ROWS
from oncely.core.ranges import OffsetRange, Position, TopicPartition, grouped

_ROWS_AT_ONCE = 500_000  # rows of differing cells that are in memory together
_CELLS_AT_ONCE = 2_000
_ALTERED_AT_ONCE = 200
_READ_AT_ONCE = 500_000  # offsets whose records are recomputed in one go

_SUBSETS = 10_000  # of dead letters, in the search for those that took the place of rows

NOTHING_LEFT = 1 << 62
"""As the first offset of a log: it holds nothing of the pipeline's."""

_NO_DIGEST = "the history has no digest of these rows, and their records can't be recomputed"
_CHANGED = (
    "the rows have other values than the history's digest, and today's decode and transform don't"
    " give that digest either"
)
_OTHER_TODAY = (
    "the history has no digest of these rows, and today's decode and transform give other values"
)
_AS_TODAY = (
    "the rows have the values that decode and transform give today, and not those of the history's"
    " digest: the ledger's digest was changed, or rows were written again by another program after"
    " a change of decode or transform"
)
_GONE = "the topic no longer holds these records: the values of their rows can't be compared"
_REPLACED = "a dead letter in place of the row that was committed"
_ALTERED = "rows of {} have other values than were committed (the digest differs)"


@dataclass(frozen=True)
class Done:
    """The conclusion about a range, and its cells that were compared by offset."""

    part: Part
    settled: Settled
    differing: Sequence[OffsetRange]


@dataclass
class _State:
    """A range that is being compared.

    Attributes:
        passed: the cells that their sums decide, with their tallies.
        others: the tallies of the other cells.
        plain: the result of the other cells by offset alone.
        recomputed: the same with their expected records; None if these are not known.
        expected: the digest of the expected rows of those cells; None if it is not known.
        differing: their offsets.
        whole: the digest of all expected rows, if all cells were recomputed.
        altered: the passed cells whose values differ from their records; None if they were not
            recomputed.
        hidden: offsets with a dead letter whose records give rows today, and the digest of these:
            the destination has refused them, or the dead letter took the place of rows.
    """

    part: Part
    passed: list[tuple[Cell, Tally]] = field(default_factory=list)
    others: list[Tally] = field(default_factory=list)
    plain: Compared = field(default_factory=Compared)
    recomputed: Compared | None = field(default_factory=Compared)
    expected: int | None = 0
    differing: list[OffsetRange] = field(default_factory=list)
    whole: int | None = None
    altered: dict[Cell, Compared] | None = None
    hidden: list[tuple[int, int]] = field(default_factory=list)

    @cached_property
    def replaced(self) -> Sequence[tuple[int, int]]:
        """Those of the hidden records whose rows the history's digest contains."""
        if self.part.digest is None or self.whole is None:
            return ()
        lacking = (self.part.digest - self.whole) % MODULUS
        some = chain.from_iterable(
            combinations(self.hidden, size) for size in (len(self.hidden), *range(len(self.hidden)))
        )
        for one in islice(some, _SUBSETS):
            if lacking and sum(digest for _, digest in one) % MODULUS == lacking:
                return list(one)
        return ()

    @property
    def altered_offsets(self) -> IntArray:
        """The offsets of the passed cells' rows with other values than their records give."""
        damage = [one for cell in (self.altered or {}).values() for one in cell.damage]
        offsets = [one.offsets for one in damage if one.kind == "altered"]
        return np.concatenate([np.zeros(0, np.int64), *offsets])

    @property
    def passed_digest(self) -> int | None:
        """The digest of the rows of the passed cells, recomputed by the destination."""
        return _digest_of([one for _, one in self.passed])

    @property
    def is_stored(self) -> bool:
        """True if the rows are those of the history's digest."""
        stored = _plus(self.passed_digest, _digest_of(self.others))
        return self.part.digest is not None and self.part.digest == stored

    def miscounts(self, result: Compared) -> bool:
        """True if all rows and dead letters are there, and the ledger counts other records."""
        letters = sum(one.rejects for one in (*self.others, *dict(self.passed).values()))
        counts, absent = self.part.counts, sum(map(len, result.maybe_filtered))
        if counts is None or not self.is_stored or letters < counts.rejects:
            return False
        return counts.records - counts.filtered != result.records - absent

    @property
    def is_given(self) -> bool:
        """True if, but for the passed cells, the records give the history's digest."""
        recomputed = _plus(self.passed_digest, self.expected)
        return self.part.digest is not None and self.part.digest == recomputed

    @property
    def as_committed(self) -> bool:
        """True if values need not be compared."""
        return self.is_stored or self.is_given

    @property
    def has_rows(self) -> bool:
        """True if there are values to compare."""
        if self.part.entry is not None:
            return self.part.entry.rows > 0
        return self.plain.rows > 0 or any(one.rows for _, one in self.passed)


@dataclass(frozen=True)
class RangeComparison:
    """The comparison of all ranges.

    Attributes:
        evidence: the destination.
        log: the topics.
        expected: recomputes records, if that is possible.
        first: the first offset that the topic held when the audit began, by partition;
            :data:`NOTHING_LEFT` for another topic.
        compacted: the compacted topics.
    """

    evidence: Evidence
    log: Log
    expected: Expected | None
    first: Mapping[TopicPartition, Position]
    compacted: frozenset[str]

    def run(self, parts: Sequence[Part]) -> Iterator[Done]:
        """Compare ranges; parts, and their cells, ascend."""
        cells = [cell for part in parts for cell in part.cells]
        tallies = dict(zip(cells, self.evidence.tallies(cells), strict=True))
        sums: dict[OffsetRange, int] = {}
        for one in cells:
            range_ = one.span.range
            if range_ not in sums:
                sums[range_] = sum_of([(range_.start, range_.end)])
        full = {
            cell
            for part in parts
            if _is_corroborated(part, tallies)
            for cell in part.cells
            if is_full(cell.span.range, tallies[cell], sums[cell.span.range])
        }
        reads = self._readable([one for one in cells if one not in full])
        waiting: list[_State] = []
        pending: list[tuple[_State, Cell, Readable]] = []
        rows = 0
        for part in parts:
            state = _State(part)
            for cell in part.cells:
                tally = tallies[cell]
                read = None if cell in full else next(reads)
                if read is None or is_exact(read, tally):
                    state.passed.append((cell, tally))
                    continue
                state.others.append(tally)
                pending.append((state, cell, read))
                rows += tally.rows + tally.rejects
                if rows > _ROWS_AT_ONCE or len(pending) > _CELLS_AT_ONCE:
                    self._by_offset(pending)
                    pending, rows = [], 0
            waiting.append(state)
        self._by_offset(pending)
        self._by_value(waiting)
        yield from map(self._conclude, waiting)

    def other_values(
        self, whole: Mapping[TopicPartition, OffsetRange], own: Recipe, others: Recipe
    ) -> Iterator[tuple[Span, str, IntArray, int]]:
        """By partition, the offsets of rows with other values of some columns than their record
        gives, and the number of all rows; or the reason why they can't be compared.

        All columns are compared together: rows of one record that have exchanged such values differ
        in nothing else. The history's digests prove the other columns, also where the transform of
        today gives other values of these.

        Args:
            whole: what is compared; the topic has the records.
            own: the columns that the history's digests cover.
            others: the columns that are compared.
        """
        every = replace(own, columns=tuple(sorted(own.columns + others.columns)))
        for state in self._valued(whole, every):
            span, altered = state.part.span, state.altered_offsets
            if len(altered):
                of_own, of_others = (
                    self._valued(dict([span]), one)[0].altered_offsets for one in (own, others)
                )
                altered = np.setdiff1d(altered, np.setdiff1d(of_own, of_others))
            rows = sum(tally.rows for _, tally in state.passed)
            yield span, self._unable(state) or "", altered, rows

    def _valued(self, whole: Mapping[TopicPartition, OffsetRange], of: Recipe) -> list[_State]:
        """A state for each partition, compared by the values of some columns."""
        divided = parts((), whole, str(of))
        left = iter(self.evidence.tallies([cell for part in divided for cell in part.cells]))
        states = [_State(part, [(cell, next(left)) for cell in part.cells]) for part in divided]
        self._by_value(states)
        return states

    def _readable(self, cells: Sequence[Cell]) -> Iterator[Readable]:
        """What the topics hold of the cells; nothing is read of what they no longer hold."""

        def gone(cell: Cell) -> bool:
            return cell.span.range.end <= self.first[cell.span.partition]

        reads = self.log.readable([cell.span for cell in cells if not gone(cell)])
        for cell in cells:
            if gone(cell):
                yield Readable(cell.span, no_runs(), self.first[cell.span.partition])
            else:
                yield next(reads)

    def against_records(self, cells: Sequence[Cell]) -> Iterator[Compared]:
        """Compare cells, which ascend, with the topic and today's rows of its records alone."""
        stored = stored_by_cell(self.evidence, cells)
        there = [one for one in cells if self.first[one.span.partition] <= one.span.range.start]
        expected = dict(self._recompute(there))
        for cell, read in zip(cells, self._readable(cells), strict=True):
            compacted = cell.span.partition.topic in self.compacted
            rules = Rules(compacted, several=True, filters=True)
            yield compare(read, stored[cell.span], rules, expected.get(cell.span))

    def is_cheap(self, part: Part) -> bool:
        """True if all records of a range are there, and fit into memory."""
        range_ = part.span.range
        there = self.first[part.span.partition] <= range_.start
        return there and range_.end - range_.start <= _READ_AT_ONCE

    def gives_the_same(self, part: Part) -> bool:
        """True if the records of a range give today the rows of the history's digest."""
        rejects = np.array([at for _, at in self.evidence.rejects([part.span])], np.int64)
        found: int | None = 0
        for _, wanted in self._recompute(part.cells):
            found = _plus(found, _digest(wanted, rejects))
        return found == part.digest

    # -- offsets ---------------------------------------------------------------------------

    def _by_offset(self, pending: Sequence[tuple[_State, Cell, Readable]]) -> None:
        """Compare cells offset by offset, with and without their expected records."""
        stored = stored_by_cell(self.evidence, [cell for _, cell, _ in pending])
        there = [cell for _, cell, read in pending if read.first <= cell.span.range.start]
        expected = dict(self._recompute(there))
        for state, cell, read in pending:
            rules = Rules(
                cell.span.partition.topic in self.compacted, state.part.several, state.part.filters
            )
            content, wanted = stored[cell.span], expected.get(cell.span)
            state.differing.append(cell.span.range)
            state.plain.add(compare(read, content, rules))
            if wanted is None or state.recomputed is None:
                state.recomputed = state.expected = None
                continue
            state.recomputed.add(compare(read, content, rules, wanted))
            state.expected = _plus(state.expected, _digest(wanted, content.rejects))
            state.hidden += _hidden(wanted, content.rejects)

    def _recompute(self, cells: Sequence[Cell]) -> Iterator[tuple[Span, ExpectedRecords]]:
        """The expected records of cells, of adjacent ones in one go."""
        if self.expected is None:
            return
        for some in adjacent(cells, _READ_AT_ONCE):
            tp, recipe = some[0].span.partition, some[0].recipe
            whole = OffsetRange(some[0].span.range.start, some[-1].span.range.end)
            records = joined(list(self.expected.of(Span(tp, whole), recipe)))
            for cell in some:
                yield cell.span, _between(records, cell.span.range)

    # -- values ----------------------------------------------------------------------------

    def _by_value(self, states: Sequence[_State]) -> None:
        """Recompute the passed cells of ranges with other digests, and compare those that differ.

        The rows of cells of many ranges are read by one statement.
        """
        pending: list[tuple[_State, Cell, ExpectedRecords]] = []
        for state in states:
            if self._unable(state) is not None:
                continue
            state.altered, state.whole = {}, state.expected
            tallies = dict(state.passed)
            for some in _groups(list(tallies)):
                letters = grouped(self.evidence.rejects([one.span for one in some]))
                by_span = {one.span: one for one in some}
                for span, wanted in self._recompute(some):
                    tally = tallies[by_span[span]]
                    own = np.array(letters.get(span.partition, ()), dtype=np.int64)
                    digest = _digest(wanted, own)
                    state.hidden += _hidden(wanted, own)
                    state.whole = _plus(state.whole, digest)
                    if digest != (tally.digest if tally.rows else 0):
                        pending.append((state, by_span[span], wanted))
                if len(pending) > _ALTERED_AT_ONCE:
                    self._altered(pending)
                    pending = []
        self._altered(pending)

    def _altered(self, pending: Sequence[tuple[_State, Cell, ExpectedRecords]]) -> None:
        """Compare the values of cells in which each record has its row or dead letter."""
        stored = stored_by_cell(self.evidence, [cell for _, cell, _ in pending])
        for state, cell, wanted in pending:
            tp, range_ = cell.span
            content = stored[cell.span]
            offsets = np.union1d(content.offsets, content.rejects)
            read = Readable(cell.span, np.stack([offsets, offsets + 1], axis=1), 0)
            rules = Rules(tp.topic in self.compacted, state.part.several)
            one = compare(read, content, rules, wanted)
            one.holes = range_.end - range_.start - len(offsets)
            if state.altered is not None:
                state.altered[cell] = one

    def _unable(self, state: _State) -> str | None:
        """The reason why values can't be compared record by record; None: they can, empty: they
        need not be."""
        part = state.part
        if not state.has_rows or state.as_committed:
            return ""
        unable = self.evidence.unable(part.recipe) if part.recipe else _NO_DIGEST
        if unable or self.expected is None:
            return unable or _NO_DIGEST
        gone = self.first[part.span.partition] > part.span.range.start
        return _GONE if gone or state.recomputed is None else None

    def _conclude(self, state: _State) -> Done:
        """Settle a range."""
        plain = _passed(state.passed)
        plain.add(state.plain)
        unable = self._unable(state)
        if unable is None:
            settled = self._recomputed(state, plain)
        elif unable:
            settled = self._unproved(state, plain, unable)
        else:
            settled = self._as_committed(state, plain)
        return Done(state.part, settled, state.differing)

    def _as_committed(self, state: _State, plain: Compared) -> Settled:
        """The conclusion, if values need not be compared. A transform that has changed since says
        nothing about rows that are those of the history's digest."""
        if state.is_stored and not state.is_given:
            if state.miscounts(plain):
                return _with_reason(Settled(plain), state.part, COUNTS_CHANGED)
            return settle(state.part, plain, stored=True)
        if state.recomputed is None:
            return settle(state.part, plain)
        best = _passed(state.passed)
        best.add(state.recomputed)
        return settle(state.part, best, recomputed=True)

    def _recomputed(self, state: _State, plain: Compared) -> Settled:
        """The conclusion, if today's decode and transform give the history's digest; or if there is
        none, the values that the rows have."""
        part, altered = state.part, state.altered or {}
        result = _passed((cell, tally) for cell, tally in state.passed if cell not in altered)
        for one in (*altered.values(), state.recomputed or Compared()):
            result.add(one)
        if part.digest is None:
            if any(one.detail in (OTHER, NOT_WANTED) for one in result.damage):
                return _with_reason(settle(part, plain), part, _OTHER_TODAY)
            return settle(part, result, recomputed=True)
        if state.replaced:
            offsets = np.array(sorted(offset for offset, _ in state.replaced), np.int64)
            result.damage.append(Damage("lost", offsets, _REPLACED))
            result.accounted -= len(offsets)
        if state.replaced or state.whole == part.digest:
            return settle(part, result, recomputed=True)
        if not altered and not state.differing:
            return _with_reason(settle(part, plain), part, _AS_TODAY)
        return self._unproved(state, plain, _CHANGED)

    def _unproved(self, state: _State, plain: Compared, reason: str) -> Settled:
        """The offsets alone: the values are altered, or it is not known."""
        part = state.part
        settled = settle(part, plain)
        known = part.digest is not None and state.passed_digest is not None
        if known and not state.differing and reason in (_NO_DIGEST, _GONE, _CHANGED):
            tp, range_ = part.span
            settled.find(Finding(tp, None, "altered", _ALTERED.format(range_)), 1)
            return settled
        return _with_reason(settled, part, reason)


def _is_corroborated(part: Part, tallies: Mapping[Cell, Tally]) -> bool:
    """True if the history shows that no hole of the range has a row."""
    counts, range_ = part.counts, part.span.range
    if counts is None:
        return False
    if counts.records == range_.end - range_.start:
        return True
    own = [tallies[cell] for cell in part.cells]
    there = sum(one.rows for one in own), sum(one.rejects for one in own)
    same = there == (counts.rows, counts.rejects)
    return same and counts.digest is not None and counts.digest == _digest_of(own)


def _with_reason(settled: Settled, part: Part, reason: str) -> Settled:
    settled.undecided.append(Undecided(*part.span, reason))
    return settled


def _passed(cells: Iterable[tuple[Cell, Tally]]) -> Compared:
    """The result of cells that their sums decide."""
    result = Compared()
    for cell, tally in cells:
        result.add(accounted(cell.span.range, tally))
    return result


def _digest_of(tallies: Sequence[Tally]) -> int | None:
    digests = [one.digest for one in tallies if one.rows]
    return None if None in digests else sum(filter(None, digests)) % MODULUS


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else (one + other) % MODULUS


def _digest(expected: ExpectedRecords, rejects: IntArray) -> int | None:
    """The digest of the expected rows, without those of records that are dead letters: the
    destination may have refused them."""
    if expected.digest is None:
        return None
    return added(expected.digest[~np.isin(expected.offset, rejects)])


def _hidden(expected: ExpectedRecords, rejects: IntArray) -> list[tuple[int, int]]:
    """The dead letters of records that give rows, and the digest of these."""
    if expected.digest is None:
        return []
    hit = (expected.outcome == ROWS) & np.isin(expected.offset, rejects)
    return list(zip(expected.offset[hit].tolist(), expected.digest[hit].tolist(), strict=True))


def _groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells whose rows may be in memory together."""
    some: list[Cell] = []
    size = 0
    for cell in cells:
        some.append(cell)
        size += cell.span.range.end - cell.span.range.start
        if size >= _READ_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _between(records: ExpectedRecords, range_: OffsetRange) -> ExpectedRecords:
    own = within(records.offset, range_)
    return ExpectedRecords(
        records.offset[own],
        records.outcome[own],
        records.rows[own],
        None if records.digest is None else records.digest[own],
    )


# -- the destination by offset -------------------------------------------------------------


def stored_by_cell(evidence: Evidence, cells: Sequence[Cell]) -> dict[Span, Stored]:
    """The destination's content of some cells, by offset."""
    if not cells:
        return {}
    lines = pa.Table.from_batches(evidence.rows(cells), PRESENT)
    rejects = grouped(evidence.rejects([cell.span for cell in cells]))
    by_topic = {}
    for topic, own in groupby(sorted({cell.span.partition for cell in cells}), lambda it: it.topic):
        mine = lines.filter(pc.equal(lines.column("topic"), topic))
        for tp in own:
            number = pc.equal(mine.column("partition"), tp.partition)
            by_topic[tp] = mine.filter(number).sort_by("offset")
    found = {}
    for cell in cells:
        tp, range_ = cell.span
        letters = np.array(sorted(set(rejects.get(tp, ()))), dtype=np.int64)
        found[cell.span] = _stored(by_topic[tp], range_, letters[within(letters, range_)])
    return found


def _stored(lines: pa.Table, range_: OffsetRange, rejects: IntArray) -> Stored:
    own = lines[within(lines.column("offset").to_numpy(), range_)]
    offsets, place = np.unique(own.column("offset").to_numpy(), return_inverse=True)
    rows = np.zeros(len(offsets), dtype=np.int64)
    np.add.at(rows, place, own.column("rows").to_numpy())
    digests = None
    if not own.column("digest").null_count:
        digests = np.zeros(len(offsets), dtype=np.uint64)
        np.add.at(digests, place, own.column("digest").to_numpy())
    return Stored(offsets, rows, digests, rejects)
