"""Waiting with increasing delays after failures, up to a limit; and the log entries about them, one
for each cause and minute."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable

from oncely.errors import OncelyError


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


# -- log entries about errors after which it is tried again --------------------------------


log = logging.getLogger(__name__)

_EVERY = 60.0  # seconds


class RateLimitedLog:
    """The causes of a process that were logged. Safe for several threads.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._told: dict[str, tuple[float, int]] = {}

    def tell(self, error: OncelyError) -> None:
        """Log an error, unless its cause was logged less than a minute ago.

        Texts that differ in numbers, such as those of processes and ports, have the same cause.
        """
        cause, now = re.sub(r"\d+", "", error.message), self._clock()
        with self._lock:
            at, more = self._told.pop(cause, (now - _EVERY, 0))
            due = now - at >= _EVERY
            recent = {one: told for one, told in self._told.items() if now - told[0] < 2 * _EVERY}
            self._told = recent | {cause: (now, 0) if due else (at, more + 1)}
        if due:
            often = f" ({more} times more since the last entry)" if more else ""
            way_out = f"; way out: {error.way_out}" if error.way_out else ""
            log.warning("%s%s; it is tried again%s", error.message, way_out, often)


tell = RateLimitedLog().tell
