"""Tables for people: numbers right, nothing cut that matters, no lines round everything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from oncely.cli import screen

RIGHT, LEFT, REST = "right", "left", "rest"
"""How a column stands; a ``rest`` column gives way when the terminal is narrow."""


def show(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout; ``columns`` are (heading, RIGHT | LEFT | REST)."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for heading, stands in columns:
        table.add_column(
            heading,
            justify="right" if stands == RIGHT else "left",
            no_wrap=stands != REST,  # these keep their width, the others share what is left
            min_width=8 if stands == REST else None,
        )
    for row in rows:
        cells = [cell(value) for value in row]
        for one, (_, stands) in zip(cells, columns, strict=True):
            if stands == REST:
                one.no_wrap, one.overflow = True, "ellipsis"
        table.add_row(*cells)
    screen.out.print(table, soft_wrap=False)


def cell(value: object) -> Text:
    """One value as text; what is missing is a dash."""
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
            return Text(screen.redact(str(value)))


def duration(seconds: float | None) -> Text:
    """Seconds for people."""
    if seconds is None:
        return Text("?", style="dim")
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return Text(f"{seconds / size:,.1f} {unit}")
    return Text(f"{seconds:,.1f} s" if seconds else "0 s")
