"""Output of the commands: results on stdout, everything else on stderr, the entries of Python's
logging as a line each.

The secrets of the command's pipelines are redacted in every text. The consoles escape control
characters and line breaks in texts of records, servers and handlers: only Oncely's own styles reach
a terminal as control sequences.
"""

from __future__ import annotations

import io
import logging
import os
import re
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from oncely.errors import OncelyError
from oncely.secrets import Secrets
from oncely.wording import BREAK, json_line, paragraph, printable


class Escaping(Console):
    """Escapes texts like :func:`~oncely.wording.paragraph`, also in tables and live lines.

    Texts are redacted, but for those with styles of parts: their callers redact the parts.
    """

    def print(self, *objects: Any, **how: Any) -> None:
        """Print texts whose lines after the first are indented, and other renderables."""
        super().print(*map(_told, objects), **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape what any renderable consists of."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(_escaped(one.text), one.style)


def _escaped(text: str) -> str:
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _told(what: Any) -> Any:
    if isinstance(what, str):
        return Text(paragraph(redact(what)))
    if not isinstance(what, Text):
        return what
    if what.spans:
        breaks = [one.end() for one in BREAK.finditer(what.plain)]
        return Text("  ").join(what.divide(breaks)) if breaks else what
    text = what.copy()
    text.plain = paragraph(redact(what.plain))
    return text


out = Escaping(highlight=False, markup=False, soft_wrap=True)
err = Escaping(stderr=True, highlight=False, markup=False, soft_wrap=True)


_secrets: tuple[Secrets, ...] = ()


def hide(*secrets: Secrets) -> None:
    """Redact these values in all later output of this process.

    Those of several pipelines are not united: a value that one of them shows openly may be a secret
    of another one.
    """
    global _secrets  # noqa: PLW0603 - a command is a process, and so are its streams
    _secrets = secrets


def redact(text: str) -> str:
    """The text without the secrets of the command's pipelines."""
    for one in _secrets:
        text = one.redact(text)
    return text


def show_json(value: Any) -> None:
    """Print a result for programs: one JSON document on stdout."""
    write_json(without_secrets(value))
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Print a value as a line of JSON."""
    sys.stdout.write(json_line(value, narrow=is_narrow(sys.stdout)) + "\n")


def is_narrow(stream: TextIO) -> bool:
    """True if the stream's encoding does not have all of Unicode: JSON is written with escapes."""
    return not (stream.encoding or "utf-8").lower().startswith("utf")


def escape_other_characters() -> None:
    """Escape what the encoding of stdout and stderr does not have, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def without_secrets(value: Any) -> Any:
    """Redact the texts only: programs depend on the keys."""
    match value:
        case str():
            return redact(value)
        case dict():
            return {key: without_secrets(inner) for key, inner in value.items()}
        case list() | tuple():
            return [without_secrets(inner) for inner in value]
        case _:
            return value


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[object], None]]:
    """A progress bar on stderr that moves with every call; nothing if stderr is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda _: progress.advance(task)


def head(title: str, remark: str = "") -> None:
    """Print the heading of a section."""
    text = Text(f"\n{redact(title)}", style="bold")
    if remark:
        text.append(f"  {remark}", style="not bold dim")
    out.print(text)


def note(text: str) -> None:
    """Print a remark on stderr."""
    err.print(Text(redact(text), style="dim"))


def show_error(error: BaseException, *, debug: bool) -> int:
    """Print an error; returns the exit code of the command.

    A traceback is printed only with ``debug``: errors of Oncely contain the way out.
    """
    if debug:
        text = "".join(traceback.format_exception(error))
        err.print(Text(redact(text), style="dim"))
    _complain(*complaint(error, debug=debug))
    return error.exit_code if isinstance(error, OncelyError) else 1


def complaint(error: BaseException, *, debug: bool) -> tuple[str, str]:
    """What an error says, and the way out."""
    if isinstance(error, OncelyError):
        return "\n  ".join([error.message, *error.details]), error.way_out
    lines = _said(error).strip().splitlines()
    first = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    way_out = "" if debug else "run it again with --debug to see where, and report it as a defect"
    return f"unexpected {first}", way_out


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # PySpark's errors fetch their text from the JVM
        return ""


def _complain(message: str, way_out: str) -> None:
    err.print(Text.assemble(("error: ", "bold red"), redact(message)))
    if way_out:
        err.print(Text.assemble(("way out: ", "bold"), redact(way_out)))


def leave_now(code: int) -> None:
    """End the process without waiting for threads, Spark or exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- tables: numbers right-aligned, important columns never cut, few lines -------------------


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
    out.print(table, soft_wrap=False)


def _too_wide(columns: Sequence[tuple[str, str]], lines: Sequence[Sequence[Text]]) -> set[int]:
    """The columns of names that must be folded to fit the terminal."""
    widths = [
        8 if stands == REST else max([len(heading), *(one[at].cell_len for one in lines)])
        for at, (heading, stands) in enumerate(columns)
    ]
    if sum(widths) + _PADDING * (len(widths) - 1) <= out.width:
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
            return Text(printable(re.sub(r"\s*\n\s*", " ", redact(str(value)))))


def short(text: str) -> str:
    """A text of unknown origin for a cell: redacted, then cut if it is long."""
    return printable(redact(text), 200)


def duration(seconds: float | None) -> Text:
    """Seconds in a readable form."""
    if seconds is None:
        return Text("?", style="dim")
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return Text(f"{seconds / size:,.1f} {unit}")
    return Text(f"{seconds:,.1f} s" if seconds else "0 s")


# -- logging --------------------------------------------------------------------------------

_QUIET = {
    "py4j": logging.CRITICAL,  # logs every error that it also raises
    "py4j.clientserver": logging.CRITICAL,
    "psycopg": logging.ERROR,  # warns of the end of a COPY whose session has ended before
}
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


FIELDS = "oncely_fields"
"""The attribute of a log entry that contains its further keys in JSON."""

_only = ""
_among: ContextVar[str] = ContextVar("pipeline", default="")


def named(pipeline: str) -> None:
    """Name the only pipeline of the command in all later entries of this process."""
    global _only  # noqa: PLW0603 - a command is a process
    _only = pipeline


@contextmanager
def among_others(pipeline: str) -> Iterator[None]:
    """Name one of several pipelines in the entries of this context."""
    token = _among.set(pipeline)
    try:
        yield
    finally:
        _among.reset(token)


class _Lines(logging.Formatter):
    """ISO 8601 in UTC, level, logger, pipeline, text. Redacted last, tracebacks too."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        name, among = _among.get() or _only, _among.get()
        record.pipeline = f" [{name}]" if name else ""
        record.among = f" [{among}]" if among else ""
        return paragraph(redact(super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever the texts in it are; the lines of a traceback are indented."""
        return printable(redact(super().formatMessage(record)))


class _Json(logging.Formatter):
    """One object a line; docs/metrics.md describes the keys. Redacted last, tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        time_ = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": time_.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "pipeline": _among.get() or _only or None,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        narrow = is_narrow(sys.stderr)
        return json_line(without_secrets(line), narrow=narrow)


class _Screen(logging.Handler):
    """Prints above the live line of the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            shown = self.format(record)
            if isinstance(self.formatter, _Json):
                err.file.write(f"{shown}\n")  # no line of a terminal's width
                err.file.flush()
            else:
                err.print(Text(shown, style=_STYLES.get(record.levelno, "")))
        except Exception:
            self.handleError(record)


def configure(*, debug: bool, log_format: str = "text", log_level: str | None = None) -> None:
    """Send log entries to stderr: from INFO on for Oncely, from WARNING on for others.

    ``debug`` sends Oncely's from DEBUG on, ``log_level`` all from a level on, but DEBUG and INFO
    only those of Oncely.

    Until `named` is called, the entries name no pipeline: a command begins here, and a process of
    tests runs several.
    """
    named("")
    handler = _Screen()
    if log_format == "json":
        handler.setFormatter(_Json())
    elif err.is_terminal:
        handler.setFormatter(_Lines("%(asctime)s%(among)s %(message)s", "%H:%M:%S"))
        _Lines.default_msec_format = ""
    else:
        handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s%(pipeline)s: %(message)s"))
    if not debug:
        handler.addFilter(_is_news)
    _tame_threads(debug=debug)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    least: int = getattr(logging, (log_level or ("debug" if debug else "info")).upper())
    root.setLevel(max(least, logging.WARNING))
    logging.getLogger("oncely").setLevel(least)
    for name, quiet in _QUIET.items():
        logging.getLogger(name).setLevel(logging.WARNING if debug else max(quiet, least))


def _is_news(record: logging.LogRecord) -> bool:
    """False for the entries of py4j in the root logger: it raises the same errors."""
    return not (record.name == "root" and "py4j" in Path(record.pathname).parts)


def _tame_threads(*, debug: bool) -> None:
    """Log errors in foreign threads as a line, instead of a traceback on stderr.

    When the JVM dies, PySpark's accumulator server and py4j's callback threads each raise.
    """
    log = logging.getLogger("oncely.threads")

    def in_thread(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "?"
        level = logging.DEBUG if _by_spark(args.exc_type) else logging.WARNING
        said = f"{args.exc_type.__name__}: {args.exc_value}"
        log.log(level, "thread %s: %s", name, said, exc_info=args.exc_value if debug else None)

    def in_server(_: object, __: object, client: object) -> None:
        log.debug("answering %s", client, exc_info=debug)

    threading.excepthook = in_thread
    socketserver.BaseServer.handle_error = in_server  # type: ignore[method-assign, assignment]


def _by_spark(error: type[BaseException]) -> bool:
    return error.__module__.startswith("py4j") or issubclass(error, (ConnectionError, EOFError))
