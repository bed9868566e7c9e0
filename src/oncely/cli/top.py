"""``oncely top``: the overview of ``oncely web`` in a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from oncely.cli import screen
from oncely.cli.tables import cell
from oncely.cli.web import opened_subjects
from oncely.web.model import Level, Overview, Subject, duration, overview
from oncely.web.watch import Watched

_STYLES: dict[Level, str] = {
    "fine": "green", "busy": "cyan", "warn": "yellow", "bad": "bold red", "unknown": "dim",
}  # fmt: skip
_MARKS: dict[Level, str] = {"fine": "✓", "busy": "→", "warn": "!", "bad": "✕", "unknown": "?"}

Read = Sequence[tuple[Subject, Overview | None]]


def top(paths: Sequence[Path], every: float, *, once: bool) -> int:
    """Print the overview, once or until Ctrl-C; with ``once`` returns 1 if one has a problem."""
    found = opened_subjects(paths)
    if once:
        with ThreadPoolExecutor(max_workers=min(16, len(found))) as pool:
            read = list(zip(found, pool.map(overview, found), strict=True))
        screen.out.print(rendered(read), soft_wrap=False)
        return int(any(one.verdict.level == "bad" for _, one in read))
    watched = [Watched(one, every) for one in found]
    try:
        with Live(console=screen.out, screen=True, auto_refresh=False) as live:
            while True:
                shown = [(one.subject, one.overview.get()) for one in watched]
                live.update(Group(rendered(shown), _foot(shown)), refresh=True)
                time.sleep(0.5)
    except KeyboardInterrupt:
        return 0
    finally:
        for one in watched:
            one.close()


def rendered(read: Read) -> RenderableType:
    """A table with a line for each pipeline."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False,
        header_style="bold",
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    table.add_column("pipeline", overflow="fold", max_width=20)
    for name in ("lag", "waits", "/s", "rejects", "epoch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for subject, one in read:
        table.add_row(*_row(subject, one))
    return table


def _row(subject: Subject, one: Overview | None) -> list[Text]:
    level: Level = one.verdict.level if one is not None else "unknown"
    sentence = one.verdict.sentence if one is not None else "reading"
    if one is not None and one.problem is not None and one.problem.way_out:
        sentence += f" (way out: {one.problem.way_out})"
    numbers = ["-"] * 5
    if one is not None and one.status is not None:
        age = one.lag_seconds
        numbers = [
            f"{one.lag:,}",
            duration(age) if age else "-",
            "-" if one.per_second is None else f"{one.per_second:,.0f}",
            f"{one.status.rejects:,}",
            str(one.status.epoch),
        ]
    style = _STYLES[level]
    return [
        Text(_MARKS[level], style=style),
        cell(subject.name),
        *(Text(number) for number in numbers),
        Text(sentence, style=style),
    ]


def _foot(read: Read) -> Text:
    times = [one.at for _, one in read if one is not None]
    said = f"read at {min(times):%H:%M:%S} UTC; Ctrl-C ends it" if times else "Ctrl-C ends it"
    return Text(f"\n{said}", style="dim")
