"""A broker that dies inside a commit, and one that forgets group offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec

from oncely.commit.backoff import Backoff
from oncely.kafka.client import KafkaAdmin
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, connected, make_topics, open_sink, producing_by, ready
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
    admin = KafkaAdmin(own_broker.bootstrap, {}, 20.0)

    def end() -> int:
        answer = admin.one(
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

    hurt = connected(sink, producing_by(commit_transaction=commit))
    records = [*numbered(0, 5), Rec(5, bad="no JSON")]
    commit_all(hurt, at_t0(0, records), fence, patience=Backoff(0.1, 1, 60))
    assert killed
    commit_all(sink, at_t0(0, records), fence, patience=Backoff(0.1, 1, 60))
    assert [one["id"] for one in topics.values()] == [0, 1, 2, 3, 4]
    assert len(topics.records(topics.rejects)) == 1
    again = open_sink(topics.sink())
    assert again.positions == {T0: 6}


@pytest.mark.timeout(300)
def test_a_group_offset_that_has_expired(topics: Topics, own_broker: Broker) -> None:
    """Retention of one minute. What is replayed is skipped, what is new is committed.

    Another pipeline opens again after the same minute.
    """
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    idle = topics.sink()
    idle.ledger.positions(fence)
    other = make_topics(own_broker)
    wrote, holds = ready(other.sink())
    commit_all(wrote, at_t0(0, numbered(0, 5)), holds)
    await_expiry(topics)
    await_expiry(other)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    commit_all(idle, at_t0(1, numbered(1, 5)), fence)
    assert topics.ids() == [0, 1, 2, 3, 4]
    assert topics.committed() == {T0: 5}
    assert open_sink(other.sink()).positions == {T0: 5}
    assert other.committed() == {T0: 5}


def await_expiry(topics: Topics) -> None:
    """Nobody tells when the broker forgets; so it is asked."""
    await_that(lambda: not topics.committed(), "the expiry of the offset")
