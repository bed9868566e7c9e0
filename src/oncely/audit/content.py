"""Comparison of destinations whose rows do not contain the offsets of their records.

Rows are compared in groups: offsets whose rows can't be told apart, because files or commits share
them. A group is complete if its counts, and its digest if its rows are read, are those that the
ledger states. In a group that differs the records are recomputed by the pipeline's decode and
transform of today, and compared with the rows as a multiset of digests: what is missing names its
record, what is there twice too, and only a row of no record has no offset.

That recomputation decides alone only if the ledger's digest confirms it. Without one a transform
that has changed looks like damage; so damage is reported if the counts show it, or if files are
missing, and the records that are named are those of today's transform.

Ranges that overlap, directly or by a file, are one group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.audit.compare import COUNTS_CHANGED, Rules
from oncely.audit.evidence import Bounds, Log, Snapshot, Span, joined
from oncely.audit.report import Finding, FindingKind, Undecided
from oncely.audit.stored.manifest import Unreadable
from oncely.audit.tally import MODULUS, added
from oncely.core.claim import Counts
from oncely.core.digest import Recipe, kind_of, row_digests
from oncely.core.expected import REJECT, ROWS, Expected
from oncely.core.ranges import OffsetRange, TopicPartition, connected, grouped, normalize

Digests = npt.NDArray[np.uint64]

_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")
_SHOWN = 3  # records of the same content that a finding names


@dataclass(frozen=True)
class Group:
    """Offsets whose rows can't be told apart.

    Attributes:
        name: for messages: files or commits.
        spans: the offsets, of one or several partitions.
        rows: the number of rows that the destination names or contains.
        stated: the ledger's counts and digest of exactly these spans; None if it has none.
        committed: the number of rows that the commits of these spans have added, where the ledger
            has no counts of records; None if it is not known.
        replayed: dead letters of these spans that were replayed, so that they may have rows.
        others: rows of other writers may be among them.
        shared: other writers may add rows, which are no damage, and no proof either.
        damage: what is wrong with the places of the rows, such as a missing file.
        gone: the number of rows that these places have lost.
        doubt: why nothing can be proved of these offsets; empty if it can.
    """

    name: str
    spans: tuple[Span, ...]
    rows: int
    stated: Counts | None = None
    committed: int | None = None
    replayed: int = 0
    others: bool = False
    shared: bool = False
    damage: tuple[str, ...] = ()
    gone: int = 0
    doubt: str = ""

    @property
    def wanted(self) -> int | None:
        """The number of rows that there should be; None if it is not known."""
        return self.committed if self.stated is None else self.stated.rows + self.replayed

    @property
    def within(self) -> tuple[tuple[TopicPartition, OffsetRange], ...]:
        """The offsets, for findings without one."""
        return tuple((one.partition, one.range) for one in self.spans)


class Rows(NamedTuple):
    """Rows of a destination.

    Attributes:
        digests: the digest of each.
        at: says where one is.
        uncovered: their columns that the digests do not cover.
    """

    digests: Digests
    at: Callable[[int], str]
    uncovered: frozenset[str] = frozenset()


class GroupedEvidence(Snapshot, Protocol):
    """A destination in groups, which cover all offsets from the start to the positions.

    Attributes:
        groups: disjoint.
        reads: True if the values of the rows are compared, not only their number.
        unexpected: findings of rows that belong to no group.
    """

    @property
    def groups(self) -> Sequence[Group]: ...  # noqa: D102
    @property
    def reads(self) -> bool: ...  # noqa: D102
    @property
    def unexpected(self) -> Sequence[Finding]: ...  # noqa: D102

    def recipe(self, group: Group) -> str:
        """The columns by which the rows of a group are compared."""

    def contents(self, group: Group, recipe: str) -> Iterable[Rows]:
        """The rows of a group.

        Raises:
            Unreadable: its places have a form that can't be read.
            Unavailable: no answer.
        """

    def rejects(self, spans: Sequence[Span]) -> Sequence[tuple[TopicPartition, int]]:
        """The dead letters of these spans that were not replayed."""


@runtime_checkable
class ComputesDigests(Protocol):
    """A destination that computes the digest of a group where its rows are."""

    def digest_of(self, group: Group) -> int | None:
        """The sum of the digests of the group's rows; None if it can't be computed."""


@dataclass
class Result:
    """The conclusion about a group.

    Attributes:
        records: readable records by partition, or those that the ledger counts if the topic no
            longer holds them.
        bad: records without proof, by partition.
        holes: offsets without a readable record, by partition.
        findings: the damage, and the number of records of each finding.
        undecided: offsets of which nothing can be proved.
        notes: what is wrong with the places of rows that are those of their records.
    """

    group: Group
    records: dict[TopicPartition, int] = field(default_factory=dict)
    bad: Counter[TopicPartition] = field(default_factory=Counter)
    holes: dict[TopicPartition, int] = field(default_factory=dict)
    findings: list[tuple[Finding, int]] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """True if everything was proved."""
        return not self.findings and not self.undecided

    def find(self, finding: Finding, number: int = 1) -> None:
        """Add damage."""
        self.findings.append((finding, number))
        tp = finding.partition or self.group.spans[0].partition
        if finding.kind in ("lost", "altered"):
            self.bad[tp] += number

    def doubt(self, reason: str) -> None:
        """Nothing is proved about the group."""
        for span in self.group.spans:
            self.undecided.append(Undecided(span.partition, span.range, reason))
            self.bad[span.partition] = self.records.get(span.partition, 0)


@dataclass(frozen=True)
class GroupComparison:
    """Compares the groups of a destination.

    Attributes:
        evidence: the destination.
        log: the source topics.
        rules: what the pipeline may make of a record.
        expected: recomputes records; None if that is not possible.
    """

    evidence: GroupedEvidence
    log: Log
    rules: Rules
    expected: Expected | None

    def compare(self, group: Group) -> Result:
        """Compare a group.

        Raises:
            Unavailable: no answer.
        """
        result = Result(group)
        read = list(self.log.readable(group.spans))
        for one in read:
            tp, count = one.span.partition, one.records
            result.records[tp] = result.records.get(tp, 0) + count
            width = one.span.range.end - one.span.range.start
            result.holes[tp] = result.holes.get(tp, 0) + width - count
        deleted = [one for one in read if one.first > one.span.range.start]
        waiting = self.evidence.rejects(group.spans)
        if deleted and group.stated is not None:
            _by_ledger(result, group.stated)
        if group.doubt:
            result.doubt(f"{group.name}: {group.doubt}")
            return result
        try:
            if not self._is_complete(group, result, len(waiting), deleted=bool(deleted)):
                self._descend(group, result, waiting, deleted=bool(deleted))
        except Unreadable as error:
            _by_counts(result, group, str(error))
        return result

    def fits(self, group: Group, ends: Mapping[TopicPartition, Bounds]) -> bool:
        """True if a group may be rows of its records: each is one that they give today, or nothing
        tells. Then it is the ledger that does not fit."""
        if any(tp not in ends or ends[tp].end < one.end for tp, one in group.spans):
            return False  # no records
        if self.expected is None or any(ends[tp].first > one.start for tp, one in group.spans):
            return True
        try:
            rows = Counter(at for one in self._contents(group) for at in one.digests.tolist())
            return rows <= Counter(self._recomputed(self.expected, group).digest.tolist())
        except Unreadable:
            return True

    def _descend(
        self,
        group: Group,
        result: Result,
        waiting: Sequence[tuple[TopicPartition, int]],
        *,
        deleted: bool,
    ) -> None:
        """Compare the records of a group that differs."""
        if self.expected is None or deleted:
            why = "the topic no longer holds these offsets" if deleted else _NO_EXPECTATION
            if group.wanted != group.rows and not group.damage and self._is_stated(group):
                result.doubt(f"{group.name}: {COUNTS_CHANGED}")
            else:
                _by_counts(result, group, why)
            return
        records = self._recomputed(self.expected, group)
        rows = list(self._contents(group))
        found = np.concatenate([np.zeros(0, np.uint64), *(one.digests for one in rows)])
        difference = _Difference(
            result, records, found, set(waiting), lambda: self._contents(group)
        )
        difference.settle(certain=self._certain(group, records))
        if group.damage and result.is_clean:
            _without_effect(result, frozenset[str]().union(*(one.uncovered for one in rows)))

    def _is_complete(self, group: Group, result: Result, waiting: int, *, deleted: bool) -> bool:
        records, stated = sum(result.records.values()), group.stated
        if group.damage:
            return False
        if stated is None:
            one_each = not self.rules.several and not self.rules.filters and not deleted
            same = group.committed in (None, group.rows) and not group.others
            lacking = records - waiting - group.rows
            return one_each and same and lacking == 0 and not self.evidence.reads
        same = (records, waiting + group.replayed) == (stated.records, stated.rejects)
        if not same or not self._right_number(group, stated):
            return False
        return not self.evidence.reads or self._is_stated(group)

    def _is_stated(self, group: Group) -> bool:
        """True if the rows are those of the ledger's digest."""
        known = None if group.stated is None else group.stated.digest
        return known is not None and self.evidence.reads and self._digest(group) == known

    def _right_number(self, group: Group, counts: Counts) -> bool:
        """True if the rows are as many as were committed, and as the replayed records can have."""
        more = group.rows - counts.rows
        if self.rules.several and group.replayed:
            return more >= 0
        return more == group.replayed

    def _contents(self, group: Group) -> Iterable[Rows]:
        return self.evidence.contents(group, self.evidence.recipe(group))

    def _digest(self, group: Group) -> int | None:
        if isinstance(self.evidence, ComputesDigests):
            return self.evidence.digest_of(group)
        return sum(added(one.digests) for one in self._contents(group)) % MODULUS

    def _recomputed(self, expected: Expected, group: Group) -> _Records:
        recipe = self.evidence.recipe(group)
        of_spans = [joined(list(expected.of(span, recipe))) for span in group.spans]
        offset, outcome, rows, digest = joined(of_spans)
        if digest is None:
            raise Unreadable(_NO_DIGESTS)
        place = np.repeat(np.arange(len(of_spans)), [len(one.offset) for one in of_spans])
        return _Records(group.spans, place, offset, outcome, rows, digest)

    def _certain(self, group: Group, records: _Records) -> bool:
        """True if the ledger's digest shows that decode and transform have not changed."""
        stated = group.stated
        return (
            stated is not None and stated.digest is not None
            and added(records.digest[records.outcome == ROWS]) == stated.digest
        )  # fmt: skip


