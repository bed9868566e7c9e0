"""The election of one replica of a pipeline among several, by a consumer group.

Replicas join a consumer group of their own, which reads nothing. Its coordinator detects the end of
a member, and assigns partitions exclusively. The range assignor sorts members by their names and
gives partition 0 to the first one. A name begins with the time at which the replica has joined: so
the replica that was elected stays so while others come and go, whether the topic has records or
not. A replica that was fenced leaves the group and joins it as the last.

The election only says when to take over. Which run may commit is decided by the ledger
(docs/decisions/0046).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Self

from oncely.core import events
from oncely.core.ranges import Position, TopicPartition
from oncely.errors import OncelyError, WrongInput
from oncely.kafka.group import GroupConsumer, Rebalances
from oncely.per_process import Thread
from oncely.runtimes.stop import StopSignal

log = logging.getLogger("oncely.run")

_POLL_SECONDS = 0.2
_AGAIN_SECONDS = 3.0
_TELL_SECONDS = 5.0


Join = Callable[[str, Rebalances], GroupConsumer]
"""Joins the group by a name."""


class Election(Rebalances):
    """The membership of this replica, within a ``with`` block.

    Args:
        join: joins the group.
        decisive: the partition whose holder is elected.
    """

    def __init__(self, join: Join, decisive: TopicPartition) -> None:
        self._join, self._decisive = join, decisive
        self._elected, self._over = threading.Event(), threading.Event()
        self._last = threading.Event()  # join again, as the last
        self._error: OncelyError | None = None
        self._thread = Thread(self._belong, "election")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=15)

    def wait(self, stop: StopSignal, listener: events.Listener) -> bool:
        """Wait until this replica is elected; False if it was stopped before.

        Raises:
            WrongInput: the broker refuses the membership.
            The error with which the group's thread has ended.
        """
        listener(events.StandingBy())
        tell_at = 0.0
        while not self._elected.wait(_POLL_SECONDS):
            if stop.draining:
                return False
            self._thread.check()
            if isinstance(self._error, WrongInput):
                raise self._error
            if time.monotonic() >= tell_at:
                listener(events.Polled())
                tell_at = time.monotonic() + _TELL_SECONDS
        return not stop.draining

    def step_back(self) -> None:
        """Let all other replicas come first."""
        self._last.set()
        self._elected.clear()

    # -- the group's thread ----------------------------------------------------------------

    def assigned(self, partitions: frozenset[TopicPartition]) -> Mapping[TopicPartition, Position]:
        """Nothing is read: no position."""
        if self._decisive in partitions and not self._last.is_set():
            self._elected.set()
        self._error = None
        return {}

    def revoked(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:  # noqa: ARG002
        """A run that goes on is not disturbed; the ledger fences it."""
        if self._decisive in partitions:
            self._elected.clear()

    def _belong(self) -> None:
        name = _name()
        while not self._over.is_set():
            if self._last.is_set():
                name = _name()
                self._elected.clear()
                self._last.clear()
            try:
                self._follow(name)
            except OncelyError as error:
                self._elected.clear()
                self._error = error
                log.warning("the group of the replicas: %s", error.message)
                self._over.wait(_AGAIN_SECONDS)

    def _follow(self, name: str) -> None:
        """Be a member until the end, or until this replica steps back."""
        group = self._join(name, self)
        try:
            while not (self._over.is_set() or self._last.is_set()):
                group.poll(_POLL_SECONDS)
        finally:
            group.close()


def _name() -> str:
    return f"oncely-{time.time_ns() // 1_000_000:014d}-{uuid.uuid4().hex[:8]}"
