"""A broker that dies inside a commit, and one that forgets group offsets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec

from oncely.clients.kafka.client import KafkaAdmin, make
from oncely.commit.backoff import Backoff
from oncely.sinks.kafka.sink import KafkaSink
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics, open_sink, ready
from tests.sinktools import T0, Rec, at_t0, commit_all, numbered

pytestmark = pytest.mark.long
LATEST = OffsetSpec.latest()


@pytest.fixture(scope="module")
def own_broker() -> Iterator[Broker]:
    forgetful = {
        "offsets.retention.minutes": "1",
        "offsets.retention.check.interval.ms": "1000",
    }
    with Broker(properties=forgetful) as running:
        yield running


@pytest.fixture
def topics(own_broker: Broker) -> Topics:
    return make_topics(own_broker)


def test_an_admin_client_outlives_a_restart(own_broker: Broker) -> None:
    """The leader's epoch is another one then, and librdkafka keeps the old one for minutes."""
    here = TopicPartition(own_broker.create_topic("restarted"), 0)
    asker = KafkaAdmin(own_broker.bootstrap, {}, 20.0)

    def end() -> int:
        answer = asker.one(
            "look", lambda client, wait: client.list_offsets({here: LATEST}, request_timeout=wait)
        )
        return int(answer[here].offset)

    assert end() == 0
    own_broker.kill()
    own_broker.start()
    assert end() == 0  # by the old epoch it would be refused until the time is up


@pytest.mark.timeout(200)
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_broker_is_killed_inside_a_commit(
    topics: Topics, own_broker: Broker, when: str
) -> None:
    """Before EndTxn the transaction is open; after it the answer has come, and the markers may
    not be written yet."""
    sink, fence = ready(topics.sink())
    killed = []

    def kill() -> None:
        if not killed:
            killed.append(own_broker.pid)
            own_broker.kill()
            own_broker.start()

    def commit(inner: Any, timeout: float) -> None:
        inner.flush(timeout)
        if when == "before":
            kill()
        inner.commit_transaction(timeout)
        if when == "after":
            kill()

    hurt = committing_by(sink, commit)
    records = [*numbered(0, 5), Rec(5, bad="no JSON")]
    commit_all(hurt, at_t0(0, records), fence, patience=Backoff(0.1, 1, 60))
    assert killed
    commit_all(sink, at_t0(0, records), fence, patience=Backoff(0.1, 1, 60))
    assert [one["id"] for one in topics.values()] == [0, 1, 2, 3, 4]
    assert len(topics.records(topics.rejects)) == 1
    again = open_sink(topics.sink())
    assert again.positions == {T0: 6}


@pytest.mark.timeout(300)
def test_a_group_offset_that_has_expired(topics: Topics) -> None:
    """Retention of one minute. What is replayed is skipped, what is new is committed."""
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    idle = topics.sink()
    idle.ledger.positions(fence)
    await_expiry(topics)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    commit_all(idle, at_t0(1, numbered(1, 5)), fence)
    assert topics.ids() == [0, 1, 2, 3, 4]
    assert topics.committed() == {T0: 5}
    await_expiry(topics)
    assert open_sink(topics.sink()).positions == {T0: 5}
    assert topics.committed() == {T0: 5}


def await_expiry(topics: Topics, seconds: float = 180) -> None:
    """Nobody tells when the broker forgets; so it is asked."""
    until = time.monotonic() + seconds
    while topics.committed():
        assert time.monotonic() < until, "the offset did not expire"
        time.sleep(1)


def committing_by(sink: KafkaSink, commit: Callable[[Any, float], None]) -> KafkaSink:
    class Hooked:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def commit_transaction(self, timeout: float) -> None:
            commit(self._inner, timeout)

    def connect(kind: Any, *args: Any, **own: Any) -> Any:
        made = make(kind, *args, **own)
        return Hooked(made) if issubclass(kind, Producer) else made

    return dataclasses.replace(sink, place=dataclasses.replace(sink.place, connect=connect))
