"""How a run is asked to end: first after the batch in hand, then now."""

from __future__ import annotations

import threading


class StopSignal:
    """Two steps: drain, then now. Safe to set from a signal handler."""

    def __init__(self) -> None:
        self._drain = threading.Event()
        self._now = threading.Event()

    def ask(self) -> None:
        """Ask once to drain; ask again to end now."""
        (self._now if self._drain.is_set() else self._drain).set()

    @property
    def draining(self) -> bool:
        """True once asked."""
        return self._drain.is_set()

    @property
    def now(self) -> bool:
        """True once asked twice."""
        return self._now.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait, but no longer than until asked."""
        return self._drain.wait(seconds)
