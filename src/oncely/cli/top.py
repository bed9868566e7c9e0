"""``oncely top``: the overview of ``oncely web`` in a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from select import select

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from oncely.cli import screen, verbs
from oncely.cli.screen import cell
from oncely.cli.web import opened_subjects
from oncely.pipeline.status import Level
from oncely.web.model import Overview, Subject, overview
from oncely.web.watch import Watched
from oncely.wording import duration

_STYLES: dict[Level, str] = {
    "fine": "green", "busy": "cyan", "warn": "yellow", "bad": "bold red", "unknown": "dim",
}  # fmt: skip
_MARKS: dict[Level, str] = {"fine": "✓", "busy": "→", "warn": "!", "bad": "✕", "unknown": "?"}

_HEAD, _FOOT = 2, 2  # lines above and below those that scroll
_UP, _DOWN, _PAGE_UP, _PAGE_DOWN = "\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[6~"  # ECMA-48

Read = Sequence[tuple[Subject, Overview | None]]


def top(asked: verbs.Top) -> int:
    """Show the overview until ``q`` or Ctrl-C.

    With ``once``, or into a pipe or a file, prints it once and returns the worst verdict's code.
    """
    found = opened_subjects(asked.paths)
    if asked.once or not screen.out.is_terminal:
        read = read_once(found)
        screen.out.print(rendered(read), soft_wrap=False)
        return max(one.verdict.code for _, one in read)
    watched = [Watched(one, asked.every) for one in found]
    try:
        with Live(console=screen.out, screen=True, auto_refresh=False) as live, keys() as pressed:
            _show(live, watched, pressed)
    except KeyboardInterrupt:
        pass
    finally:
        for one in watched:
            one.close()
    return 0


def _show(live: Live, watched: Sequence[Watched], pressed: Callable[[float], str]) -> None:
    """Until ``q``; arrows, page up and page down scroll."""
    first, key = 0, ""
    while key != "q":
        shown = [(one.subject, one.overview.get()) for one in watched]
        lines = screen.out.render_lines(rendered(shown), pad=False)
        head, body = lines[:_HEAD], lines[_HEAD:]
        room = max(screen.out.height - _HEAD - _FOOT, 1)
        step = {_UP: -1, _DOWN: 1, _PAGE_UP: -room, _PAGE_DOWN: room}.get(key, 0)
        first = max(0, min(first + step, len(body) - room))
        part = f"lines {first + 1} to {min(first + room, len(body))} of {len(body)}; "
        drawn = Group(*(_line(one) for one in (*head, *body[first : first + room])))
        live.update(Group(drawn, _foot(shown, part if len(body) > room else "")), refresh=True)
        key = pressed(0.5)


def _line(segments: Sequence[Segment]) -> Text:
    return Text.assemble(*((one.text, one.style or "") for one in segments))


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """A function that waits some seconds for a key and returns it; "" without one or a terminal."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    from termios import TCSADRAIN, tcgetattr, tcsetattr
    from tty import setcbreak

    file = sys.stdin.fileno()

    def pressed(seconds: float) -> str:
        ready, _, _ = select([file], [], [], seconds)
        return os.read(file, 16).decode(errors="replace") if ready else ""

    before = tcgetattr(file)
    setcbreak(file)
    try:
        yield pressed
    finally:
        tcsetattr(file, TCSADRAIN, before)


def read_once(found: Sequence[Subject]) -> Sequence[tuple[Subject, Overview]]:
    """Read the progress of each, several at a time."""
    with ThreadPoolExecutor(max_workers=min(16, len(found))) as pool:
        return list(zip(found, pool.map(overview, found), strict=True))


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
    if one is not None and one.age:
        sentence += f"; the numbers are {duration(one.age)} old"
    numbers = ["-"] * 5
    if one is not None and one.status is not None:
        age = one.status.lag_seconds
        numbers = [
            f"{one.status.lag:,}",
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


def _foot(read: Read, part: str) -> Text:
    times = [one.at for _, one in read if one is not None]
    said = f"read at {min(times):%H:%M:%S} UTC; " if times else ""
    return Text(f"\n{part}{said}q ends it", style="dim")
