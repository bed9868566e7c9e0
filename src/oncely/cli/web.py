"""``oncely web`` and ``oncely top``: the overview of pipelines, as pages and in a terminal."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from oncely.cli import screen, verbs
from oncely.cli.opened import importable, refuse_stdin
from oncely.cli.screen import cell
from oncely.errors import OncelyError, WrongInput
from oncely.extras import require
from oncely.http_server import cannot_listen, parse_address
from oncely.pipeline import Pipeline
from oncely.pipeline.status import Level
from oncely.secrets import Secrets
from oncely.web.access import TOKEN, Access, checked_token, is_loopback
from oncely.web.model import Overview, Problem, Subject, Watched, overview
from oncely.wording import duration

if TYPE_CHECKING:
    import uvicorn


def opened_subjects(paths: Sequence[Path]) -> list[Subject]:
    """The pipelines; their secrets are redacted in all output from now on."""
    refuse_stdin(paths)
    found = subjects_of(paths)
    hidden = Secrets()
    for one in found:
        if one.pipeline is not None:
            hidden |= one.pipeline.secrets
    screen.hide(hidden)
    return found


def serve(asked: verbs.Web) -> None:
    """Serve the pages until a signal.

    Raises:
        ConfigError: the extra is not installed, or the token can be guessed.
        WrongInput: an address that is none of this machine, or that others reach without a token.
        Unavailable: it is taken.
    """
    require("web", "web", "the site")
    from oncely.web.server import Site, server_of

    found, audits, names = opened_subjects(asked.paths), asked.audits, asked.allow_host or ()
    host, port = parse_address("--listen", asked.listen)
    token = _token(asked.token)
    if token is None and (names or not is_loopback(host)):
        raise WrongInput(
            f"--listen {asked.listen}, --allow-host: other machines would read records without a"
            " token",
            way_out=f"set {TOKEN}, or let --token make one; or use neither of these options",
        )
    if audits is not None and not audits.is_dir():
        raise WrongInput(f"--audits {audits}: there is no such folder")
    for one in found:
        if one.pipeline is not None:
            importable(one.pipeline, one.file)
    with _listening(asked.listen, host, port) as listening:
        port = listening.getsockname()[1]
        access = Access.of(host, port, token, names)
        servers: list[uvicorn.Server] = []
        site = Site(
            [Watched(one, asked.every) for one in found], access, audits,
            ended=lambda: any(one.should_exit for one in servers),
        )  # fmt: skip
        servers.append(server_of(site.app()))
        _announce(host, port, token, made=asked.token and TOKEN not in os.environ)
        try:
            _run(servers[0], listening)
        finally:
            site.close()


def _run(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve until a signal, which the server raises again when it has ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _token(make: bool) -> str | None:
    given = os.environ.get(TOKEN)
    if given is not None:
        return checked_token(given)
    return secrets.token_urlsafe(24) if make else None


def _listening(address: str, host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise cannot_listen("--listen", address, error) from None


def _announce(host: str, port: int, token: str | None, *, made: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    screen.out.print(f"http://{shown}:{port}/")
    if made:
        screen.err.print(f"token: {token}")
    elif token is None:
        screen.note("read-only; with --token it also replays dead letters and resets positions")


# -- pipelines -----------------------------------------------------------------------------


def subjects_of(paths: Sequence[Path]) -> list[Subject]:
    """The pipelines, by name.

    A file of a folder that can't be read is shown as such; files without ``[source]`` and
    ``[sink]`` are no pipeline files.

    Raises:
        WrongInput: a file that was named can't be read, there is none, or two have one name.
    """
    found: dict[str, Subject] = {}
    for path in paths:
        inner = sorted(path.glob("*.toml")) if path.is_dir() else []
        listed = [_of_folder(one) for one in inner if _is_pipeline(one)] if path.is_dir() else [
            _named(Pipeline.from_file(path), path)
        ]  # fmt: skip
        for one in listed:
            if one.name in found:
                raise WrongInput(
                    f"{one.file} and {found[one.name].file} are both named {one.name!r}",
                    way_out="name one of the two",
                )
            found[one.name] = one
    if not found:
        shown = ", ".join(map(str, paths))
        raise WrongInput(
            f"there is no pipeline file in {shown}",
            way_out="name a pipeline file, or a folder with *.toml that have [source] and [sink]",
        )
    return [found[name] for name in sorted(found)]


def _named(pipeline: Pipeline, file: Path) -> Subject:
    return Subject(pipeline.settings.name, file, pipeline)


def _of_folder(file: Path) -> Subject:
    try:
        return _named(Pipeline.from_file(file), file)
    except OncelyError as error:
        return Subject(file.name, file, None, Problem.of(error))


def _is_pipeline(file: Path) -> bool:
    """True also for a file that is no TOML: its error is shown."""
    try:
        keys = tomllib.loads(file.read_text("utf-8")).keys()
    except (OSError, ValueError):
        return True
    return {"source", "sink"} <= keys


# -- top ------------------------------------------------------------------------------------

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
