"""The steps of an audit: both ends are fixed, then ranges, then cells, then offsets."""

from __future__ import annotations

import time
from abc import abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter

from oncely.audit.compare import NEITHER, Damage, Rules, Settled
from oncely.audit.content import Group, GroupComparison, GroupedEvidence, Result
from oncely.audit.evidence import (
    Bounds,
    Evidence,
    Expected,
    Log,
    Snapshot,
    Span,
    claimants,
    claimed,
    passed_over,
    skipped,
    told,
)
from oncely.audit.layout import Part, by_partition, disorder, lacking, parts
from oncely.audit.outside import NOT_CONTRADICTED, Outside, compare_letters
from oncely.audit.ranges import NOTHING_LEFT, RangeComparison
from oncely.audit.report import (
    CompleteUntil,
    Finding,
    FindingKind,
    PartitionResult,
    Report,
    Undecided,
)
from oncely.core.batch import IntArray
from oncely.core.claim import SKIPPED
from oncely.core.digest import Recipe
from oncely.core.ranges import OffsetRange, Position, TopicPartition


@dataclass(frozen=True)
class Ends:
    """What is compared.

    Attributes:
        at: when the topic's ends were read.
        whole: per partition, from the start to the position.
        compared: the same, up to ``until``.
        bounds: the bounds of the logs.
        gone: partitions of which the present topic holds nothing: it is another one.
        compacted: the compacted topics.
        undecided: what can't be compared at all.
    """

    at: datetime
    whole: Mapping[TopicPartition, OffsetRange]
    compared: Mapping[TopicPartition, OffsetRange]
    bounds: Mapping[TopicPartition, Bounds]
    gone: frozenset[TopicPartition]
    compacted: frozenset[str]
    undecided: Sequence[Undecided]


@dataclass
class Tab:
    """The sums of one partition."""

    ranges: int = 0
    records: int = 0
    accounted: int = 0
    holes: int = 0
    differing: list[OffsetRange] = field(default_factory=list)
    proved: Position | None = None

    def unproved(self, at: Position) -> None:
        """Note an offset from which on not everything is proved."""
        self.proved = at if self.proved is None else min(self.proved, at)


