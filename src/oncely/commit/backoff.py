"""Waiting with increasing delays after failures, up to a limit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable


class Backoff:
    """Waits of ``first`` seconds, doubling to ``longest``, until ``total`` seconds are spent.

    These are the seconds since the first error: an attempt may last longer than the wait before it.

    Args:
        wait: waits; a driver passes its stop event's ``wait``, so that a signal interrupts it.
    """

    def __init__(
        self,
        first: float = 0.1,
        longest: float = 5.0,
        total: float = 60.0,
        wait: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first, self._longest, self._total = first, longest, total
        self._wait, self._clock = wait or threading.Event().wait, clock
        self.reset()

    def reset(self) -> None:
        """Begin again with the first delay, after a success."""
        self._next, self._waited = self._first, 0.0
        self._began: float | None = None

    @property
    def spent(self) -> float:
        """The seconds since the first error; 0 before it."""
        passed = 0.0 if self._began is None else self._clock() - self._began
        return max(self._waited, passed)

    def pause(self) -> float | None:
        """The seconds of the next wait, or None when the time is up."""
        if self._began is None:
            self._began = self._clock()
        if self.spent >= self._total:
            return None
        seconds = self._next
        self._next = min(self._longest, self._next * 2)
        self._waited += seconds
        return seconds

    def wait_or_raise(self) -> None:
        """Wait. Called while an error is handled, which is raised again when the time is up."""
        seconds = self.pause()
        if seconds is None:
            raise sys.exception() or TimeoutError("nothing to wait for")
        self._wait(seconds)
