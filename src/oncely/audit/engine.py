"""The steps of an audit: both ends are fixed, then ranges, then cells, then offsets."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from oncely.audit.compare import Settled
from oncely.audit.evidence import Bounds, Evidence, Expected, Log, Snapshot, Span
from oncely.audit.layout import disorder, parts
from oncely.audit.ranges import NOTHING_LEFT, RangeComparison
from oncely.audit.report import (
    CompleteUntil,
    Finding,
    FindingKind,
    PartitionResult,
    Report,
    Undecided,
)
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition


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
        self._compare(ends)
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
            limits=[*self.snapshot.limits, *self.notes],
        )  # fmt: skip


@dataclass
class ByOffset(Audit):
    """Compares a destination whose rows contain their offsets, range by range."""

    snapshot: Evidence

    def _compare(self, ends: Ends) -> None:
        recipe = "" if self.expected is None else self.expected.recipe
        first = {tp: one.first for tp, one in ends.bounds.items()}
        first |= dict.fromkeys(ends.gone, NOTHING_LEFT)
        comparison = RangeComparison(self.snapshot, self.log, self.expected, first, ends.compacted)
        for one in comparison.run(parts(self.snapshot.committed, ends.compared, recipe)):
            tab = self.tabs[one.part.span.partition]
            tab.ranges += 1
            tab.differing += one.differing
            self._settle(tab, one.part.span, one.settled)

    def _settle(self, tab: Tab, span: Span, done: Settled) -> None:
        result, tp = done.result, span.partition
        tab.records += result.records
        tab.accounted += result.accounted
        tab.holes += result.holes
        for damage in result.damage:
            room = max(0, self.limit - len(self._findings.get(damage.kind, ())))
            for offset in damage.offsets[:room]:
                self._keep(Finding(tp, int(offset), damage.kind, damage.detail))
            self._found[damage.kind] += len(damage.offsets)
            tab.unproved(int(damage.offsets.min()))
        self._take((span,), done.findings, done.undecided)

    def _outside(self, ends: Ends) -> None:
        for batch in self.snapshot.outside(ends.whole):
            for line in batch.to_pylist():
                tp = None if line["topic"] is None else TopicPartition(
                    line["topic"], line["partition"]
                )  # fmt: skip
                detail = _outside(tp, line["offset"], ends.whole)
                self.find(Finding(tp, line["offset"], "unexpected", detail), line["rows"])


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


def _outside(
    tp: TopicPartition | None, offset: int | None, whole: Mapping[TopicPartition, OffsetRange]
) -> str:
    if tp is None or offset is None:
        return "a row without an offset"
    if tp not in whole:
        return "the ledger has no position of this partition"
    if offset >= whole[tp].end:
        return f"beyond the position, {whole[tp].end}"
    return f"before the start of the pipeline, {whole[tp].start}"
