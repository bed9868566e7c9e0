"""Ctrl-C and SIGTERM: the first ends the run after the current batch, the second ends it at once.

Python runs a signal handler only when its main thread gets back to Python code, and that thread may
be in a call to a hanging JVM. So a separate thread reads the signals' numbers from a pipe to which
the C-level handler writes them (``signal.set_wakeup_fd``). The handlers themselves do nothing,
except while there is no batch to finish: then they raise.

A forked child, for example of a function of the user, has the same pipe. The numbers of its own
signals are not written to it: SIGTERM ends the child, and SIGINT, which a terminal sends to it,
too, does nothing there.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Self

from oncely.errors import Interrupted

_ASKED_BY = (signal.SIGINT, signal.SIGTERM)
_entered: list[Signals] = []


class Signals:
    """Catches SIGINT and SIGTERM within a ``with`` block. For the main thread.

    A signal can arrive as soon as a handler is installed, so :class:`Interrupted` is caught around
    the block, not in it.

    Args:
        asked: called in a separate thread for each signal.

    Attributes:
        idle: while true, a signal also raises :class:`Interrupted` here.
    """

    def __init__(self, asked: Callable[[], None]) -> None:
        self.idle = True
        self._asked = asked
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.getsignal(number) for number in _ASKED_BY}
        _entered.append(self)
        try:
            self.install()
            threading.Thread(target=self._listen, name="signals", daemon=True).start()
        except Interrupted:  # a signal has arrived before the block has begun
            self.__exit__()
            raise
        return self

    def install(self) -> None:
        """Install the handlers (again): a SparkContext installs a SIGINT handler of its own."""
        for number in _ASKED_BY:
            signal.signal(number, self._handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._fd_before)
        _entered.remove(self)
        self._writing.close()  # ends the thread

    def _listen(self) -> None:
        with self._reading:
            while numbers := self._reading.recv(64):
                for number in numbers:
                    if number in _ASKED_BY:
                        self._asked()

    def _handler(self, _: int, __: FrameType | None) -> None:
        if self.idle:
            self.idle = False  # once: the cleanup must not be interrupted
            raise Interrupted

    def forked(self) -> None:
        """Called in a forked child."""
        self.idle = False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])  # type: ignore[arg-type]
        self._reading.close()
        self._writing.close()


def _forked() -> None:
    for one in _entered:
        with suppress(TypeError, ValueError, OSError):
            one.forked()
    _entered.clear()


os.register_at_fork(after_in_child=_forked)
