"""Servers as child processes that end with their parent, even if the parent is killed; free ports.

A small guard (:mod:`oncely.testing.servers._guard`) is the real parent of the server. It holds the
reading end of a pipe whose writing end only this process has; the kernel closes that on every kind
of death, so the guard detects it on Linux and macOS alike. Linux's ``PR_SET_PDEATHSIG`` alone would
not suffice: it fires when the *thread* that forked ends, and setuid clears it. Set by the guard,
which has one thread, it is the second safeguard: a killed guard takes its server along.

The guard and the server have sessions of their own, so a Ctrl-C in the terminal reaches this
process alone, which ends them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

from oncely.errors import InvariantViolation, Unavailable, WrongInput
from oncely.secrets import Secrets, scope
from oncely.threads import tries

_GUARD = Path(__file__).with_name("_guard.py")
_POLL = 0.02
_GRACE = 10.0


class Process:
    """One server process: started here, ended by its pid only.

    Args:
        name: for messages.
        command: program and arguments; the program by path.
        directory: its working directory, and the folder of ``log``.
        environment: the whole environment of the server.
        user: (uid, gid) of the server; only root can set it.
        end_signal: the signal to the server when this process has died; SIGKILL follows.
        remove: a directory to delete when this process has died without :meth:`stop`.

    Raises:
        Unavailable: the program could not be executed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        user: tuple[int, int] | None = None,
        end_signal: signal.Signals = signal.SIGKILL,
        remove: Path | None = None,
    ) -> None:
        self.name, self.log = name, log
        self.returncode: int | None = None
        program = shutil.which(command[0]) or command[0]
        order = {
            "command": [program, *command[1:]],
            "environment": dict(os.environ if environment is None else environment),
            "directory": str(directory),
            "log": str(log),
            "user": user,
            "end_signal": int(end_signal),
            "grace": _GRACE,
            "remove": str(remove) if remove else "",
        }
        self._writing = threading.Lock()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        if self._guard.stdin is None or self._guard.stdout is None:
            raise InvariantViolation("the guard has no pipes")
        self._lifeline, self._reports = self._guard.stdin, self._guard.stdout
        _alive.add(self)
        self._send(json.dumps(order))
        word, _, rest = self._reports.readline().decode().strip().partition(" ")
        if word != "started":
            self._guard.wait()
            self._close()
            raise Unavailable(f"{name} could not be started: {rest or 'its guard ended'}")
        self.pid = int(rest)

    @property
    def running(self) -> bool:
        """True if the server has not ended yet."""
        return not self._ended(0)

    def send(self, number: int) -> None:
        """Send a signal to the server; does nothing if it has ended.

        It goes through the guard, which has not reaped the server yet: the pid cannot belong to
        another process.
        """
        self._send(f"signal {int(number)}")

    def wait(self, timeout: float) -> int | None:
        """Return the exit code (negative: the signal), or None if it is still running."""
        self._ended(timeout)
        return self.returncode

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30.0) -> None:
        """Ask the server to end; SIGKILL it after ``timeout`` seconds. Returns when it has
        ended."""
        self.send(number)
        if not self._ended(timeout):
            self.kill()

    def kill(self) -> None:
        """SIGKILL the server and return when it has ended."""
        self.send(signal.SIGKILL)
        self._ended(None)

    def log_tail(self, lines: int = 20) -> str:
        """Return the end of the server's log."""
        return _tail(self.log, lines)

    def view(self) -> ForeignProcess:
        """A picklable view of this process for other processes."""
        return ForeignProcess(self.name, self.pid, self.log)

    def _ended(self, timeout: float | None) -> bool:
        try:
            self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._close()
        return True

    def _send(self, line: str) -> None:
        with self._writing, contextlib.suppress(BrokenPipeError, ValueError):
            self._lifeline.write(line.encode() + b"\n")
            self._lifeline.flush()

    def _close(self) -> None:
        """Read the last report and close the pipes, after the guard has ended."""
        with self._writing:
            if self._reports.closed:
                return
            word, _, code = self._reports.read().decode().strip().partition(" ")
            # No report: the guard was killed, and by PR_SET_PDEATHSIG the server with it.
            self.returncode = int(code) if word == "exited" else -signal.SIGKILL
            self._let_go()
            self._reports.close()
        _alive.discard(self)

    def _let_go(self) -> None:
        """Close this end of the lifeline."""
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()


@dataclass(frozen=True)
class ForeignProcess:
    """A server process that another process has started: it can be inspected, but not ended.

    Attributes:
        name: for messages.
        pid: the pid of the server.
        log: its log file.
    """

    name: str
    pid: int
    log: Path
    returncode: None = None

    @property
    def running(self) -> bool:
        """True if the server has not ended yet."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def log_tail(self, lines: int = 20) -> str:
        """Return the end of the server's log."""
        return _tail(self.log, lines)

    def view(self) -> ForeignProcess:
        """This view."""
        return self

    def refuse(self) -> NoReturn:
        """Raise WrongInput: only the process that started the server may start or end it."""
        raise WrongInput(
            f"{self.name} belongs to another process",
            way_out="start a server of your own to stop, kill or restart it",
        )

    def stop(self, *_: object, **__: object) -> NoReturn:
        """Refuse."""
        self.refuse()

    def kill(self) -> NoReturn:
        """Refuse."""
        self.refuse()


