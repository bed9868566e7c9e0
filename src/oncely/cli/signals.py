"""Ctrl-C and SIGTERM: the first ends the run after the batch in hand, the second ends it now.

Python runs a signal handler only when its main thread gets back to Python code, and that thread
may sit in a call to a JVM that hangs. So a thread of our own reads the signals' numbers from a
pipe that the C-level handler writes them to (``signal.set_wakeup_fd``). The handlers themselves
do nothing, but for a time when there is nothing to finish: then they raise.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

_ASKED_BY = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal came while nothing was in hand: leave, tidying up on the way."""


class Signals:
    """Catches SIGINT and SIGTERM while it is entered. For the main thread.

    Args:
        asked: called in a thread of its own for each signal.

    Attributes:
        nothing_in_hand: while true, a signal also raises :class:`Interrupted` here.
    """

    def __init__(self, asked: Callable[[], None]) -> None:
        self.nothing_in_hand = True
        self._asked = asked
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.getsignal(number) for number in _ASKED_BY}
        self.install()
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def install(self) -> None:
        """Take the signals (again): a SparkContext puts a SIGINT handler of its own in place."""
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
        if self.nothing_in_hand:
            self.nothing_in_hand = False  # once: what tidies up is not interrupted
            raise Interrupted
