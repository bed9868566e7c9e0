"""A pipeline as a separate process, and operations on it and all processes below it.

A driver has a JVM below it, which has Python workers: a crash of the machine ends all of them at
once. All functions use process ids that were looked up, never names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

Child = subprocess.Popen[bytes]
"""A child process whose output goes to a file."""

_POLL, _LONGEST_POLL, _SLOWER = 0.01, 0.2, 1.3  # seconds, seconds, from poll to poll
_ENDING = 30.0
_STILL = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@contextlib.contextmanager
def running(file: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Child]:
    """Run ``oncely run FILE`` as a child; remaining processes are killed at the end.

    Args:
        file: the pipeline file; the output goes to a file beside it with the suffix ``.log``.
        arguments: further arguments, such as ``"--until", "latest"``.
        env: additional environment variables.
    """
    with child(["oncely.cli", "run", str(file), *arguments], file.with_suffix(".log"), env) as one:
        yield one


@contextlib.contextmanager
def child(
    module: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[Child]:
    """Run a Python module as a child; it and remaining processes below it are killed at the end.

    Args:
        module: its name, and its arguments.
        log: its output is appended to this file.
        env: additional environment variables.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill_tree(process.pid)
            process.wait(_ENDING)


def tree(pid: int) -> list[psutil.Process]:
    """A process and all descendants, children first; empty if it has ended."""
    try:
        root = psutil.Process(pid)
        return [*reversed(root.children(recursive=True)), root]
    except psutil.NoSuchProcess:
        return []


def kill_tree(pid: int, with_signal: int = signal.SIGKILL) -> None:
    """Signal driver, JVM and workers at once; SIGKILL corresponds to a crash of the machine."""
    send_all(tree(pid), with_signal)


def send_all(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to each process; ended processes are ignored."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stop_all(processes: Sequence[psutil.Process]) -> None:
    """Stop processes (SIGSTOP); returns when none of them runs. Ended processes are ignored.

    A process with several threads runs on until one of them has taken the signal.

    Raises:
        AssertionError: a process did not stop in time.
    """
    send_all(processes, signal.SIGSTOP)
    await_that(lambda: not any(map(_runs, processes)), "processes that stop")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in _STILL
    except psutil.NoSuchProcess:
        return False


def stop_self() -> None:
    """Stop this process; returns when it continues (SIGCONT).

    SIGSTOP goes to the calling thread. A signal to the process is taken by any of its threads, the
    main thread first, and the calling thread runs on until that thread gets a processor: a commit
    that was to be halted is made.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def kill_self() -> None:
    """Kill this process (SIGKILL); does not return."""
    os.kill(os.getpid(), signal.SIGKILL)


def jvm_of(pid: int) -> psutil.Process:
    """The JVM below a driver.

    Raises:
        LookupError: there is no JVM.
    """
    for process in tree(pid):
        if name_of(process) == "java":
            return process
    raise LookupError(f"no JVM below process {pid}")


def name_of(process: psutil.Process) -> str:
    """The name of a process's executable; empty if it has just ended."""
    try:
        name: str = process.name()
    except psutil.Error:
        return ""
    return name


def command_of(process: psutil.Process) -> str:
    """A process's command line; empty if it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # ended, or a zombie that its parent is about to reap
        return ""


def owner_of(port: int, processes: Iterable[psutil.Process]) -> psutil.Process | None:
    """The process that has the TCP connection with a local port."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if any(one.laddr.port == port for one in process.net_connections("tcp")):
                return process
    return None


def await_that(condition: Callable[[], Any], what: str, timeout: float = 180.0) -> Any:
    """Poll until the condition holds, less and less often; its value.

    Args:
        condition: called until its value is true.
        what: a description for the error.
        timeout: seconds.

    Raises:
        AssertionError: it did not hold in time.
    """
    deadline, pause = time.monotonic() + timeout, _POLL
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(pause)
        pause = min(pause * _SLOWER, _LONGEST_POLL)
    raise AssertionError(f"waited {timeout} s in vain: {what}")
