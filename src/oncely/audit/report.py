"""The result of an audit: findings, what could not be decided, the verdict, and its words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition

FindingKind = Literal["lost", "duplicated", "altered", "unexpected"]
"""lost: a record without row and reject; duplicated: a record with too many rows, or with row and
reject; altered: a row with other values than were committed; unexpected: a row of no record, or of
a record beyond the position."""

Verdict = Literal["clean", "damaged", "unknown"]
Proof = Literal["offsets", "content", "counts"]
"""offsets: each row contains its record's offset; content: rows are compared by their values only;
counts: only the number of rows is compared."""

KINDS: tuple[FindingKind, ...] = ("lost", "duplicated", "altered", "unexpected")
EXIT_CODES: Mapping[Verdict, int] = {"clean": 0, "damaged": 1, "unknown": 4}


@dataclass(frozen=True)
class Finding:
    """Damage to one record, or to a row whose record is not known.

    Attributes:
        partition: the record's topic-partition; None if it is not known.
        offset: the record's offset; None if it is not known.
        kind: the kind of damage.
        detail: facts for the user: counts, a file's path, an id, an hour.
        within: where the record or row is, if the offset is not known: offsets by partition.
        file: the file that must not be there.
        record: key and value of the record as texts, for a page; or nothing.
    """

    partition: TopicPartition | None
    offset: int | None
    kind: FindingKind
    detail: str = ""
    within: tuple[tuple[TopicPartition, OffsetRange], ...] = ()
    file: str = ""
    record: tuple[str | None, ...] = ()

    @property
    def place(self) -> tuple[str, int, int]:
        """The key by which findings are sorted; unknown ones come first."""
        topic, number = self.partition or ("", -1)
        return topic, number, -1 if self.offset is None else self.offset

    def as_json(self) -> dict[str, Any]:
        """Keys ``topic``, ``partition``, ``offset``, ``detail``; ``within`` and ``file`` if they
        are known."""
        topic, number = self.partition or (None, None)
        within = [[*tp, one.start, one.end] for tp, one in self.within]
        more = {"within": within, "file": self.file}
        return {
            "topic": topic, "partition": number, "offset": self.offset, "detail": self.detail,
            **{name: value for name, value in more.items() if value},
        }  # fmt: skip


@dataclass(frozen=True)
class Undecided:
    """Offsets of which nothing can be proved, and the reason."""

    partition: TopicPartition | None
    range: OffsetRange | None
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Keys ``topic``, ``partition``, ``start``, ``end``, ``reason``."""
        topic, number = self.partition or (None, None)
        start, end = (self.range.start, self.range.end) if self.range else (None, None)
        return {
            "topic": topic, "partition": number, "start": start, "end": end,
            "reason": self.reason,
        }  # fmt: skip


@dataclass(frozen=True)
class Hour:
    """The counts of one group of the view by identity (``--by``), an hour by default.

    Attributes:
        group: the value of the ``--by`` expression as text.
        topic: the number of distinct ids in the topic, or on the left side.
        sink: the number of distinct ids in the destination, or on the right side.
        missing, duplicated, unexpected: numbers of ids.
    """

    group: str
    topic: int
    sink: int
    missing: int
    duplicated: int
    unexpected: int


@dataclass(frozen=True)
class PartitionResult:
    """The comparison of one topic-partition.

    Attributes:
        compared: the offsets that were compared: from the first to the position.
        end: the last stable offset of the topic when the audit began.
        ranges: the number of committed ranges that were compared.
        differing: those that differed at first, and were compared record by record.
        holes: offsets without a readable record: transaction markers, aborted and compacted
            records, deleted records.
    """

    partition: TopicPartition
    compared: OffsetRange
    end: int
    ranges: int
    differing: Sequence[OffsetRange]
    records: int
    accounted: int
    holes: int


@dataclass(frozen=True)
class CompleteUntil:
    """Up to when everything is proved to have arrived.

    Attributes:
        event_time: the smallest, over the partitions, of the timestamps of the last record up to
            which all is proved.
        wall_time: the time at which the topic's ends were read, if all is proved up to them.
            Otherwise the append time of the first record that is not.
    """

    event_time: datetime | None = None
    wall_time: datetime | None = None

    def as_json(self) -> dict[str, str | None]:
        """ISO 8601 in UTC."""
        return {
            "event_time": self.event_time.isoformat() if self.event_time else None,
            "wall_time": self.wall_time.isoformat() if self.wall_time else None,
        }