class _Records(NamedTuple):
    """The recomputed records of a group, as columns; ``span`` is the index of a record's span."""

    spans: Sequence[Span]
    span: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    outcome: npt.NDArray[np.int8]
    rows: npt.NDArray[np.int64]
    digest: Digests

    def at(self, index: int) -> tuple[TopicPartition, int]:
        """Topic-partition and offset of a record."""
        return self.spans[self.span[index]].partition, int(self.offset[index])

    def among(self, named: set[tuple[TopicPartition, int]]) -> npt.NDArray[np.bool_]:
        """True for each record that is named."""
        offsets = grouped(named)
        found = np.zeros(len(self.offset), np.bool_)
        first = np.searchsorted(self.span, np.arange(len(self.spans) + 1))  # spans are in order
        for span, start, end in zip(self.spans, first, first[1:], strict=False):
            found[start:end] = np.isin(self.offset[start:end], offsets.get(span.partition, []))
        return found


_NO_DIGESTS = "decode and transform of today do not give the columns of the rows"
_NO_EXPECTATION = "the records can't be recomputed"


def _by_ledger(result: Result, counts: Counts) -> None:
    """The topic no longer holds all records: the ledger has counted them when they were read."""
    first = result.group.spans[0].partition
    missing = counts.records - sum(result.records.values())
    if missing > 0:
        result.records[first] = result.records.get(first, 0) + missing
        result.holes[first] = max(0, result.holes.get(first, 0) - missing)


