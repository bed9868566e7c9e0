"""The retries of a run after errors."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from oncely.commit.backoff import Backoff
from oncely.core import events
from oncely.errors import OncelyError
from oncely.runtimes.stop import StopSignal

log = logging.getLogger(__name__)


@dataclass
class Retries:
    """Waits after errors in a row, from 1 s to 30 s.

    Attributes:
        stop: ends a wait.
        listener: called with each error.
        limit: temporary errors in a row, after which the next one is raised.
    """

    stop: StopSignal
    listener: events.Listener
    limit: int = 10

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again, after a success."""
        self._attempt, self._backoff = 0, Backoff(first=1.0, longest=30.0, total=300.0)

    def wait(self, error: OncelyError, limit: int = 0) -> None:
        """Wait before the next attempt.

        Args:
            error: the error of the last attempt.
            limit: the limit for errors that are not temporary by themselves.

        Raises:
            OncelyError: it, beyond the limit.
        """
        self._attempt += 1
        if self._attempt > (self.limit if error.retryable else limit):
            raise error
        log.warning("%s", error.message)
        pause = self._backoff.pause() or 30.0
        self.listener(events.BatchFailed(error.message, self._attempt, pause, type(error).__name__))
        self.stop.wait(pause)
