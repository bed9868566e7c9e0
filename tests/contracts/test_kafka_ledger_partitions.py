"""Each pipeline has one partition of the ledger topic: what it waits for, and other topics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from confluent_kafka.admin import NewPartitions

from oncely.audit.stored.log import Topics as Reader
from oncely.audit.stored.topic_ledger import read_ledger
from oncely.errors import Stopped, TableMismatch, Unavailable, WrongInput
from oncely.kafka.topics import ledger_partition
from oncely.kinds.topic_destination import LedgerTopic
from oncely.stores.topic.cluster import Cluster
from oncely.testing.processes import await_that
from oncely.testing.readers import held_back
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, connected, make_topics, producing_by, put, ready
from tests.sinktools import T0, at_t0, commit_all, numbered, open_sink

COMPACT = {"cleanup.policy": "compact"}


def named(topics: Topics, fits: Callable[[int], bool]) -> Topics:
    """Topics of a pipeline whose partition fits, of those of a new ledger topic."""
    names = (f"{topics.pipeline}-{n}" for n in count())
    fitting = (one for one in names if fits(ledger_partition(one)))
    return dataclasses.replace(topics, pipeline=next(fitting))


@pytest.fixture
def topics(broker: Broker) -> Topics:
    """Of a pipeline whose partition is not the first one."""
    return named(make_topics(broker), lambda own: own > 0)


@pytest.fixture
def other(topics: Topics, broker: Broker) -> Topics:
    """Of another pipeline that has another partition of the same ledger topic."""
    own = ledger_partition(topics.pipeline)
    return dataclasses.replace(
        named(make_topics(broker), lambda its: its != own), ledger=topics.ledger
    )


def extend(broker: Broker, topic: str, partitions: int) -> None:
    """Add partitions to a topic."""
    admin = broker.admin()
    admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(120)

    def extended() -> bool:
        found = admin.list_topics(topic, timeout=60).topics[topic].partitions.values()
        return len(found) == partitions and all(one.leader >= 0 for one in found)

    await_that(extended, "the new partitions have leaders")


def paused_inside(topics: Topics, work: Callable[[], None]) -> None:
    """A member whose transaction stays open during ``work``; then it commits."""

    failed: list[Exception] = []

    def commit(inner: Any, *timeout: float) -> None:
        assert inner.flush(120) == 0
        assert held_back(topics.bootstrap, topics.ledger)
        try:
            work()
        except Exception as error:  # raised here, it would be an error of this transaction
            failed.append(error)
        inner.commit_transaction(*timeout)

    sink, fence = ready(topics.sink())
    paused = connected(sink, producing_by(commit_transaction=commit))
    commit_all(paused, at_t0(0, numbered(0, 3)), fence)
    if failed:
        raise failed[0]
    assert topics.ids() == [0, 1, 2]


def test_a_pipeline_that_is_paused_inside_a_transaction_delays_no_other(
    topics: Topics, other: Topics
) -> None:
    """The transaction lasts as long as the other's start, takeover and commit."""
    done: list[int] = []

    def start() -> None:
        sink, fence = ready(other.sink())
        commit_all(sink, at_t0(0, numbered(0, 5)), fence)
        sink.close()
        taken = open_sink(other.sink())  # a takeover, in another process
        assert taken.positions == {T0: 5}
        assert held_back(topics.bootstrap, topics.ledger), "it is still open"
        done.append(taken.fence.epoch)

    paused_inside(topics, start)
    assert done == [2]
    assert other.ids() == [0, 1, 2, 3, 4]
    assert len({one.partition() for one in topics.records(topics.ledger)}) == 2


def test_in_the_same_partition_it_does(topics: Topics) -> None:
    """This also shows that the test above can fail."""
    own = ledger_partition(topics.pipeline)
    other = named(topics, lambda its: its == own)

    def start() -> None:
        with pytest.raises(Unavailable, match="open transaction"):
            open_sink(other.sink(timeout=3.0))

    paused_inside(topics, start)
    assert open_sink(topics.sink()).positions == {T0: 3}
    assert {one.partition() for one in topics.records(topics.ledger)} == {own}


@pytest.mark.parametrize(("partitions", "old"), [(1, r": versions .* before 0\.1\.0"), (15, "\n")])
def test_a_topic_with_fewer_partitions_is_refused(
    topics: Topics, broker: Broker, partitions: int, old: str
) -> None:
    broker.create_topic(topics.ledger, partitions, COMPACT)
    looking = LedgerTopic(topics.sink().pipeline_topics, topics.rejects)
    for attempt in (
        lambda: open_sink(topics.sink()),
        lambda: looking.check([T0], [], create=True),
        lambda: looking.look([]),
    ):
        with pytest.raises(TableMismatch, match=f"has {partitions} of the 16 .* needs{old}") as no:
            attempt()
        assert "sink.ledger_topic" in no.value.way_out
    with (
        Reader(topics.bootstrap, {}) as reader,
        pytest.raises(WrongInput, match=f"has {partitions} of 16"),
    ):
        read_ledger(reader, topics.ledger, topics.pipeline)
    assert topics.records(topics.ledger) == []


def test_a_new_topic_has_a_partition_for_each_of_sixteen(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    own = topics.ledger_partition
    assert own == ledger_partition(topics.pipeline) > 0
    assert {one.partition() for one in topics.records(topics.ledger)} == {own}


def test_more_partitions_change_nothing(topics: Topics, broker: Broker) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    extend(broker, topics.ledger, 18)
    assert open_sink(topics.sink()).positions == {T0: 3}
    assert len({one.partition() for one in topics.records(topics.ledger)}) == 1


def test_a_topic_that_was_restored_into_other_partitions_is_refused(
    topics: Topics, broker: Broker
) -> None:
    """Its partition is empty; the way out is a new topic, which is restored from the group."""
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    restored = dataclasses.replace(topics, ledger=f"restored-{topics.ledger}")
    broker.create_topic(restored.ledger, 16, COMPACT)
    elsewhere = (topics.ledger_partition + 1) % 16
    for one in topics.records(topics.ledger):
        put(restored, one.key(), one.value(), elsewhere)
    looking = LedgerTopic(restored.sink().pipeline_topics, topics.rejects)
    attempts = (
        lambda: open_sink(restored.sink()),
        lambda: looking.check([T0], [], create=True),
        lambda: looking.look([]),
    )
    for attempt in attempts:
        with pytest.raises(Stopped, match=f"in partition {elsewhere} and none in its own") as no:
            attempt()
        assert "sink.ledger_topic" in no.value.way_out
    moved = dataclasses.replace(topics, ledger=f"new-{topics.ledger}")
    assert open_sink(moved.sink()).positions == {T0: 3}
    assert topics.ids() == [0, 1, 2]


def test_a_process_uses_the_partition_of_a_topic_that_was_recreated(
    topics: Topics, broker: Broker
) -> None:
    """A worker starts again for each takeover, with the clients that it has."""
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    broker.delete_topic(topics.ledger)
    assert open_sink(topics.sink()).positions == {T0: 3}  # creates it
    assert open_sink(sink).positions == {T0: 3}
    own = topics.ledger_partition
    assert own > 0
    assert {one.partition() for one in topics.records(topics.ledger)} == {own}


def test_records_of_other_pipelines_elsewhere_are_no_obstacle(
    topics: Topics, other: Topics
) -> None:
    ready(other.sink())
    put(other, b"no JSON", b"no JSON")
    with_nothing = Cluster(topics.sink().pipeline_topics)
    assert with_nothing.look().pipeline is None
    with_nothing.close()
    assert open_sink(topics.sink()).first_start