def _without_effect(result: Result, uncovered: Set[str]) -> None:
    """The places of the rows are damaged, and the rows are those of their records."""
    detail = "; ".join(result.group.damage)
    if uncovered:
        names = ", ".join(sorted(uncovered))
        result.doubt(f"{detail}; the values of these columns can't be compared: {names}")
    else:
        result.notes.append(f"{detail}; no record is affected: the rows are those of its records")


def _by_counts(result: Result, group: Group, why: str) -> None:
    """Without a recomputation only numbers are compared."""
    wanted, detail = group.wanted, "; ".join([group.name, *group.damage])
    partition = group.spans[0].partition if len(group.spans) == 1 else None
    lost = group.gone
    if wanted is not None and not group.others:
        lost = max(lost, wanted - group.rows + group.gone)
        if group.rows > wanted:
            more = group.rows - wanted
            text = f"{more:,} rows more than were committed: {detail}"
            result.find(Finding(partition, None, "duplicated", text, group.within), more)
    if lost > 0:
        text = f"{lost:,} rows of {detail}"
        result.find(Finding(partition, None, "lost", text, group.within), lost)
    result.doubt(f"{detail}: {why}")


class _Difference:
    """Rows that should be there, and rows that are there, as multisets of digests."""

    def __init__(
        self,
        result: Result,
        records: _Records,
        found: Digests,
        waiting: set[tuple[TopicPartition, int]],
        contents: Callable[[], Iterable[Rows]],
    ) -> None:
        self._result, self._group, self._records = result, result.group, records
        self._found, self._contents, self._waiting = found, contents, len(waiting)
        letters = records.among(waiting)
        with_rows = records.outcome == ROWS
        self._wanted = with_rows & ~letters
        self._unkept = (records.outcome == REJECT) & ~letters
        self._known = np.unique(records.digest[with_rows])

    def settle(self, *, certain: bool) -> None:
        """Add findings to the result.

        Args:
            certain: decode and transform are known to be those of the commits.
        """
        if (self._records.rows > 1).any():
            self._totals(certain=certain)
            return
        missing, doubled, foreign = self._compared()
        more = sum(doubled.values()) + sum(foreign.values())
        if not len(missing) and not more:
            return
        if certain or self._group.damage or self._explains(len(missing), more, foreign):
            self._name(missing, doubled, foreign)
            return
        why = (
            f"{len(missing):,} records have no row as today's decode and transform give it, and"
            f" {more:,} rows no record; no digest in the ledger tells a changed transform from"
            " damage"
        )
        _by_counts(self._result, self._group, why)

    def _compared(self) -> tuple[list[int], dict[int, int], dict[int, int]]:
        """The records without row or dead letter; rows that are left, by digest, those of a record
        and those of none."""
        place = np.flatnonzero(self._wanted)
        wanted, count = np.unique(self._records.digest[place], return_counts=True)
        there, number = np.unique(self._found, return_counts=True)
        lacking, surplus = _less(wanted, count, there, number), _less(there, number, wanted, count)
        missing = np.flatnonzero(self._unkept).tolist()
        place = place[np.argsort(self._records.digest[place], kind="stable")]
        behind = np.repeat(np.cumsum(count), count) - np.arange(len(place))  # of its digest
        missing += place[behind <= np.repeat(lacking, count)].tolist()
        of_a_record = np.isin(there, self._known)
        doubled, foreign = (
            dict(zip(there[where].tolist(), surplus[where].tolist(), strict=True))
            for where in ((surplus > 0) & of_a_record, (surplus > 0) & ~of_a_record)
        )
        return sorted(missing), doubled, {} if self._group.others else foreign

    def _explains(self, missing: int, more: int, foreign: Mapping[int, int]) -> bool:
        """True if the ledger's counts lack as many rows and dead letters as were found missing."""
        stated, wanted = self._group.stated, self._group.wanted
        if wanted is None or foreign or self._group.others:
            return False
        lacking = wanted - len(self._found)
        if stated is not None:  # rejects that were replayed are wanted as rows, or were filtered
            lacking += stated.rejects - self._group.replayed - self._waiting
            lacking += len(self._records.offset) - stated.records
        return missing - more == lacking != 0

    def _totals(self, *, certain: bool) -> None:
        """Records with several rows: only their sum is known."""
        records = self._records
        rows, digest = int(records.rows[self._wanted].sum()), records.digest[self._wanted]
        if (added(self._found), len(self._found)) == (added(digest), rows):
            return
        why = "records of several rows can't be named"
        if not certain:
            _by_counts(self._result, self._group, why)
            return
        more = len(self._found) - rows
        kind: FindingKind = "duplicated" if more > 0 else "lost" if more else "altered"
        detail = "; ".join([self._group.name, *self._group.damage])
        number = abs(more) or 1
        text = f"{number:,} rows of {detail}"
        self._result.find(Finding(None, None, kind, text, self._group.within), number)
        self._result.doubt(f"{detail}: {why}")

    def _name(
        self, missing: Sequence[int], doubled: Mapping[int, int], foreign: Mapping[int, int]
    ) -> None:
        group, at = self._group, self._where({*doubled, *foreign})
        detail = "; ".join([group.name, *group.damage])
        strange = [digest for digest, number in foreign.items() for _ in range(number)]
        paired = min(len(missing), len(strange))
        for index, digest in zip(missing, strange[:paired], strict=False):
            text = "; ".join([f"other values in {at.get(digest, group.name)}", *group.damage])
            self._result.find(Finding(*self._records.at(index), "altered", text))
        for index in missing[paired:]:
            self._result.find(Finding(*self._records.at(index), "lost", f"no row in {detail}"))
        if strange[paired:] and group.shared:
            place = at.get(strange[paired], detail)
            number = len(strange) - paired
            self._result.doubt(f"{number:,} rows of no record, by another writer? one is {place}")
        for digest in () if group.shared else strange[paired:]:
            text = f"a row of no record in {at.get(digest, detail)}"
            self._result.find(Finding(None, None, "unexpected", text, group.within))
        if doubled and group.others:
            number = sum(doubled.values())
            self._result.doubt(f"{group.name}: {number:,} rows more than records have, which may be"
                               " another writer's")  # fmt: skip
        for digest, number in () if group.others else doubled.items():
            self._double(digest, number, at.get(digest, detail))

    def _double(self, digest: int, number: int, where: str) -> None:
        records = self._records
        place, ascending = self._by_digest
        first, end = (np.searchsorted(ascending, np.uint64(digest), side) for side in _SIDES)
        same = place[first:end]
        text = f"{number + len(same):,} rows of {len(same):,} records in {where}"
        named = [records.at(int(index)) for index in same[:_SHOWN]]
        if len(same) > 1:
            shown = ", ".join(f"{tp} {offset}" for tp, offset in named)
            text = f"{text}, which have the same values: {shown}"
        self._result.find(Finding(*named[0], "duplicated", text), number)

    @cached_property
    def _by_digest(self) -> tuple[npt.NDArray[np.int64], Digests]:
        """The records with rows, in the order of their digests, and the digests."""
        place = np.flatnonzero(self._records.outcome == ROWS)
        place = place[np.argsort(self._records.digest[place], kind="stable")]
        return place, self._records.digest[place]

    def _where(self, digests: set[int]) -> dict[int, str]:
        """Where the rows of some digests are, the last of each."""
        wanted = np.array(sorted(digests), np.uint64)
        found: dict[int, str] = {}
        for rows in self._contents() if digests else ():
            for index in np.flatnonzero(np.isin(rows.digests, wanted)):
                found[int(rows.digests[index])] = rows.at(int(index))
        return found


