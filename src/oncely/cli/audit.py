"""The reports of ``oncely audit`` and ``oncely verify`` on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby

from rich.text import Text

from oncely.audit.report import KINDS, Finding, Report, Undecided
from oncely.cli import screen, verbs
from oncely.cli.opened import opened
from oncely.cli.options import Result
from oncely.cli.screen import LEFT, RIGHT, show
from oncely.verify.report import FIRST, Broken
from oncely.verify.report import Report as Verified
from oncely.wording import plural

_STYLES = {"clean": "bold green", "damaged": "bold red", "unknown": "bold yellow"}
_PROOFS = {
    "offsets": "each row contains the offset of its record",
    "content": "rows do not contain offsets: their values were compared",
    "counts": "rows do not contain offsets: only their number was compared",
}
_HEADINGS = {
    "lost": "Lost records: neither a row nor a dead letter, or too few rows",
    "duplicated": "Duplicated records: too many rows, or a row and a dead letter",
    "altered": "Altered rows: other values than were committed",
    "unexpected": "Unexpected rows: of no record, or beyond the position",
}


def show_report(report: Report) -> None:
    """Print the verdict, then the partitions, then the damage."""
    out = screen.out
    out.print(Text.assemble((report.verdict, _STYLES[report.verdict]), f"  {_summary(report)}"))
    out.print(Text(f"proof: {_PROOFS[report.proof]}", style="dim"))
    for line in (*report.limits, *_complete(report)):
        out.print(Text(line, style="dim"))
    out.print()
    _show_partitions(report)
    for kind in KINDS:
        _show_findings(kind, [one for one in report.findings if one.kind == kind], report)
    if report.undecided:
        out.print(Text("\nNot proved", style="bold yellow"))
        for one in report.undecided:
            out.print(f"  {_where_undecided(one)}{one.reason}")


def _summary(report: Report) -> str:
    counts = ", ".join(f"{report.found[kind]:,} {kind}" for kind in KINDS if report.found.get(kind))
    whole = f"{report.accounted:,} of {plural(report.records, 'record')} accounted for"
    holes = f", {plural(report.holes, 'hole')}" if report.holes else ""
    return f"{report.pipeline}: {counts + '; ' if counts else ''}{whole}{holes}"


def _complete(report: Report) -> Iterator[str]:
    complete = report.complete_until
    if complete.wall_time:
        yield f"complete until {_shown(complete.wall_time)}"
    if complete.event_time:
        yield f"the last record of that is from {_shown(complete.event_time)}"


def _shown(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _show_partitions(report: Report) -> None:
    show(
        [
            ("partition", LEFT),
            ("from", RIGHT),
            ("position", RIGHT),
            ("end", RIGHT),
            ("records", RIGHT),
            ("accounted", RIGHT),
            ("holes", RIGHT),
        ],
        (
            (
                one.partition,
                one.compared.start,
                one.compared.end,
                one.end,
                one.records,
                Text(f"{one.accounted:,}", style="" if one.accounted == one.records else "red"),
                one.holes,
            )
            for one in report.partitions
        ),
    )


def _show_findings(kind: str, findings: Sequence[Finding], report: Report) -> None:
    if not findings:
        return
    screen.out.print(Text(f"\n{_HEADINGS[kind]}", style="bold red"))
    for line in _lines(findings):
        screen.out.print(f"  {line}")
    left = report.found[kind] - len(findings)  # type: ignore[index]
    if left > 0 and all(one.offset is not None for one in findings):
        screen.out.print(f"  and {left:,} more; --limit shows them")


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Findings with the same explanation on one line, consecutive offsets as a range."""
    for (tp, detail), some in groupby(findings, lambda one: (one.partition, one.detail)):
        offsets = [one.offset for one in some]
        shown = _ranges([one for one in offsets if one is not None])
        where = f"{tp} offset {shown}: " if shown else f"{tp}: " if tp else ""
        yield f"{where}{detail}"


def _ranges(offsets: Sequence[int]) -> str:
    runs: list[tuple[int, int]] = []
    for one in offsets:
        if runs and one == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], one)
        else:
            runs.append((one, one))
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)


def _where_undecided(one: Undecided) -> str:
    if one.partition is None:
        return ""
    return f"{one.partition} {one.range}: " if one.range else f"{one.partition}: "


# -- verify --------------------------------------------------------------------------------


_UNKNOWN = 20  # reasons that are printed


def verify_file(asked: verbs.Verify) -> Result:
    """Check ledger, manifest and event logs."""
    found = opened(asked.file).verify(asked.events or ())
    return Result(found.as_json, partial(_verified, found), found.exit_code)


def _verified(found: Verified) -> None:
    for one in found.unknown[:_UNKNOWN]:
        screen.note(f"unknown: {one.text}")
    if len(found.unknown) > _UNKNOWN:
        screen.note(f"and {len(found.unknown) - _UNKNOWN:,} more that are unknown")
    if found.broken:
        _show_broken(found.broken[0], len(found.broken) - 1)
    checked = ", ".join(f"{count:,} {name}" for name, count in found.checked.items() if count)
    conclusions = {
        "holds": "every step follows from the one before it",
        "broken": "a step is broken",
        "unknown": "no step is broken, as far as it is known",
    }
    screen.out.print(f"{found.pipeline}: {conclusions[found.verdict]} ({checked or 'nothing'})")


def _show_broken(one: Broken, more: int) -> None:
    epoch, offset = one.order
    where = "" if one.order == FIRST else f", epoch {epoch}, offset {offset}"
    screen.out.print(Text(f"broken ({one.rule}{where}): {one.text}", style="bold red"))
    if one.context:
        screen.out.print("around it:")
        for line in one.context:
            screen.out.print(Text(f"  {line}", no_wrap=True, overflow="ignore"), crop=False)
    if more:
        screen.out.print(f"{more:,} other findings may be consequences of it; --json counts them")
