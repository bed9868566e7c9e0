"""Increasing delays after failures, and the log entries about them.

Delays have a limit, log entries are one for each cause and minute. A run pauses so after errors in
a row (:class:`Retries`)."""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from oncely.core import events
from oncely.errors import OncelyError, TopicMissing


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


# -- the pauses of a run --------------------------------------------------------------------

# A broker that has just restarted does not have every topic for a moment (metadata arrives later),
# and answers as if a topic that was read did not exist. About 15 s.
MISSING_TOPIC_TRIES = 4


@dataclass
class Retries:
    """Counts and tells errors in a row.

    Attributes:
        listener: called with each error.
        backoff: the pauses.
        limit: errors in a row, after which the next one is raised.
        missing: errors in a row about a missing topic, after which the next one is raised.
        attempts: the errors in a row.
    """

    listener: events.Listener
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, longest=30.0, total=math.inf))
    limit: float = 10
    missing: int = 0
    attempts: int = field(default=0, init=False)
    _missing: int = field(default=0, init=False)

    def reset(self) -> None:
        """Begin again, after a success."""
        if self.attempts:
            log.info("it goes on, %.0f s after the first error", self.backoff.spent)
        self.backoff.reset()
        self.attempts = self._missing = 0

    def found_topics(self) -> None:
        """No topic is missing."""
        self._missing = 0

    def pause(self, error: OncelyError, epoch: int | None = 0) -> float:
        """The seconds until the next attempt.

        Args:
            error: the error of the last attempt.
            epoch: as in the event.

        Raises:
            OncelyError: it, if it is not temporary, or beyond a limit.
        """
        is_missing = isinstance(error, TopicMissing)
        self._missing = self._missing + 1 if is_missing else 0
        self.attempts += 1
        passing = self._missing <= self.missing if is_missing else error.retryable
        pause = self.backoff.pause()
        if not passing or self.attempts > self.limit or pause is None:
            raise error
        tell(error)
        kind = type(error).__name__
        self.listener(events.BatchFailed(error.message, self.attempts, pause, kind, epoch))
        return pause