def _less(digests: Digests, number: Any, others: Digests, of_others: Any) -> npt.NDArray[np.int64]:
    """By how much each digest is there more often than among the others; all ascending."""
    place = np.searchsorted(others, digests)
    inside = place < len(others)
    there = np.zeros(len(digests), np.int64)
    same = np.flatnonzero(inside)
    same = same[others[place[same]] == digests[same]]
    there[same] = of_others[place[same]]
    return np.asarray(np.maximum(number - there, 0))


@dataclass(frozen=True)
class Node:
    """Something that covers offsets: a file, or an entry of the history.

    Attributes:
        spans: the offsets, of one or several partitions.
        what: the thing itself.
    """

    spans: tuple[Span, ...]
    what: Any


@dataclass(frozen=True)
class Component:
    """Nodes whose offsets overlap, and all their offsets: ascending, disjoint, not touching within
    a partition."""

    spans: tuple[Span, ...]
    nodes: tuple[Node, ...]


def components(
    nodes: Sequence[Node], whole: Mapping[TopicPartition, OffsetRange]
) -> list[Component]:
    """Connected nodes, and the offsets that no node covers, ascending.

    Args:
        nodes: their offsets may reach beyond ``whole``.
        whole: the offsets that the components cover.
    """
    leader = connected([node.spans for node in nodes])
    by_leader = grouped((leader(at), node) for at, node in enumerate(nodes))
    found = [_component(own) for own in by_leader.values()]
    covered = grouped(span for one in found for span in one.spans)
    for tp, range_ in whole.items():
        found += [Component((Span(tp, gap),), ()) for gap in range_.minus(covered.get(tp, ()))]
    return sorted(found, key=lambda one: one.spans)


def _component(nodes: Sequence[Node]) -> Component:
    ranges = grouped(span for node in nodes for span in node.spans)
    spans = [Span(tp, one) for tp, own in sorted(ranges.items()) for one in normalize(own)]
    return Component(tuple(spans), tuple(nodes))


def recipe_of(schema: pa.Schema) -> Recipe:
    """The recipe of all columns that a digest can cover."""
    return Recipe.of({one.name: kind_of(one.type) for one in schema}, offset=False)


def digests_of(rows: pa.Table, recipe: Recipe, at: str) -> Rows:
    """The digest of each row. A column that the rows lack is null in all of them."""
    there = tuple(one for one in recipe.columns if one[0] in rows.column_names)
    uncovered = frozenset(rows.column_names) - {name for name, _ in there}
    return Rows(row_digests(rows, None, Recipe(there, recipe.offset)), lambda _: at, uncovered)
