"""A contender in a process of its own: a job a line goes in, its answer comes out."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Self

from oncely.errors import Unavailable

_LAST_LINES = 15


class Child:
    """The process; a context manager that ends it.

    It reads jobs from its standard input and ends when that is closed, also by our death.

    Args:
        name: for messages.
        command: program and arguments.
        log: where its standard error goes.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()

    def ask(self, *words: object, timeout: float = 300.0) -> str:
        """Hand over a job and wait for its answer.

        Raises:
            Unavailable: the process ended, or ``timeout`` seconds went by and it was killed;
                with the end of its log.
        """
        timer = threading.Timer(timeout, self._process.kill)
        timer.start()
        try:
            pipe = _pipe(self._process.stdin)
            pipe.write(" ".join(map(str, words)) + "\n")
            pipe.flush()
            answer = _pipe(self._process.stdout).readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            tail = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise Unavailable("\n".join([f"{self.name} ended without an answer", *tail]))
        return answer.strip()


class Children:
    """Several processes that share each job; a context manager that ends all of them."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._left = ExitStack()

    def __enter__(self) -> Self:
        for child in self._children:
            self._left.enter_context(child)
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def ask(self, *words: object, timeout: float = 300.0) -> str:
        """Hand the job to each; the earliest answer in milliseconds, of those that had records."""
        with ThreadPoolExecutor(len(self._children)) as pool:
            answers = list(pool.map(lambda one: one.ask(*words, timeout=timeout), self._children))
        return str(min((int(answer) for answer in answers if int(answer)), default=0))


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
