"""``oncely verify``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.verify.report import FIRST, Broken, Report

_MOST = 20  # reasons that are printed


def verify_file(file: Path, events: Sequence[Path], as_json: bool) -> int:
    """Check ledger, manifest and event logs; returns the exit code."""
    found = opened(file).verify(events)
    if as_json:
        screen.show_json(found.as_json())
    else:
        _show(found)
    return found.exit_code


def _show(found: Report) -> None:
    for one in found.unknown[:_MOST]:
        screen.note(f"unknown: {one.text}")
    if len(found.unknown) > _MOST:
        screen.note(f"and {len(found.unknown) - _MOST:,} more that are unknown")
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
