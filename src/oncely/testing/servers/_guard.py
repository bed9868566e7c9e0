"""The guard: starts a server as its child and ends it when the starting process is gone.

It is run as a program (see :mod:`oncely.testing.servers.process`), imports nothing of Oncely, and
has one thread. Standard input is its lifeline: only the starting process holds the other end, so
the kernel closes it on any kind of death, including SIGKILL. Standard output carries the reports.

In:  one line of JSON (the server to start), then lines ``signal N``; end of file: end the server.
Out: ``started PID`` or ``failed REASON``, then ``exited CODE`` (negative: the signal).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_CHUNK = 65536


def main() -> None:
    """Read the order, start the server, forward signals, and end with the server or the parent."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _note)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = _Lines()
    first = lines.wait()
    if first is None:
        return
    order = json.loads(first)
    try:
        child = _start(order)
    except OSError as error:
        _report(f"failed {error}")
        return
    _report(f"started {child}")
    _watch(child, lines, woken, order)


def _watch(child: int, lines: _Lines, woken: int, order: dict[str, Any]) -> None:
    parent_is_there, give_up = True, 0.0
    while (code := _exit_code(child)) is None:
        sources = [0, woken] if parent_is_there else [woken]
        left = None if parent_is_there else max(0.05, give_up - time.monotonic())
        ready = select.select(sources, [], [], left)[0]
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, _CHUNK)
        if not parent_is_there:
            if time.monotonic() >= give_up:
                os.kill(child, signal.SIGKILL)
        elif (0 in ready and not _obey(child, lines)) or _told_to_end:
            parent_is_there, give_up = False, time.monotonic() + order["grace"]
            os.kill(child, order["end_signal"])
    if not parent_is_there and order["remove"]:
        shutil.rmtree(order["remove"], ignore_errors=True)
    _report(f"exited {code}")


def _obey(child: int, lines: _Lines) -> bool:
    """Forward the requested signals. The child is not reaped yet, so its pid is valid."""
    if not lines.read():
        return False
    while (line := lines.take()) is not None:
        os.kill(child, int(line.removeprefix("signal ")))
    return True


def _exit_code(child: int) -> int | None:
    """Return the exit code of the child, or None. Its process group ends with it.

    The group is ended while the child is still a zombie: until it is reaped its number cannot be
    reused. Without ``waitid`` (macOS) this small window stays open.
    """
    if hasattr(os, "waitid"):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        _end_group(child)
        status = os.waitpid(child, 0)[1]
    else:
        pid, status = os.waitpid(child, os.WNOHANG)
        if not pid:
            return None
        _end_group(child)
    return os.waitstatus_to_exitcode(status)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _start(order: dict[str, Any]) -> int:
    """Fork and execute; raise OSError here if the child could not execute."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None
    reading, writing = os.pipe()  # closed by a successful exec
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _become(order)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            if prctl:
                # The second safeguard, for a guard that is killed itself. After setuid, which
                # clears it; and the guard may have died before it was set.
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != guard:
                    os._exit(1)
            os.execve(order["command"][0], order["command"], order["environment"])  # noqa: S606
        except BaseException as error:
            os.write(writing, str(error).encode())
            os._exit(127)
    os.close(writing)
    problem = os.read(reading, _CHUNK)
    os.close(reading)
    if problem:
        os.waitpid(child, 0)
        raise OSError(problem.decode())
    return child


def _become(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir(order["directory"])
    if order["user"]:
        uid, gid = order["user"]
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)


class _Lines:
    """Lines of standard input, read without blocking for more than is available."""

    def __init__(self) -> None:
        self._held = b""

    def read(self) -> bool:
        data = os.read(0, _CHUNK)
        self._held += data
        return bool(data)

    def take(self) -> str | None:
        line, found, rest = self._held.partition(b"\n")
        if not found:
            return None
        self._held = rest
        return line.decode()

    def wait(self) -> str | None:
        while (line := self.take()) is None:
            if not self.read():
                return None
        return line


_told_to_end = False


def _note(number: int, _frame: object) -> None:
    global _told_to_end  # noqa: PLW0603
    _told_to_end = _told_to_end or number == signal.SIGTERM


def _report(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, text.encode() + b"\n")


if __name__ == "__main__":
    main()
