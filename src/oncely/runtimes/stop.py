"""Requests to end a run: first after the current batch, then at once."""

from __future__ import annotations

import threading


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
