"""Configuration of Python's logging: one line for each entry, on stderr, no secrets."""

from __future__ import annotations

import logging
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from oncely.cli import screen
from oncely.reject_summary import json_line, paragraph, printable

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
        return paragraph(screen.redact(super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line, whatever the texts in it are; the lines of a traceback are indented."""
        return printable(screen.redact(super().formatMessage(record)))


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
        narrow = screen.is_narrow(sys.stderr)
        return json_line(screen.without_secrets(line), narrow=narrow)


class _Screen(logging.Handler):
    """Prints above the live line of the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            shown = self.format(record)
            if isinstance(self.formatter, _Json):
                screen.err.file.write(f"{shown}\n")  # no line of a terminal's width
                screen.err.file.flush()
            else:
                screen.err.print(Text(shown, style=_STYLES.get(record.levelno, "")))
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
    elif screen.err.is_terminal:
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
