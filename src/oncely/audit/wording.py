"""The verdict in words, and texts of others made harmless for a reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from oncely.audit.report import KINDS, Finding, FindingKind, Proof, Report

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
