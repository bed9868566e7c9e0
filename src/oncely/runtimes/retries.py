"""The pauses of a run after errors in a row."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from oncely.commit.backoff import Backoff, tell
from oncely.core import events
from oncely.errors import OncelyError, TopicMissing

log = logging.getLogger(__name__)

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
