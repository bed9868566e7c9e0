"""From matched ids to a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from oncely.audit.evidence import Bounds, moment, passed_over
from oncely.audit.matching import PLACE, Difference, Line, Matched
from oncely.audit.report import (
    CompleteUntil,
    Finding,
    FindingKind,
    Hour,
    PartitionResult,
    Proof,
    Report,
    Undecided,
)
from oncely.core.ranges import (
    OffsetRange,
    Position,
    SourceIdentity,
    TopicPartition,
    grouped,
    normalize,
)
from oncely.wording import plural

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_DAMAGE: tuple[Literal["lost", "duplicated", "unexpected"], ...] = (
    "lost",
    "duplicated",
    "unexpected",
)
NO_GROUP = "(none)"
_NAMED = 5  # ids that are named where it is not decided which of them are damaged


@dataclass(frozen=True)
class Compared:
    """The records of topics that are compared.

    Attributes:
        ranges: their offsets, fixed before anything is read.
        ends: the last stable offsets at that time.
        by_offset: True if the id of a record is its place.
        skipped: the parts of ``ranges`` that are not compared.
    """

    ranges: Mapping[TopicPartition, OffsetRange]
    ends: Mapping[TopicPartition, Position]
    by_offset: bool = False
    skipped: Mapping[TopicPartition, Sequence[OffsetRange]] = field(default_factory=dict)

    @classmethod
    def between(
        cls,
        begins: Mapping[TopicPartition, Position],
        ends: Mapping[TopicPartition, Position],
        bounds: Mapping[TopicPartition, Bounds],
        *,
        by_offset: bool = False,
        skipped: Mapping[TopicPartition, Sequence[OffsetRange]] | None = None,
    ) -> Compared:
        """The records from some positions to others, without skipped ones, as far as the logs have
        them; the bounds of a log apply where it has no position."""
        ranges = {}
        for tp, one in bounds.items():
            end = min(one.end, ends.get(tp, one.end))
            ranges[tp] = OffsetRange(min(end, max(one.first, begins.get(tp, 0))), end)
        passed = skipped or {}
        inside = {tp: one.minus(one.minus(passed.get(tp, ()))) for tp, one in ranges.items()}
        return cls(ranges, {tp: one.end for tp, one in bounds.items()}, by_offset, inside)

    def width(self, tp: TopicPartition) -> int:
        """The number of offsets that are compared."""
        parts = self.ranges[tp].minus(self.skipped.get(tp, ()))
        return sum(one.end - one.start for one in parts)

    def only(self, side: DataFrame) -> DataFrame:
        """The records of a side without skipped ones."""
        from pyspark.sql import functions as F

        for number, tp in enumerate(self.places):
            for one in self.skipped.get(tp, ()):
                first = (number << self.bits) + one.start
                side = side.where(~F.col(PLACE).between(first, first + one.end - one.start - 1))
        return side

    @property
    def places(self) -> Sequence[TopicPartition]:
        """The partitions by their number in a place."""
        return sorted(self.ranges)

    @property
    def bits(self) -> int:
        """The number of low bits of a place, for the offset: as many as 62 bits leave."""
        return 62 - len(self.ranges).bit_length()

    @property
    def largest(self) -> int:
        """The place's offset of all that do not fit: beyond any log's."""
        return (1 << self.bits) - 1

    def place(self, topic: Column, partition: Column, offset: Column) -> Column:
        """The place of a record; null if it is in none of these partitions."""
        from pyspark.sql import functions as F

        number = F.lit(None).cast("bigint")
        for at, one in enumerate(self.places):
            here = (topic == one.topic) & (partition == one.partition)
            number = F.when(here, F.lit(at).cast("bigint")).otherwise(number)
        within = F.least(offset.cast("bigint"), F.lit(self.largest))
        return F.when(offset >= 0, F.shiftleft(number, self.bits) + within)

    def record(self, place: int) -> tuple[TopicPartition, int]:
        """The inverse of :meth:`place`."""
        return self.places[place >> self.bits], place & self.largest


@dataclass
class Outcome:
    """Numbers and findings of two matched sides, before the report."""

    lines: Sequence[Line]
    compared: Compared | None = None
    keyed: bool = False
    found: Counter[FindingKind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)

    @classmethod
    def of(cls, found: Matched, compared: Compared | None, limit: int, *, keyed: bool) -> Outcome:
        """Collect the numbers, and the first findings of each kind."""
        done = cls(found.lines(), compared, keyed)
        for kind in _DAMAGE:
            if number := done._ids(kind):
                done.found[kind] = number
                listed = found.differences(kind, limit)
                done.findings += [done._finding(kind, one) for one in listed]
        done._without_id()
        if repeated := done._ids("fewer"):
            named = ", ".join(one.id for one in found.differences("fewer", 5))
            done.undecided.append(
                Undecided(
                    None,
                    None,
                    f"{plural(repeated, 'id')} {_occur(repeated)} several times on the left and"
                    f" fewer times on the right, such as {named}: correct only if the right side"
                    " keeps one row of each id (--keyed)",
                )
            )
        return done

    def doubt(self, kind: FindingKind, reason: str) -> None:
        """Turn findings of a kind into something that is not decided."""
        if number := self.found.pop(kind, 0):
            self.findings = [one for one in self.findings if one.kind != kind]
            self.undecided.append(
                Undecided(None, None, f"{plural(number, 'id')} would be {kind}, but {reason}")
            )

    def report(
        self,
        name: str,
        at: datetime,
        seconds: float,
        *,
        source: SourceIdentity | None = None,
        until: datetime | None = None,
    ) -> Report:
        """The report.

        Args:
            name: of the pipeline, or of the two datasets.
            at: when the ends were fixed.
            seconds: the duration.
            source: the ids of the topics.
            until: the time up to which the topic was compared, if it is before ``at``.
        """
        records = sum(one.left for one in self.lines)
        span = sum(map(self.compared.width, self.compared.ranges)) if self.compared else 0
        limits = passed_over(self.compared.skipped, self.compared.ranges) if self.compared else []
        proof: Proof = "offsets" if self.compared and self.compared.by_offset else "content"
        return Report(
            pipeline=name,
            source=source,
            proof=proof,
            at=at,
            seconds=seconds,
            records=records,
            accounted=_accounted(self.lines),
            holes=max(0, span - records) if self.compared else 0,
            findings=self.findings,
            found=self.found,
            undecided=self.undecided,
            partitions=self._partitions(),
            hours=_hours(self.lines),
            complete_until=self._complete_until(at if until is None else min(until, at)),
            limits=limits,
        )

    def _ids(self, match: str) -> int:
        return sum(one.ids for one in self.lines if one.match == match)

    def _finding(self, kind: FindingKind, one: Difference) -> Finding:
        partition, offset = None, None
        if self.compared is not None and one.place is not None:
            partition, at = self.compared.record(one.place)
            offset = at if at < self.compared.largest else None
        records, rows = plural(one.left, "record"), plural(one.right, "row")
        counts = {
            "lost": f"{records}, no row",
            "duplicated": f"{rows} for {records}",
            "unexpected": f"{rows}, no record",
        }[kind]
        by_offset = self.compared is not None and self.compared.by_offset
        return Finding(partition, offset, kind, counts if by_offset else f"id {one.id}: {counts}")

    def _without_id(self) -> None:
        """Records and rows without an id are told; they may be what seems lost or unexpected."""
        without = [one for one in self.lines if one.match == "no id"]
        left, right = sum(one.left for one in without), sum(one.right for one in without)
        if left:
            told = f"{plural(left, 'record')} of the left side {_has(left)} no id (it is null)"
            self.undecided.append(Undecided(None, None, told))
        if right:
            lack = f"{_has(right)} no id (it is null)"
            if self.compared is not None and self.compared.by_offset:
                lack = "names no record" if right == 1 else "name no record"
            told = f"{plural(right, 'row')} of the right side {lack}"
            self.undecided.append(Undecided(None, None, told))
        self._at_least("lost", right, f"{plural(right, 'row')} without an id may be theirs")
        self._at_least("unexpected", left, f"{plural(left, 'record')} without an id may be theirs")

    def _at_least(self, kind: FindingKind, others: int, reason: str) -> None:
        """Of the findings of a kind as many are not decided as there are others without an id."""
        number = self.found[kind]
        named = [one.detail for one in self.findings if one.kind == kind][:_NAMED]
        if others:
            self.doubt(kind, reason)
        if 0 < others < number:
            self.found[kind] = number - others
            text = f"at least {number - others:,} of {number:,} ids: {reason}; {'; '.join(named)}"
            self.findings.append(Finding(None, None, kind, text))

    def _partitions(self) -> list[PartitionResult]:
        if self.compared is None:
            return []
        offsets = grouped(
            (one.partition, OffsetRange(one.offset, one.offset + 1))
            for one in self.findings
            if one.partition is not None and one.offset is not None
        )
        own = grouped((line.partition, line) for line in self.lines)
        # An id counts in the partition of its first record: then holes are known by the sum only.
        exact = all(one.left <= one.ids for one in self.lines)
        return [
            _partition(self.compared, tp, own.get(at, []), normalize(offsets.get(tp, [])), exact)
            for at, tp in enumerate(self.compared.places)
        ]

    def _complete_until(self, at: datetime) -> CompleteUntil:
        if self.compared is None or any(one.range is not None for one in self.undecided):
            return CompleteUntil()
        open_ = [
            one.first
            for one in self.lines
            if one.left and one.match in ("lost", "fewer", "no id") and one.first is not None
        ]
        if open_:
            first = moment(min(open_))
            return CompleteUntil(first, first)
        last: dict[int | None, int] = {}
        for one in self.lines:
            if one.last is not None:
                last[one.partition] = max(one.last, last.get(one.partition, 0))
        return CompleteUntil(moment(min(last.values())) if last else None, at)


def _partition(
    compared: Compared,
    tp: TopicPartition,
    lines: Sequence[Line],
    differing: Sequence[OffsetRange],
    exact: bool,
) -> PartitionResult:
    range_ = compared.ranges[tp]
    records = sum(one.left for one in lines)
    return PartitionResult(
        partition=tp,
        compared=range_,
        end=compared.ends[tp],
        ranges=0 if range_.is_empty else 1,
        differing=differing,
        records=records,
        accounted=_accounted(lines),
        holes=compared.width(tp) - records if exact else 0,
    )


def _occur(number: int) -> str:
    return "occurs" if number == 1 else "occur"


def _has(number: int) -> str:
    return "has" if number == 1 else "have"


def _accounted(lines: Iterable[Line]) -> int:
    kept = {"equal", "duplicated"}
    whole = sum(one.left for one in lines if one.match in kept)
    return whole + sum(one.right for one in lines if one.match == "fewer")


def _hours(lines: Iterable[Line]) -> list[Hour]:
    """The groups in their order; none without ``--by``."""
    groups: dict[str, Counter[str]] = {}
    named = False
    for one in lines:
        if one.match in ("later", "no id"):
            continue
        named |= one.group is not None
        counts = groups.setdefault(NO_GROUP if one.group is None else one.group, Counter())
        counts["topic"] += one.ids if one.left else 0
        counts["sink"] += one.ids if one.right else 0
        counts[one.match] += one.ids
    if not named:
        return []
    return [
        Hour(
            group, one["topic"], one["sink"], one["lost"], one["duplicated"], one["unexpected"]
        )
        for group, one in sorted(groups.items())
    ]  # fmt: skip
