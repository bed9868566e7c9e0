"""The command line as a user has it: its exit code, and what it printed.

A command runs in the test's own process, on the Spark session that the tests share; what libraries
print to the file descriptors counts, too. With ``alone=True`` it is a process of its own: signals,
the start of Spark, and Python workers that print need that.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from typing import IO, Any
from unittest import mock

from typer.main import get_command

from oncely.cli import options, screen, verbs
from oncely.config import parse
from oncely.errors import Fenced
from oncely.pipeline import Pipeline
from oncely.runtimes.spark import session
from oncely.testing.processes import await_that
from oncely.threads import StopSignal
from tests.conftest import repository

Done = subprocess.CompletedProcess[str]


def run(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    alone: bool = False,
) -> Done:
    """Run a command to its end.

    Args:
        arguments: behind ``oncely``.
        env: environment variables beside ours.
        timeout: seconds, for a process of its own.
        alone: in a process of its own.
    """
    words = [str(one) for one in arguments]
    if not alone:
        return _run_here(words, env or {})
    return subprocess.run(
        [sys.executable, "-m", "oncely.cli", *words],
        cwd=repository(),
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _run_here(words: list[str], env: Mapping[str, str]) -> Done:
    code: Any = 0
    with (
        _caught(1, redirect_stdout) as out,
        _caught(2, redirect_stderr) as err,
        _as_in_a_new_process(words, env),
    ):
        try:
            verbs.main()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(words, int(code or 0), out.getvalue(), err.getvalue())


@cache
def _command() -> Any:
    """The commands and options, which Typer makes anew for each call."""
    return get_command(verbs.app)


@contextmanager
def _caught(number: int, redirect: Callable[[IO[str]], Any]) -> Iterator[io.StringIO]:
    """What goes to a file descriptor, and to Python's stream on top of it."""
    text = io.StringIO()
    kept = os.dup(number)
    stream = os.fdopen(number, "w", buffering=1, closefd=False)  # loggers may keep it: never closed
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), number)
        try:
            with redirect(stream):
                yield text
        finally:
            stream.flush()
            os.dup2(kept, number)
            os.close(kept)
            file.seek(0)
            text.write(file.read())


@contextmanager
def _as_in_a_new_process(words: list[str], env: Mapping[str, str]) -> Iterator[None]:
    """What a command changes in its process is as before afterwards; Spark goes on running."""
    root, ours = logging.getLogger(), logging.getLogger("oncely")
    loggers = [root, ours, *map(logging.getLogger, ("py4j", "py4j.clientserver"))]
    levels = [one.level for one in loggers]
    with (
        mock.patch.object(verbs, "app", _command()),
        mock.patch.object(sys, "argv", ["oncely", *words]),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.dict(os.environ, env),
        mock.patch.object(threading, "excepthook"),
        mock.patch.object(socketserver.BaseServer, "handle_error"),
        mock.patch.object(screen, "_secrets"),
        mock.patch.dict(options.log, {"debug": False, "log_format": "text", "log_level": None}),
        mock.patch.object(session, "_ours", session._Ours()),
        mock.patch.object(root, "handlers", list(root.handlers)),
    ):
        screen.hide(screen.Secrets())
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def oncely(*arguments: object, expect: int = 0, **more: Any) -> Done:
    """Run a command to its end and check its exit code; nothing that it prints is a traceback."""
    done = run(*arguments, **more)
    assert done.returncode == expect, f"exit code {done.returncode}\n{done.stderr}\n{done.stdout}"
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


def oncely_json(*arguments: object, expect: int = 0, **more: Any) -> Any:
    """Run a command with ``--json``; stdout is exactly one JSON document."""
    return json.loads(oncely(*arguments, "--json", expect=expect, **more).stdout)


def reset_fences_a_run(world: Any, spark: Any, written: Callable[[], bool]) -> None:
    """A reset to offset 30, while a run waits for records, ends the run.

    Args:
        world: has a pipeline file.
        spark: a session.
        written: true when all records were written.
    """
    stop, caught = StopSignal(), []

    def running() -> None:
        try:
            Pipeline(parse(world.settings())).run(stop=stop, spark=spark)
        except Fenced as error:
            caught.append(error)

    thread = threading.Thread(target=running)
    thread.start()
    try:
        await_that(written, "all records")
        oncely("offsets", "reset", world.file(), "--to-offset", "30", "--execute")
        thread.join(180)
        assert caught
    finally:
        stop.ask()
        stop.ask()
        thread.join(180)
