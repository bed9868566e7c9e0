"""The audit of a destination whose rows do not contain their offsets, group by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oncely.audit.compare import Rules
from oncely.audit.content import Group, GroupComparison, GroupedEvidence, Result
from oncely.audit.engine import Audit, Ends
from oncely.audit.evidence import Span
from oncely.audit.outside import NOT_CONTRADICTED
from oncely.audit.report import Undecided
from oncely.core.digest import Recipe
from oncely.core.ranges import OffsetRange, TopicPartition


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