@dataclass
class Audit:
    """The comparison of a snapshot of a destination with its topics; the steps that are the same
    for all destinations.

    Attributes:
        pipeline: its name.
        snapshot: the destination. It must be older than the answers of ``log``: what is below its
            positions is below the last stable offsets of any later time.
        log: the topics.
        expected: recomputes records; None if that is not possible.
        limit: the findings of each kind that the report lists.
    """

    pipeline: str
    snapshot: Snapshot
    log: Log
    expected: Expected | None
    limit: int
    tabs: dict[TopicPartition, Tab] = field(default_factory=dict, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    _findings: dict[FindingKind, list[Finding]] = field(default_factory=dict, init=False)
    _found: Counter[FindingKind] = field(default_factory=Counter, init=False)
    _undecided: list[Undecided] = field(default_factory=list, init=False)
    _skipped: Mapping[TopicPartition, Sequence[OffsetRange]] = field(
        default_factory=dict, init=False
    )

    def run(self, until: datetime | None) -> Report:
        """Compare.

        Args:
            until: compare only records before this time.

        Raises:
            TopicMissing, WrongInput: it can't be compared.
            Unavailable: no answer.
        """
        ends = self._ends(until)
        self.tabs = {tp: Tab() for tp in ends.compared}
        untold = self.snapshot.untold
        for one in (*ends.undecided, *untold, *disorder(self.snapshot.committed)):
            self.leave(one)
        self._skipped = skipped(self.snapshot.committed)
        self.notes += passed_over(self._skipped, ends.whole)
        self._compare(ends)
        self._letters(ends)
        self._outside(ends)
        self._same_topics_still(ends)
        return self._report(ends, self._complete_until(ends))

    # -- both ends -------------------------------------------------------------------------

    def _ends(self, until: datetime | None) -> Ends:
        evidence, log = self.snapshot, self.log
        ours, now = evidence.source, log.identity()
        at = datetime.now(UTC)
        bounds = log.bounds()
        undecided, gone, whole = [], set(), {}
        for tp, position in sorted(evidence.positions.items()):
            range_ = OffsetRange(min(evidence.started.get(tp, position), position), position)
            problem = _other(tp, ours.cluster_id, now.cluster_id, ours.topic_ids, now.topic_ids)
            if not problem and tp not in bounds:
                problem = "the topic has no such partition"
            if problem:
                gone.add(tp)
                undecided.append(Undecided(tp, range_, problem))
            elif position > bounds[tp].end:
                end = max(range_.start, bounds[tp].end)
                undecided.append(
                    Undecided(
                        tp, OffsetRange(end, position),
                        f"the position is beyond the end of the topic, {bounds[tp].end}: its log"
                        " was cut, or the position was changed",
                    )
                )  # fmt: skip
                range_ = OffsetRange(min(range_.start, end), end)
            whole[tp] = range_
        compared = whole if until is None else self._before(until, whole, gone)
        return Ends(at, whole, compared, bounds, frozenset(gone), log.compacted(), undecided)

    def _before(
        self,
        until: datetime,
        whole: Mapping[TopicPartition, OffsetRange],
        gone: set[TopicPartition],
    ) -> dict[TopicPartition, OffsetRange]:
        ends = self.log.offsets_at(until)
        return {
            tp: OffsetRange(one.start, max(one.start, min(one.end, ends[tp])))
            for tp, one in whole.items()
            if tp not in gone
        }

    def _same_topics_still(self, ends: Ends) -> None:
        """A topic that is made again during the audit has not been read as a whole."""
        ours, now = self.snapshot.source, self.log.identity()
        for tp, range_ in ends.compared.items():
            problem = _other(tp, ours.cluster_id, now.cluster_id, ours.topic_ids, now.topic_ids)
            if problem and tp not in ends.gone:
                self.leave(Undecided(tp, range_, f"{problem}, during the audit"))

    # -- the destination -------------------------------------------------------------------

    @abstractmethod
    def _compare(self, ends: Ends) -> None:
        """Compare the offsets up to the ends."""

    @abstractmethod
    def _outside(self, ends: Ends) -> None:
        """Find rows and dead letters of other offsets."""

    # -- conclusions -----------------------------------------------------------------------

    def _take(
        self,
        spans: Sequence[Span],
        findings: Iterable[tuple[Finding, int]],
        undecided: Iterable[Undecided],
    ) -> None:
        """Add the conclusion about some offsets; each finding with its number of records."""
        for finding, number in findings:
            self.find(finding, number)
            for tp, range_ in spans:
                if finding.partition in (None, tp):
                    at = range_.start if finding.offset is None else finding.offset
                    self.tabs[tp].unproved(at)
        for one in undecided:
            self.leave(one)

    def find(self, finding: Finding, number: int) -> None:
        """Add damage to a number of records."""
        self._found[finding.kind] += number
        if len(self._findings.get(finding.kind, ())) < self.limit:
            self._keep(finding)

    def _keep(self, finding: Finding) -> None:
        self._findings.setdefault(finding.kind, []).append(finding)

    def _altered_at(self, tp: TopicPartition, offset: int, detail: str) -> None:
        """Add an altered row or dead letter."""
        self.find(Finding(tp, offset, "altered", detail), 1)
        self.tabs[tp].unproved(offset)
        self.tabs[tp].accounted -= 1

    def leave(self, one: Undecided) -> None:
        """Add offsets of which nothing is proved."""
        self._undecided.append(one)
        if one.partition in self.tabs and one.range is not None:
            self.tabs[one.partition].unproved(one.range.start)

    def _complete_until(self, ends: Ends) -> CompleteUntil:
        """Up to when all is proved, from the timestamps of the records around the first offset that
        is not."""
        at = {
            tp: range_.end if self.tabs[tp].proved is None else self.tabs[tp].proved or 0
            for tp, range_ in ends.compared.items()
            if tp not in ends.gone
        }
        for tp in ends.bounds.keys() - ends.compared.keys():
            at[tp] = ends.bounds[tp].first  # of a partition without a position nothing was read
        if ends.gone or not at:
            return CompleteUntil()
        times = self.log.times(at)
        event, missing = [], []
        for tp, (before, after) in times.items():
            # Behind the last record there may be holes only: then none is missing.
            behind = after if at[tp] < ends.bounds[tp].end else None
            if behind is not None:
                missing.append(behind)
            if before is not None or behind is not None:
                event.append(before)
        proved = None if None in event else min((one for one in event if one), default=None)
        return CompleteUntil(proved, min(missing, default=ends.at))

    def _letters(self, ends: Ends) -> None:
        """Compare the dead letters with their records."""
        there = {tp: one for tp, one in ends.compared.items() if tp not in ends.gone}
        gone = 0
        for letter, problem in compare_letters(
            self.snapshot.kept(), there, self.log, self.expected
        ):
            gone += problem is None
            if problem:
                self._altered_at(letter.of, letter.offset, problem)
        if gone:
            self.notes.append(
                f"{gone:,} dead letters can't be compared: the topic no longer has their records"
            )

    def _report(self, ends: Ends, complete: CompleteUntil) -> Report:
        kinds = sorted(self._findings)
        findings = [
            one for kind in kinds for one in sorted(self._findings[kind], key=lambda it: it.place)
        ]
        tabs = self.tabs
        return Report(
            pipeline=self.pipeline,
            source=self.snapshot.source,
            proof=self.snapshot.proof,
            at=ends.at,
            seconds=time.monotonic() - self._began,
            records=sum(one.records for one in tabs.values()),
            accounted=sum(one.accounted for one in tabs.values()),
            holes=sum(one.holes for one in tabs.values()),
            findings=findings,
            found=self._found,
            undecided=self._undecided,
            partitions=[
                PartitionResult(
                    tp, ends.compared[tp], ends.bounds[tp].end if tp in ends.bounds else 0,
                    one.ranges, one.differing, one.records, one.accounted, one.holes,
                )
                for tp, one in sorted(tabs.items())
            ],
            complete_until=complete,
            limits=[*self.snapshot.limits, *told(self.snapshot.claims), *self.notes],
        )  # fmt: skip


@dataclass
class ByOffset(Audit):
    """Compares a destination whose rows contain their offsets, range by range."""

    snapshot: Evidence
    _damaged: set[tuple[TopicPartition, int]] = field(default_factory=set, init=False)
    _divided: Sequence[Part] = field(default=(), init=False)

    def _compare(self, ends: Ends) -> None:
        recipe = "" if self.expected is None else self.expected.recipe
        comparison = self._comparison(ends)
        divided = parts(self.snapshot.committed, ends.compared, recipe)
        self._divided = [one for one in divided if one.kind != SKIPPED]
        for one in comparison.run(self._divided):
            tab = self.tabs[one.part.span.partition]
            tab.ranges += 1
            tab.differing += one.differing
            self._settle(tab, one.part.span, one.settled)
        for each in lacking(self._divided, self.expected, comparison.first):
            self.leave(each)
        self._other_columns(comparison, ends)

    def _other_columns(self, comparison: RangeComparison, ends: Ends) -> None:
        """Compare the columns that the history's digests do not cover: all records are decoded."""
        if self.expected is None or not self.expected.others:
            return
        own, others = map(Recipe.parse, (self.expected.recipe, self.expected.others))
        there, rows = dict[TopicPartition, OffsetRange](), 0
        altered: list[tuple[TopicPartition, int]] = []
        names = ", ".join(name for name, _ in others.columns)
        for tp, whole in ends.compared.items():
            low = min(max(whole.start, comparison.first[tp]), whole.end)
            there[tp] = OffsetRange(low, whole.end)
            if low > whole.start and tp not in ends.gone:
                reason = f"{names}: the topic no longer holds the records to compare them with"
                self.leave(Undecided(tp, OffsetRange(whole.start, low), reason))
        for (tp, range_), unable, offsets, number in comparison.other_values(there, own, others):
            rows += number
            if unable:
                self.leave(Undecided(tp, range_, f"{names} can't be compared: {unable}"))
            ours = self._ours(tp, Damage("altered", offsets, ""))
            new = (at for at in ours.tolist() if (tp, at) not in self._damaged)
            altered += [(tp, at) for at in new]
        if 2 * len(altered) > rows:  # decode or transform may have changed, rather than the rows
            reason = f"{len(altered):,} rows have other values of {names} than records give today"
            self.leave(Undecided(None, None, reason))
            return
        divided = by_partition(self._divided)
        for tp, some in groupby(sorted(altered), itemgetter(0)):
            places = [at for _, at in some]
            if end := _changed_at(divided.get(tp, ()), places):
                reason = f"all first rows have other values of {names} than records give today"
                self.leave(Undecided(tp, OffsetRange(ends.compared[tp].start, end), reason))
            for at in places[bisect_left(places, end) :]:
                self._altered_at(tp, at, f"other values of {names}")

    def _comparison(self, ends: Ends) -> RangeComparison:
        first = {tp: one.first for tp, one in ends.bounds.items()}
        first |= dict.fromkeys(ends.gone, NOTHING_LEFT)
        return RangeComparison(self.snapshot, self.log, self.expected, first, ends.compacted)

    def _settle(self, tab: Tab, span: Span, done: Settled) -> None:
        result, tp = done.result, span.partition
        tab.records += result.records
        tab.accounted += result.accounted
        tab.holes += result.holes
        for damage in result.damage:
            offsets = self._ours(tp, damage)
            room = max(0, self.limit - len(self._findings.get(damage.kind, ())))
            for offset in offsets[:room]:
                self._keep(Finding(tp, int(offset), damage.kind, damage.detail))
            if len(offsets):
                self._found[damage.kind] += len(offsets)
            self._damaged.update((tp, at) for at in damage.offsets.tolist())
            tab.unproved(int(damage.offsets.min()))
        findings = done.findings
        if claimants(self.snapshot.claims, *span):
            findings = [one for one in findings if one[0].kind == "lost"]
            if len(findings) < len(done.findings):
                self._contested(*span)
        self._take((span,), findings, done.undecided)

    def _ours(self, tp: TopicPartition, damage: Damage) -> IntArray:
        """The damaged offsets that no other pipeline has committed into the same table, and
        records without any row."""
        if damage.detail == NEITHER:
            return damage.offsets
        contested = claimed(self.snapshot.claims, tp, damage.offsets)
        if contested.any():
            some = damage.offsets[contested]
            self._contested(tp, OffsetRange(int(some.min()), int(some.max()) + 1))
        return damage.offsets[~contested]

    def _contested(self, tp: TopicPartition, range_: OffsetRange) -> None:
        self.leave(Undecided(tp, range_, self._contest(tp, range_)))

    def _contest(self, tp: TopicPartition, range_: OffsetRange) -> str:
        names = claimants(self.snapshot.claims, tp, range_)
        return (
            f"pipeline {names} has committed records of these offsets into the same table, too:"
            " their rows can't be told apart, and a repair leaves them"
        )

    def _outside(self, ends: Ends) -> None:
        outside = Outside(self._comparison(ends), self._divided, ends.bounds, ends.whole)
        for one, number in outside.judged(self.snapshot.outside(ends.whole)):
            self.find(one, number) if isinstance(one, Finding) else self.leave(one)


def _other(
    tp: TopicPartition,
    cluster: str,
    cluster_now: str,
    ids: Mapping[str, str],
    ids_now: Mapping[str, str],
) -> str:
    """The reason why the present topic is not that of the ledger; empty if it is."""
    if cluster != cluster_now:
        return (
            f"the ledger is about Kafka cluster {cluster}, this is {cluster_now}: nothing of the"
            " other cluster's records can be proved"
        )
    ours, now = ids.get(tp.topic), ids_now.get(tp.topic)
    if ours is not None and ours != now:
        return (
            f"the topic was deleted and made again: the ledger is about topic id {ours}, the"
            f" present one is {now}; nothing of the former topic's records can be proved"
        )
    return ""


def _changed_at(divided: Sequence[Part], altered: Sequence[int]) -> Position:
    """The end of the first ranges whose rows are all altered, 0 if there are none: an earlier
    decode or transform may have given them."""
    found = 0
    for part in divided:
        range_, rows = part.span.range, 0 if part.entry is None else part.entry.rows
        number = bisect_left(altered, range_.end) - bisect_left(altered, range_.start)
        if number < rows:
            break
        found = range_.end if number else found
    return found


@dataclass
class ByGroup(Audit):
    """Compares a destination whose rows do not contain their offsets, group by group; with
    ``until`` only groups of which all records are before it.

    Attributes:
        rules: what the pipeline may make of a record.
    """

    snapshot: GroupedEvidence
    rules: Rules

    def _compare(self, ends: Ends) -> None:
        comparison = GroupComparison(self.snapshot, self.log, self.rules, self.expected)
        for group in self.snapshot.groups:
            if _is_inside(group, ends.compared) and not _is_gone(group, ends):
                self._settle(comparison.compare(group))
        if self.expected is not None and self.expected.others:
            columns = Recipe.parse(self.expected.others).columns
            names = ", ".join(name for name, _ in columns)
            self.leave(Undecided(None, None, f"no digest covers the values of {names}"))

    def _outside(self, ends: Ends) -> None:
        comparison = GroupComparison(self.snapshot, self.log, self.rules, self.expected)
        for finding in self.snapshot.unexpected:
            spans = tuple(Span(*one) for one in finding.within if finding.file)
            if spans and comparison.fits(Group(finding.file, spans, 0), ends.bounds):
                for span in spans:
                    self.leave(Undecided(*span, f"{finding.detail}: {NOT_CONTRADICTED}"))
            else:
                self.find(finding, 1)

    def _settle(self, result: Result) -> None:
        for tp, range_ in result.group.spans:
            tab = self.tabs[tp]
            tab.ranges += 1
            if not result.is_clean:
                tab.differing.append(range_)
        for tp, records in result.records.items():
            self.tabs[tp].records += records
            self.tabs[tp].accounted += max(0, records - result.bad[tp])
            self.tabs[tp].holes += result.holes.get(tp, 0)
        self._take(result.group.spans, result.findings, result.undecided)
        self.notes += result.notes


def _is_inside(group: Group, compared: Mapping[TopicPartition, OffsetRange]) -> bool:
    return all(
        one.partition in compared and one.range.end <= compared[one.partition].end
        for one in group.spans
    )


def _is_gone(group: Group, ends: Ends) -> bool:
    """True if the present topic is another one, or ends before the group: that is reported."""
    return any(one.partition in ends.gone for one in group.spans)
