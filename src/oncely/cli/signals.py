"""Ctrl-C and SIGTERM: the first ends the run after the current batch, the second ends it at once.

Python runs a signal handler only when its main thread gets back to Python code, and that thread may
be in a call to a hanging JVM. So a separate thread reads the signals' numbers from a pipe to which
the C-level handler writes them (``signal.set_wakeup_fd``). The handlers themselves do nothing,
except while there is no batch to finish: then they raise.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

from oncely.errors import Interrupted

_ASKED_BY = (signal.SIGINT, signal.SIGTERM)


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
