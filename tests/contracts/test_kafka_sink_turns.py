"""Positions moved by two transactional ids in turn: once, in order, whoever else moves them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from oncely.core.claim import Claim, PositionMoved, Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import Fenced
from oncely.kafka.topics import TopicLimits
from oncely.kinds.kafka.sink import KafkaSink
from oncely.stores.topic import cluster
from oncely.stores.topic.cluster import AlternatingProducer, Cluster
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, connected, make_topics, producing_by, ready
from tests.sinktools import SOURCE, T0, T1, Rec, at_t0, chunk, commit_all, numbered, open_sink


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return dataclasses.replace(make_topics(broker), turns=True)


def by_spark(topics: Topics) -> KafkaSink:
    return dataclasses.replace(topics, turns=False).sink()


def write(sink: KafkaSink, fence: Any, *starts: int) -> None:
    """Commit three records from each of the offsets on."""
    for start in starts:
        commit_all(sink, at_t0(start, numbered(start, start + 3)), fence)


def settle(sink: KafkaSink) -> AlternatingProducer:
    """Wait until the ids for the next two transactions are initialised."""
    turn = sink.cluster.turns._kept[T0]
    wait(turn.instances.values())
    return turn


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions that were read, one after the other."""
    seen: list[int] = []
    stored = Cluster.stored_positions

    def counted(self: Cluster, partitions: Any) -> Mapping[TopicPartition, Any]:
        found = stored(self, partitions)
        seen.extend(one.position for one in found.values())
        return found

    monkeypatch.setattr(Cluster, "stored_positions", counted)
    return seen


def test_the_ids_take_turns_and_nothing_is_read_between(topics: Topics, reads: list[int]) -> None:
    used: list[str] = []

    def connect(kind: Any, *args: Any, **own: Any) -> Any:
        def committed(producer: Any, seconds: float) -> None:
            used.append(own["transactional.id"])
            producer.commit_transaction(seconds)

        return producing_by(commit_transaction=committed)(kind, *args, **own)

    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    sink = connected(sink, connect)
    reads.clear()
    commit_all(sink, chunk({T1: (0, numbered(100, 102))}), fence)
    for start in range(0, 15, 3):
        write(sink, fence, start)
        settle(sink)
    assert reads == [0, 0]
    keys = sink.pipeline_topics.keys
    first, second = keys.writer(T0), keys.second(T0)
    assert used == [keys.writer(T1), first, second, first, second, first]
    assert [one["id"] for one in topics.values()] == [100, 101, *range(15)]
    assert topics.committed() == {T0: 15, T1: 102}
    assert topics.ledger_positions() == {T0: (15, 1), T1: (102, 1)}
    totals = open_sink(topics.sink()) and topics.sink().cluster.look().totals[T0]
    assert totals.records == totals.rows == 15


def test_an_id_that_was_initialised_after_the_commit_is_not_trusted(
    topics: Topics,
) -> None:
    """A second attempt of the same run has moved the position by that id before.

    It comes between the decision and the transaction.
    """
    initialised, may_go_on = [], threading.Event()

    def late(producer: Any, seconds: float) -> None:
        initialised.append(True)
        if len(initialised) == 3:  # the first two begin; this one is for the third transaction
            assert may_go_on.wait(180)
        producer.init_transactions(seconds)

    sink, fence = ready(topics.sink())
    sink = connected(sink, producing_by(init_transactions=late))
    write(sink, fence, 0, 3)
    what, decided = at_t0(6, numbered(6, 9)), sink.ledger.positions(fence)
    rival = topics.sink()
    write(rival, fence, 6)
    settle(rival)
    may_go_on.set()
    settle(sink)
    with pytest.raises(PositionMoved):
        sink.commit(what, fence, Claim(fence, what.ranges, decided))
    write(sink, fence, 6, 9)
    assert [one["id"] for one in topics.values()] == list(range(12))


def test_a_takeover_ends_what_is_prepared(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    write(sink, fence, 0, 3)
    assert settle(sink).moved is not None
    next_sink, its = ready(topics.sink())
    write(next_sink, its, 6)
    with pytest.raises(Fenced):
        write(sink, fence, 6)
    write(next_sink, its, 9)
    assert [one["id"] for one in topics.values()] == list(range(12))


def test_spark_takes_over_from_a_worker_and_a_worker_from_spark(topics: Topics) -> None:
    spark, its = ready(by_spark(topics))
    write(spark, its, 0)
    worker = topics.sink()
    opened = worker.open(Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, partitions=frozenset({T0})))
    assert opened.positions == {T0: 3}
    write(worker, opened.fence, 3, 6, 9)
    with pytest.raises(Fenced):
        write(spark, its, 12)
    settle(worker)
    again, now = ready(by_spark(topics))
    with pytest.raises(Fenced):
        write(worker, opened.fence, 12)
    write(again, now, 12)
    assert [one["id"] for one in topics.values()] == list(range(15))
    assert topics.committed() == {T0: 15}


@pytest.mark.parametrize("arrives", [True, False])
def test_a_lost_answer_is_not_taken_for_a_commit(topics: Topics, arrives: bool) -> None:
    sink, fence = ready(topics.sink())
    write(sink, fence, 0)
    lost = []

    def committed(producer: Any, seconds: float) -> None:
        if lost:
            producer.commit_transaction(seconds)
            return
        lost.append(True)
        if arrives:
            producer.commit_transaction(seconds)
        raise KafkaException(KafkaError(KafkaError._STATE))

    hurt = connected(sink, producing_by(commit_transaction=committed))
    write(hurt, fence, 3, 6)
    assert [one["id"] for one in topics.values()] == list(range(9))


def test_an_instance_for_other_topics_is_not_used(topics: Topics) -> None:
    """A chunk with a dead letter writes to one more topic, with limits of its own."""
    sink, fence = ready(topics.sink())
    write(sink, fence, 0)
    settle(sink)
    sink._limits[topics.rejects] = TopicLimits(2_000_000)
    commit_all(sink, at_t0(3, [*numbered(3, 5), Rec(5, bad="no JSON")]), fence)
    write(sink, fence, 6)
    assert topics.ids() == [*range(5), *range(6, 9)]
    assert len(topics.records(topics.rejects)) == 1
    assert topics.committed() == {T0: 9}


def test_few_instances_wait(topics: Topics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "KEPT", 2)
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    for start in (0, 3):
        both = chunk(
            {T0: (start, numbered(start, start + 3)), T1: (start, numbered(start, start + 3))}
        )
        commit_all(sink, both, fence)
    assert len(sink.cluster.turns._kept) == 1
    assert topics.ids() == sorted([*range(6)] * 2)
