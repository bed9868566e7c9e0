"""Waiting with increasing delays after failures, up to a limit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


class Backoff:
    """Waits of ``first`` seconds, doubling to ``longest``, until ``total`` seconds are spent.

    Args:
        wait: waits; a driver passes its stop event's ``wait``, so that a signal interrupts it.
    """

    def __init__(
        self,
        first: float = 0.1,
        longest: float = 5.0,
        total: float = 60.0,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._first, self._longest, self._total = first, longest, total
        self._wait = wait or threading.Event().wait
        self.reset()

    def reset(self) -> None:
        """Begin again with the first delay, after a success."""
        self._next, self._spent = self._first, 0.0

    def pause(self) -> float | None:
        """The seconds of the next wait, or None when the time is up."""
        if self._spent >= self._total:
            return None
        seconds = self._next
        self._next = min(self._longest, self._next * 2)
        self._spent += seconds
        return seconds

    def wait_or_raise(self) -> None:
        """Wait. Called while an error is handled, which is raised again when the time is up."""
        seconds = self.pause()
        if seconds is None:
            raise sys.exception() or TimeoutError("nothing to wait for")
        self._wait(seconds)
