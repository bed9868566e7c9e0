"""Replicas of a pipeline that stand by while one of them runs (docs/decisions/0046).

A run on Spark takes over when it is elected among its replicas; a worker begins when there is no
run on Spark, which it finds by the members of their group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NoReturn

from oncely.core import events
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, Fenced, InstanceTaken, Unavailable
from oncely.kafka.group import GroupConsumer, Membership, Rebalances
from oncely.runtimes.election import Election
from oncely.runtimes.stop import StopSignal

if TYPE_CHECKING:
    from oncely.pipeline.parts import Parts

OnFenced = Literal["end", "wait"]
"""What a run does when another one runs."""

SESSION_SECONDS = 10.0
"""After this time without a sign of life a replica has gone."""

_LOOK_SECONDS = 3.0
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
