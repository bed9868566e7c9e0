"""The outcome of a sample as text, for ``oncely plan --sample``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from oncely.cli import screen
from oncely.cli.tables import LEFT, REST, RIGHT, printable, show

if TYPE_CHECKING:
    from oncely.pipeline.trial import Trial

_LONGEST = 200
_UNNAMED = 20


def show_trial(trial: Trial) -> None:
    """Print counts, reasons of rejects, first rows, and members that the schema does not name."""
    screen.head(f"Sample of {trial.records:,} records")
    screen.out.print(f"  {_counts(trial)}")
    if trial.note:
        screen.out.print(Text(f"  note: {trial.note}", style="yellow"))
    if trial.reasons:
        screen.out.print()
        show([("rejects", RIGHT), ("reason", LEFT)], ((n, _line(why)) for why, n in trial.reasons))
        for one in trial.examples:
            screen.out.print(Text(f"  example: {_line(screen.redact(one))}", style="dim"))
    if trial.rows:
        screen.out.print()
        _rows(trial)
    if trial.unnamed:
        _unnamed(trial)


def _counts(trial: Trial) -> str:
    counts = [("rows", trial.rows), ("deletes", trial.tombstones), ("filtered", trial.filtered),
              ("rejects", trial.rejected)]  # fmt: skip
    return ", ".join(f"{count:,} {what}" for what, count in counts if count or what == "rows")


def _rows(trial: Trial) -> None:
    """The first rows, a column of the screen each: a table has more columns than rows here."""
    first = trial.columns[0].values
    show(
        [("column", LEFT), *((f"row {at + 1}", REST) for at in range(len(first)))],
        (
            (one.name, *(value and _line(screen.redact(value)) for value in one.values))
            for one in trial.columns
        ),
    )


def _unnamed(trial: Trial) -> None:
    screen.head("Not in the schema", "members that are ignored")
    named = trial.unnamed[:_UNNAMED]
    show(
        [("values", RIGHT), ("member", LEFT), ("type", REST)],
        ((one.values, _line(one.path), one.type) for one in named),
    )
    if len(trial.unnamed) > len(named):
        screen.out.print(f"{len(trial.unnamed) - len(named):,} more than shown")


def _line(text: str) -> str:
    return printable(text, _LONGEST)
