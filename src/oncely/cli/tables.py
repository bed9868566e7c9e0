"""Tables for the terminal: numbers right-aligned, important columns never cut, few lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from oncely.cli import screen
from oncely.reject_summary import printable

RIGHT, LEFT, REST = "right", "left", "rest"
"""The alignment of a column; a ``rest`` column shrinks when the terminal is narrow."""


_NARROW = 16  # characters; a column of shorter texts is never folded
_PADDING = 3  # between two columns


def show(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout; ``columns`` are (heading, RIGHT | LEFT | REST).

    Numbers and names are never cut. If they are too wide for the terminal, long names continue on
    the next line.
    """
    lines = [[cell(value) for value in row] for row in rows]
    folded = _too_wide(columns, lines)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for at, (heading, stands) in enumerate(columns):
        table.add_column(
            heading,
            justify="right" if stands == RIGHT else "left",
            # These columns keep their width, the others share the rest.
            no_wrap=stands != REST and at not in folded,
            overflow="fold" if at in folded else "ellipsis",
            min_width=8 if stands == REST else None,
        )
    for cells in lines:
        for one, (_, stands) in zip(cells, columns, strict=True):
            if stands == REST:
                one.no_wrap, one.overflow = True, "ellipsis"
        table.add_row(*cells)
    screen.out.print(table, soft_wrap=False)


def _too_wide(columns: Sequence[tuple[str, str]], lines: Sequence[Sequence[Text]]) -> set[int]:
    """The columns of names that must be folded to fit the terminal."""
    widths = [
        8 if stands == REST else max([len(heading), *(one[at].cell_len for one in lines)])
        for at, (heading, stands) in enumerate(columns)
    ]
    if sum(widths) + _PADDING * (len(widths) - 1) <= screen.out.width:
        return set()
    return {at for at, (_, stands) in enumerate(columns) if stands == LEFT and widths[at] > _NARROW}


def cell(value: object) -> Text:
    """A value as text on one line; a missing value is a dash."""
    match value:
        case Text():
            return value
        case None:
            return Text("-", style="dim")
        case bool():
            return Text("yes" if value else "no")
        case int():
            return Text(f"{value:,}")
        case _:
            return Text(printable(re.sub(r"\s*\n\s*", " ", screen.redact(str(value)))))


def short(text: str) -> str:
    """A text of unknown origin for a cell: redacted, then cut if it is long."""
    return printable(screen.redact(text), 200)


def duration(seconds: float | None) -> Text:
    """Seconds in a readable form."""
    if seconds is None:
        return Text("?", style="dim")
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return Text(f"{seconds / size:,.1f} {unit}")
    return Text(f"{seconds:,.1f} s" if seconds else "0 s")
