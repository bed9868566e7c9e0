"""Processes that may be killed, each ready in milliseconds.

A child of the tests imports the heavy modules once, opens no connection and starts no thread,
and forks for every job. So a job is a real process, which SIGKILL ends as it ends any other,
without waiting a second for its imports.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from oncely.testing.processes import await_that


@dataclass(frozen=True)
class Ended:
    """How a job ended: by a signal, by an error (its text), or with a value."""

    signal: int = 0
    error: str = ""
    value: Any = None


class Job:
    """A process that runs one function."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid

    def wait(self) -> Ended:
        """Wait for its end."""
        ended: Ended = self._zygote.ask("wait", self.pid)
        return ended

    def wait_until_stopped(self) -> None:
        """Wait until it has sent SIGSTOP to itself."""
        await_that(lambda: self._state() == "T", f"the stop of process {self.pid}")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]


def kills(calls: Sequence[str], *, every: bool) -> list[dict[str, Any]]:
    """Before each call (or before the first of each verb, and round each COMMIT), and after all.

    After a call is before the next one: a killed process leaves nothing in between.
    """
    last = len(calls) - 1
    verbs = [call.split()[0] for call in calls]
    chosen = {verbs.index(verb) for verb in verbs}
    chosen |= {at + step for at, verb in enumerate(verbs) if verb == "COMMIT" for step in (0, 1)}
    at = range(len(calls)) if every else sorted(chosen - {len(calls)})
    return [*({"call": one} for one in at), {"call": last, "after": True}]


class Zygote:
    """Starts jobs; a context manager that ends with all of them."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.scenarios.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(180)
        self._process.stdout.close()

    def start(self, work: Callable[..., Any], *args: Any) -> Job:
        """Run ``work(*args)``, a function of a module, in a process of its own."""
        return Job(self, self.ask("start", work, args))

    def run(self, work: Callable[..., Any], *args: Any) -> Ended:
        return self.start(work, *args).wait()

    def ask(self, *request: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        _send(self._process.stdin, request)
        return _receive(self._process.stdout)


def _send(to: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    to.write(struct.pack("!Q", len(data)) + data)
    to.flush()


def _receive(source: IO[bytes]) -> Any:
    head = source.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(source.read(struct.unpack("!Q", head)[0]))


def serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a job prints must not be taken for an answer
    results: dict[int, int] = {}
    try:
        while True:
            match _receive(sys.stdin.buffer):
                case ("start", work, args):
                    reader, writer = os.pipe()
                    pid = os.fork()
                    if not pid:
                        os.close(reader)
                        _work(writer, work, args)
                    os.close(writer)
                    results[pid] = reader
                    _send(answers, pid)
                case ("wait", pid):
                    _send(answers, _ended(pid, results.pop(pid)))
    except EOFError:
        for pid in results:
            os.kill(pid, signal.SIGKILL)


def _work(writer: int, work: Callable[..., Any], args: Any) -> None:
    try:
        ended = Ended(value=work(*args))
    except BaseException:
        ended = Ended(error=traceback.format_exc())
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(pickle.dumps(ended))
    os._exit(0)


def _ended(pid: int, reader: int) -> Ended:
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Ended(signal=os.WTERMSIG(status))
    ended: Ended = pickle.loads(data)
    return ended


if __name__ == "__main__":
    # By its name: what __main__ pickles, nobody else can read.
    from tests.scenarios import commit_jobs, zygote

    commit_jobs.warm_up()
    zygote.serve()
