"""Replicas of a pipeline that stand by while one of them runs (docs/decisions/0046).

A run on Spark takes over when it is elected among its replicas; a worker begins when there is no
run on Spark, which it finds by the members of their group.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NoReturn, Self

from oncely.core import events
from oncely.core.ranges import Position, TopicPartition
from oncely.errors import ConfigError, Fenced, InstanceTaken, OncelyError, Unavailable, WrongInput
from oncely.kafka.group import GroupConsumer, Membership, Rebalances
from oncely.threads import StopSignal, Thread

if TYPE_CHECKING:
    from oncely.pipeline.parts import Parts

OnFenced = Literal["end", "wait"]
"""What a run does when another one runs."""

SESSION_SECONDS = 10.0
"""After this time without a sign of life a replica has gone."""

_LOOK_SECONDS = _AGAIN_SECONDS = 3.0
_POLL_SECONDS = 0.2
_TELL_SECONDS = 5.0
log = logging.getLogger("oncely.run")


def run_when_elected(
    pipeline: Parts, run: Callable[[], bool], stop: StopSignal, listener: events.Listener
) -> bool:
    """Run whenever this replica is elected, until the run ends or is stopped.

    A run that is fenced stands by again.

    Raises:
        WrongInput: the broker refuses the membership in the group of the replicas.
        The errors of ``run``, but for :class:`Fenced`.
    """
    topic = min(pipeline.settings.source.topics)

    def join(name: str, rebalances: Rebalances) -> GroupConsumer:
        source = pipeline.source
        given = Membership(
            pipeline.settings.standby_group, "eager", session_seconds=SESSION_SECONDS, client=name
        )
        return GroupConsumer(source.brokers, source.kafka, [topic], given, rebalances)

    with Election(join, TopicPartition(topic, 0)) as election:
        while _elected(election, stop, listener, pipeline.settings.standby_group):
            try:
                return run()
            except Fenced as error:
                listener(fenced(error))
                election.step_back()
    return False


def work_when_alone(
    pipeline: Parts, work: Callable[[], bool], stop: StopSignal, listener: events.Listener
) -> bool:
    """Work whenever no replica of a run on Spark is there, until the work ends or is stopped.

    A worker that a run on Spark, or a reset, has taken over from looks again, and begins anew.

    Raises:
        WrongInput: the broker refuses to describe the group of the replicas.
        InstanceTaken: another process has this static member's name; two would alternate for ever.
        The errors of ``work``, but for other kinds of :class:`Fenced`.
    """
    while _alone(pipeline, stop, listener):
        try:
            return work()
        except InstanceTaken:
            raise
        except Fenced as error:
            listener(fenced(error))
    return False


def _alone(pipeline: Parts, stop: StopSignal, listener: events.Listener) -> bool:
    """Wait until no replica is there; False if it was stopped before."""
    stands_by = False
    while not stop.draining:
        if not _has_replicas(pipeline):
            return True
        listener(events.Polled() if stands_by else events.StandingBy())
        stands_by = True
        stop.wait(_LOOK_SECONDS)
    return False


def _has_replicas(pipeline: Parts) -> bool:
    """True if a replica is there, or may be, as the group's coordinator does not answer."""
    source, group = pipeline.source, pipeline.settings.standby_group
    try:
        return bool(source.members(group))
    except Unavailable as error:
        log.warning("the group of the replicas: %s", error.message)
        return True
    except ConfigError as error:
        _no_right(error, group)


def fenced(error: Fenced) -> events.FencedOut:
    """The event of an error."""
    lost = frozenset(tp for tp in error.lost if isinstance(tp, TopicPartition))
    return events.FencedOut(error.ours, error.theirs, lost)


def _elected(election: Election, stop: StopSignal, listener: events.Listener, group: str) -> bool:
    try:
        return election.wait(stop, listener)
    except ConfigError as error:
        _no_right(error, group)


def _no_right(error: ConfigError, group: str) -> NoReturn:
    if error.key != "worker.group":
        raise error
    raise ConfigError(
        "--on-fenced=wait",
        f"no right to read in group {group!r}, by which replicas find each other",
        way_out="grant this user Read and Describe on the group",
    ) from error


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