def wait_until(
    condition: Callable[[], bool], *, process: Process | ForeignProcess, timeout: float, what: str
) -> None:
    """Poll until ``condition`` holds.

    Raises:
        Unavailable: the process ended first, or after ``timeout`` seconds; with the end of its log.
    """
    problem = f"took more than {timeout:.0f} s: {what}"
    for _ in tries(timeout, _POLL):
        if condition():
            return
        if not process.running:
            problem = f"ended with code {process.returncode} before {what}"
            break
    raise Unavailable(
        f"{process.name} {problem}\n{process.log_tail()}", way_out=f"its log is {process.log}"
    )


def _tail(log: Path, lines: int) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


_alive: weakref.WeakSet[Process] = weakref.WeakSet()


def _leave() -> None:
    """At the exit of the interpreter: let the guards end running servers, and wait for them."""
    left = list(_alive)
    for process in left:
        process._let_go()
    for process in left:
        process._ended(_GRACE + 5)


def _forked() -> None:
    """In a forked child that continues without exec: its copy would keep the lifeline open."""
    for process in list(_alive):
        process._let_go()
    _alive.clear()


atexit.register(_leave)
os.register_at_fork(after_in_child=_forked)


# -- ports ----------------------------------------------------------------------------------

HOST = "127.0.0.1"
_LOWEST, _HIGHEST = 15_000, 32_000
_TRIES = 200
_CHANCE = random.SystemRandom()  # with equal seeds, two processes would draw the same ports
_given: set[int] = set()  # a process can lock a byte twice


def free_port() -> int:
    """Return a port without a listener, below the range that the system assigns to clients.

    It is reserved until this process ends, also among processes: a server that starts for seconds
    or is stopped does not listen.

    A server that is restarted needs its port again. A port from the clients' (ephemeral) range
    might be used by another outgoing connection meanwhile; worse, a client that keeps trying to
    reach the stopped server on such a port can be assigned the same port and connect to itself.
    """
    highest = min(_HIGHEST, max(_first_ephemeral() - 1, _LOWEST + 1000))
    for _ in range(_TRIES):
        port = _CHANCE.randint(_LOWEST, highest)
        if port not in _given and _reserve(port):
            _given.add(port)
            if is_free(port):
                return port
    raise OSError(f"no free port between {_LOWEST} and {highest}")


def _reserve(port: int) -> bool:
    """Lock the port's byte in a file that all processes of the user share."""
    try:
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    return True


@functools.cache
def _reservations() -> int:
    """The file stays open: closing it releases the locks, which a forked child does not own.

    Its name can be guessed, and every user of the machine can make a file or a link of that name.
    """
    path = Path(tempfile.gettempdir()) / f"oncely-ports-{os.getuid()}"
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if os.fstat(file).st_uid == os.getuid():
            return file
        os.close(file)
    raise WrongInput(f"{path} is not a file of yours", way_out="delete it, or set TMPDIR")


def is_free(port: int) -> bool:
    """True if a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return _HIGHEST


# -- a child that is a server ---------------------------------------------------------------


class ChildServer(ABC):
    """A server with a directory of its own; a context manager that starts and closes it.

    Pickled, it becomes a view of the running server in another process: a view has the same
    methods, but refuses to start or end the server.

    Args:
        directory: the directory of its data; it exists.
        temporary: True if :meth:`close` deletes the directory.
    """

    name: ClassVar[str]
    """The server's name in messages."""

    def __init__(self, directory: Path, *, temporary: bool) -> None:
        self.directory = directory
        self._temporary = temporary
        self._process: Process | ForeignProcess | None = None
        self._secrets = Secrets()

    @property
    def pid(self) -> int:
        """The pid of the server's first process.

        Raises:
            WrongInput: it is not running.
        """
        return self._started().pid

    @property
    def running(self) -> bool:
        """True if the server's first process is running."""
        return self._process is not None and self._process.running

    def start(self) -> Self:
        """Start the server; return when it responds to a client.

        Raises:
            Unavailable: it did not start; with the end of its log.
            WrongInput: its programs are missing.
        """
        if self.running:
            return self
        if isinstance(self._process, ForeignProcess):
            self._process.refuse()
        with scope(self._secrets):  # an error quotes the server's log
            process = self._process = self._launch()
            try:
                self._await_ready(process)
            except BaseException:
                self.kill()
                raise
        return self

    def stop(self) -> None:
        """Stop the server. Data and port are kept."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """Crash the server. Data and port are kept."""
        if self._process is not None:
            self._process.kill()

    def restart(self) -> None:
        """Stop and start again, on the same port with the same data."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop, and delete the directory if it was a temporary one."""
        if self._temporary:
            self.kill()
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            self.stop()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _launch(self) -> Process:
        """Prepare the directory and start the process."""

    @abstractmethod
    def _await_ready(self, process: Process) -> None:
        """Return when the server responds; raises Unavailable if it does not."""

    def __getstate__(self) -> dict[str, Any]:
        process = self._process and self._process.view()
        return {**self.__dict__, "_process": process, "_temporary": False}

    def _started(self) -> Process | ForeignProcess:
        if self._process is None:
            raise WrongInput(f"{self.name} is not running", way_out="start() it first")
        return self._process

    @property
    def _delete_after(self) -> Path | None:
        """The directory, if it must be deleted after the death of this process."""
        return self.directory if self._temporary else None
