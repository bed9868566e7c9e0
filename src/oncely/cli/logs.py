"""Python's logging, configured once: one line an entry, on stderr, no secrets."""

from __future__ import annotations

import logging
import socketserver
import threading
import time
from pathlib import Path

from rich.text import Text

from oncely.cli import screen

_QUIET = {
    "py4j": logging.CRITICAL,  # logs every error that it also raises
    "py4j.clientserver": logging.CRITICAL,
}
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


class _Lines(logging.Formatter):
    """ISO 8601 in UTC, level, logger, text. Redacted last, tracebacks too."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return screen.redact(super().format(record))


class _Screen(logging.Handler):
    """Prints above whatever is live on the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            screen.err.print(Text(self.format(record), style=_STYLES.get(record.levelno, "")))
        except Exception:
            self.handleError(record)


def configure(*, debug: bool) -> None:
    """Send log entries to stderr: of Oncely from INFO on, of others from WARNING on."""
    handler = _Screen()
    if screen.err.is_terminal:
        handler.setFormatter(_Lines("%(asctime)s %(message)s", "%H:%M:%S"))
        _Lines.default_msec_format = ""
    else:
        handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if not debug:
        handler.addFilter(_is_news)
    _tame_threads(debug=debug)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("oncely").setLevel(logging.DEBUG if debug else logging.INFO)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(logging.WARNING if debug else level)


def _is_news(record: logging.LogRecord) -> bool:
    """False for what py4j logs through the root logger: it raises the same error."""
    return not (record.name == "root" and "py4j" in Path(record.pathname).parts)


def _tame_threads(*, debug: bool) -> None:
    """Errors in threads that are not ours become a line instead of a traceback on stderr.

    When the JVM dies, PySpark's accumulator server and py4j's callback threads each complain.
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
