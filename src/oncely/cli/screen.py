"""What the commands print, and where: results on stdout, everything else on stderr.

A command works on one pipeline, whose secrets are taken out of every text on its way out.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from oncely.errors import OncelyError
from oncely.secrets import Secrets

out = Console(highlight=False, markup=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


_secrets = Secrets()


def hide(secrets: Secrets) -> None:
    """Keep these values out of whatever this process prints from now on."""
    global _secrets  # noqa: PLW0603 - a command is a process, and so are its streams
    _secrets = secrets


def redact(text: str) -> str:
    """The text without the secrets of the command's pipeline."""
    return _secrets.redact(text)


def show_json(value: Any) -> None:
    """A result for programs: one JSON document on stdout."""
    sys.stdout.write(json.dumps(_without_secrets(value), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _without_secrets(value: Any) -> Any:
    """Texts alone are redacted: the keys are what programs go by."""
    match value:
        case str():
            return redact(value)
        case dict():
            return {key: _without_secrets(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_without_secrets(inner) for inner in value]
        case _:
            return value


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[object], None]]:
    """A bar on stderr that moves with every call; nothing where stderr is no terminal."""
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


def note(text: str) -> None:
    """A remark for people, on stderr."""
    err.print(Text(redact(text), style="dim"))


def show_error(error: BaseException, *, debug: bool) -> int:
    """Say what went wrong; returns the exit code of the command.

    A traceback is for who asked for it: what we raise on purpose says what to do in words.
    """
    if debug:
        text = "".join(traceback.format_exception(error))
        err.print(Text(redact(text), style="dim"))
    if isinstance(error, OncelyError):
        _complain("\n  ".join([error.message, *error.details]), error.way_out)
        return error.exit_code
    lines = _said(error).strip().splitlines()
    first = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    _complain(
        f"unexpected {first}",
        "" if debug else "run it again with --debug to see where, and report it as a defect",
    )
    return 1


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # PySpark's errors ask the JVM for their text
        return ""


def _complain(message: str, way_out: str) -> None:
    said = Text.assemble(("error: ", "bold red"), redact(message))
    if way_out:
        said.append("\nway out: ", "bold")
        said.append(redact(way_out))
    err.print(said)


def leave_now(code: int) -> None:
    """End the process without waiting for anybody: threads, Spark, exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
