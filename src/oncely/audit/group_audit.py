"""The audit of a destination whose rows do not contain their offsets, group by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oncely.audit.compare import Rules
from oncely.audit.content import Group, GroupComparison, GroupedEvidence, Result
from oncely.audit.engine import Audit, Ends
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition


@dataclass
class ByGroup(Audit):
    """Compares a destination group by group; with ``until`` only groups of which all records are
    before it.

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

    def _outside(self, ends: Ends) -> None:
        del ends
        for finding in self.snapshot.unexpected:
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
