"""The audit of a destination whose rows do not contain their offsets, group by group."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from oncely.audit.compare import Rules
from oncely.audit.content import Group, GroupComparison, GroupedEvidence, Result
from oncely.audit.engine import Audit, Ends
from oncely.audit.evidence import Expected, Log
from oncely.audit.report import Report
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition


def audit_groups(
    pipeline: str,
    evidence: GroupedEvidence,
    log: Log,
    rules: Rules,
    expected: Expected | None = None,
    *,
    limit: int = 50,
    until: datetime | None = None,
) -> Report:
    """Compare a snapshot of a destination with its topics.

    Args:
        pipeline: its name.
        evidence: the snapshot, older than the answers of ``log``.
        log: the topics.
        rules: what the pipeline may make of a record.
        expected: recomputes records; None if that is not possible.
        limit: the findings of each kind that the report lists.
        until: compare only groups of which all records are before this time.

    Raises:
        TopicMissing, WrongInput: it can't be compared.
        Unavailable: no answer.
    """
    return _ByGroup(pipeline, evidence, log, rules, expected, limit).run(until)


class _ByGroup(Audit):
    def __init__(
        self,
        pipeline: str,
        evidence: GroupedEvidence,
        log: Log,
        rules: Rules,
        expected: Expected | None,
        limit: int,
    ) -> None:
        super().__init__(pipeline, evidence, log, limit)
        self._evidence = evidence
        self._comparison = GroupComparison(evidence, log, rules, expected)

    def _compare(self, ends: Ends) -> None:
        for group in self._evidence.groups:
            if _is_inside(group, ends.compared) and not _is_gone(group, ends):
                self._take_group(self._comparison.compare(group))

    def _outside(self, ends: Ends) -> None:
        del ends
        for finding in self._evidence.unexpected:
            self.find(finding, 1)

    def _take_group(self, result: Result) -> None:
        group = result.group
        for span in group.spans:
            tab = self.tabs[span.partition]
            tab.ranges += 1
            if not result.is_clean:
                tab.differing.append(span.range)
        for tp, records in result.records.items():
            self.tabs[tp].records += records
            self.tabs[tp].accounted += max(0, records - result.bad[tp])
            self.tabs[tp].holes += result.holes.get(tp, 0)
        for finding, number in result.findings:
            self.find(finding, number)
            for span in group.spans:
                if finding.partition in (None, span.partition):
                    at = span.range.start if finding.offset is None else finding.offset
                    self.tabs[span.partition].unproved(at)
        for one in result.undecided:
            self.leave(one)
        self.notes += result.notes


def _is_inside(group: Group, compared: Mapping[TopicPartition, OffsetRange]) -> bool:
    return all(
        one.partition in compared and one.range.end <= compared[one.partition].end
        for one in group.spans
    )


def _is_gone(group: Group, ends: Ends) -> bool:
    """True if the present topic is another one, or ends before the group: that is reported."""
    return any(one.partition in ends.gone for one in group.spans)
