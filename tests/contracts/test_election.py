"""Replicas find the first of them by a group of a real broker; there is never more than one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

from oncely.core import events
from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError
from oncely.kafka.client import KafkaAdmin, members
from oncely.kafka.group import GroupConsumer, Membership, Rebalances
from oncely.pipeline.standby import Election
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from oncely.threads import StopSignal


@dataclass
class Replicas:
    """Replicas of one pipeline."""

    brokers: str
    topic: str
    stack: ExitStack

    @property
    def group(self) -> str:
        return f"{self.topic}.standby"

    def start(self) -> Election:
        return self.stack.enter_context(Election(self._join, TopicPartition(self.topic, 0)))

    def _join(self, name: str, rebalances: Rebalances) -> GroupConsumer:
        given = Membership(self.group, "eager", session_seconds=6.0, client=name)
        return GroupConsumer(self.brokers, {}, [self.topic], given, rebalances)

    def settled(self, count: int) -> bool:
        """True if the group is stable and has this number of members."""
        client = AdminClient({"bootstrap.servers": self.brokers})
        found = client.describe_consumer_groups([self.group])[self.group].result()
        return found.state == ConsumerGroupState.STABLE and len(found.members) == count


@pytest.fixture
def replicas(broker: Broker, make_topic: Any) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(broker.bootstrap, make_topic(partitions=3), stack)


def elected(replica: Election) -> bool:
    return replica._elected.is_set()


def waited(replica: Election) -> list[events.Event]:
    heard: list[events.Event] = []
    assert replica.wait(StopSignal(), heard.append)
    return heard


def test_the_first_stays_elected_until_it_leaves_or_steps_back(replicas: Replicas) -> None:
    first = replicas.start()
    assert waited(first)[0] == events.StandingBy()
    others = replicas.start(), replicas.start()
    await_that(lambda: replicas.settled(3) and elected(first), "all have joined")
    assert not any(map(elected, others))

    first.step_back()
    second = await_that(lambda: next(filter(elected, others), None), "another one")
    third = next(one for one in others if one is not second)
    await_that(lambda: replicas.settled(3) and elected(second), "the first one joins as the last")
    assert not elected(first)
    assert not elected(third)

    second.__exit__()  # its process ends
    waited(third)
    assert not elected(first)
    third.__exit__()
    waited(first)


def test_one_that_waits_can_be_stopped(replicas: Replicas) -> None:
    waited(replicas.start())
    second = replicas.start()
    stop = StopSignal()
    stop.ask()
    assert second.wait(stop, lambda _: None) is False


def test_a_refusal_of_the_broker_ends_the_wait() -> None:
    def refused(*_: object) -> GroupConsumer:
        raise ConfigError("worker.group", "no right")

    with Election(refused, TopicPartition("t", 0)) as replica, pytest.raises(ConfigError):
        replica.wait(StopSignal(), lambda _: None)


def test_one_that_the_group_has_removed_is_not_elected() -> None:
    replica = Election(lambda *_: pytest.fail("not joined"), TopicPartition("t", 0))
    replica.assigned(frozenset({TopicPartition("t", 0), TopicPartition("t", 1)}))
    replica.revoked(frozenset({TopicPartition("t", 1)}), lost=False)
    assert elected(replica)
    replica.revoked(frozenset({TopicPartition("t", 0)}), lost=True)
    assert not elected(replica)


def test_a_worker_sees_the_replicas(replicas: Replicas) -> None:
    """From before the first of them is elected, until the last one has left."""

    def seen() -> int:
        return len(members(KafkaAdmin(replicas.brokers, {}, 10.0), replicas.group))

    assert seen() == 0
    first = replicas.start()
    waited(first)
    assert seen() == 1
    second = replicas.start()
    await_that(lambda: seen() == 2, "both are members")
    first.__exit__()
    await_that(lambda: seen() == 1, "one has left")
    second.__exit__()
    await_that(lambda: seen() == 0, "both have left")