@dataclass(frozen=True)
class Report:
    """The result of an audit.

    Attributes:
        pipeline: the pipeline's name, or the two datasets.
        source: cluster and topic ids; None for two datasets.
        proof: what the destination allows to prove.
        at: when the ends were fixed, in UTC.
        seconds: the duration of the audit.
        records: readable records of the compared offsets.
        accounted: those with their rows, or their reject, or filtered.
        holes: offsets without a readable record.
        findings: the first findings of each kind, up to the audit's limit.
        found: the number of findings of each kind, also of those beyond the limit.
        undecided: offsets of which nothing can be proved.
        partitions: the comparison by topic-partition.
        hours: the view by identity.
        limits: what was not compared, and why; and what is wrong with files whose rows are those of
            their records. The verdict does not include it.
        destination: that of a pipeline, for a page.
    """

    pipeline: str
    source: SourceIdentity | None
    proof: Proof
    at: datetime
    seconds: float
    records: int
    accounted: int
    holes: int
    findings: Sequence[Finding] = ()
    found: Mapping[FindingKind, int] = field(default_factory=Counter)
    undecided: Sequence[Undecided] = ()
    partitions: Sequence[PartitionResult] = ()
    hours: Sequence[Hour] = ()
    complete_until: CompleteUntil = CompleteUntil()
    limits: Sequence[str] = ()
    destination: str = ""

    @property
    def verdict(self) -> Verdict:
        """Damage outweighs what is not known; "clean" requires that everything was proved."""
        if any(self.found.values()):
            return "damaged"
        return "unknown" if self.undecided else "clean"

    @property
    def exit_code(self) -> int:
        """0 clean, 1 damaged, 4 unknown."""
        return EXIT_CODES[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """The report for programs; lists of findings end at the audit's limit."""
        by_kind = {kind: [one for one in self.findings if one.kind == kind] for kind in KINDS}
        return {
            "pipeline": self.pipeline,
            "verdict": self.verdict,
            "records": self.records,
            "accounted": self.accounted,
            **{kind: [one.as_json() for one in found] for kind, found in by_kind.items()},
            "found": {kind: self.found.get(kind, 0) for kind in KINDS},
            "holes": self.holes,
            "undecided": [one.as_json() for one in self.undecided],
            "complete_until": self.complete_until.as_json(),
            "proof": self.proof,
            "limits": list(self.limits),
            "at": self.at.isoformat(),
            "seconds": round(self.seconds, 3),
            "partitions": [_partition(one) for one in self.partitions],
            "hours": [vars(one) for one in self.hours],
        }


def _partition(one: PartitionResult) -> dict[str, Any]:
    return {
        "topic": one.partition.topic,
        "partition": one.partition.partition,
        "start": one.compared.start,
        "position": one.compared.end,
        "end": one.end,
        "ranges": one.ranges,
        "differing": [[range_.start, range_.end] for range_ in one.differing],
        "records": one.records,
        "accounted": one.accounted,
        "holes": one.holes,
    }


MEANINGS: dict[FindingKind, str] = {
    "lost": "A record of the source without a row, and without a dead letter.",
    "duplicated": "A record with more rows than it should have, or with a row and a dead letter.",
    "altered": "A row whose values are not those that were committed.",
    "unexpected": "A row of no record, or of a record beyond the committed position.",
}
PROOFS: dict[Proof, str] = {
    "offsets": "Each row names its record's offset. Rows and records are compared one by one.",
    "content": "Rows do not name their records. They are compared by their values.",
    "counts": "Only the numbers of rows and records are compared.",
}


def verdict_sentence(report: Report) -> str:
    """The verdict as a short sentence."""
    if report.verdict == "clean":
        if not report.records:
            return "There are no records to compare"
        once = "" if report.proof == "counts" else ", each once"
        if report.records == 1:
            return f"The one record has arrived{once.replace('each ', '')}"
        return f"All {report.records:,} records have arrived{once}"
    if report.verdict == "damaged":
        found = [(kind, report.found.get(kind, 0)) for kind in KINDS]
        counts = [f"{n:,} {kind}" for kind, n in found if n]
        return f"Damage was found: {join(counts)}"
    return "No damage was found, but not everything could be proved"


def join(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def redacted(report: Report, redact: Callable[[str], str]) -> Report:
    """The report without secrets, for a file that others read."""

    def clean(one: Finding) -> Finding:
        record = tuple(part and redact(part) for part in one.record)
        return replace(one, detail=redact(one.detail), record=record)

    return replace(
        report,
        pipeline=redact(report.pipeline),
        findings=[clean(one) for one in report.findings],
        destination=redact(report.destination),
        undecided=[replace(one, reason=redact(one.reason)) for one in report.undecided],
        hours=[replace(one, group=redact(one.group)) for one in report.hours],
    )
