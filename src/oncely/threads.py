"""Threads that inherit the context variables of the thread that creates them, repetition, and
requests to end a run.

The context contains the secrets in scope, and the pipeline that log entries name. Python 3.14 has
the same as ``sys.flags.thread_inherit_context``.

An error that a thread does not expect is not lost: it ends the thread, and the owner raises it by
:meth:`Thread.check`; or the work is repeated, and it is logged (:func:`repeat`). What another
attempt may answer better is repeated within a limit of time (:func:`tries`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context

log = logging.getLogger(__name__)


class Thread(threading.Thread):
    """A daemon thread with a copy of its creator's context.

    Args:
        target: called in the thread.
        name: the name of the thread.

    Attributes:
        error: the one with which the target has ended.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._inherited = copy_context()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Call the target in the inherited context."""
        try:
            self._inherited.run(super().run)
        except BaseException as error:
            self.error = error
            log.error("thread %s has ended: %s: %s", self.name, type(error).__name__, error)

    def check(self) -> None:
        """Raise the error with which the target has ended."""
        if self.error is not None:
            raise self.error


def repeat(over: threading.Event, seconds: float, work: Callable[[], object]) -> None:
    """Do a work every few seconds until it is over; an unexpected error is logged, once in a row,
    and the work is done again: what it tells would stand still without it."""
    known = ""
    while not over.wait(seconds):
        try:
            work()
            known = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if said != known:
                log.error("unexpected, and tried again every %g s: %s", seconds, said)
            known = said


_LEAST = 0.1  # seconds


def tries(seconds: float, pause: float = 0.1) -> Iterator[float]:
    """Yield before each attempt the seconds that are left for it, at least a tenth of one.

    The first attempt is made in any case, and the last one begins a pause after the limit at most.
    A caller leaves the loop when an answer is good or lasting; after the loop it raises the error
    of the last attempt.

    Args:
        seconds: the limit.
        pause: seconds between two attempts.
    """
    deadline = time.monotonic() + seconds
    while True:
        yield max(_LEAST, deadline - time.monotonic())
        if time.monotonic() >= deadline:
            return
        time.sleep(pause)


class StopSignal:
    """Two steps: drain, then at once. Safe to set from a signal handler."""

    def __init__(self) -> None:
        self._drain = threading.Event()
        self._now = threading.Event()

    def ask(self) -> None:
        """The first call requests to drain, the second to end at once."""
        (self._now if self._drain.is_set() else self._drain).set()

    @property
    def draining(self) -> bool:
        """True after the first request."""
        return self._drain.is_set()

    @property
    def now(self) -> bool:
        """True after the second request."""
        return self._now.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait, but no longer than until the next request."""
        return self._drain.wait(seconds)
