"""Committing to Kafka: the order of init and read, attempts side by side, what others hide."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.commit.backoff import Backoff
from oncely.core.claim import Claim, Entry, PositionMoved
from oncely.errors import Unavailable
from oncely.kafka.transaction import InstanceFenced, Message
from oncely.stores.topic.cluster import Cluster
from oncely.stores.topic.records import PositionRecord
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, connected, make_topics, producing_by, ready
from tests.sinktools import T0, T1, at_t0, chunk, commit_all, numbered


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker)


def test_of_several_partitions_each_takes_effect_by_itself(topics: Topics) -> None:
    """Decision 8: the one that moved is left out, and asking again tells the other was done."""
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    stale = sink.ledger.positions(fence)
    commit_all(sink, chunk({T1: (0, numbered(50, 52))}), fence)
    both = chunk({T0: (0, numbered(0, 2)), T1: (0, numbered(50, 52))})
    with pytest.raises(PositionMoved):
        sink.commit(both, fence, Claim(fence, both.ranges, stale))
    assert topics.ids() == [0, 1, 50, 51]
    assert [one.replayed for one in commit_all(sink, both, fence)] == [True, True]
    assert topics.ids() == [0, 1, 50, 51]


def test_what_an_open_transaction_of_others_hides_is_found(topics: Topics) -> None:
    """Pipelines may share a ledger topic; its end is hidden while any of them is in a commit.

    Decided on what can be seen alone, the range after it would begin beyond the position.
    """
    sink, fence = ready(topics.sink())
    other = Producer({"bootstrap.servers": topics.bootstrap, "transactional.id": topics.pipeline})
    other.init_transactions(120)
    other.begin_transaction()
    own = topics.ledger_partition
    other.produce(topics.ledger, b"{}", b'["position","another","t",0]', own)
    assert other.flush(120) == 0
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    worker = topics.sink()  # another process
    assert worker.ledger.positions(fence)[T0].position == 0, "hidden"
    assert worker.ledger.positions(fence, settled=True) == {T0: Entry(3, fence.epoch)}
    third = topics.sink()
    commit_all(third, at_t0(3, numbered(3, 5)), fence)
    assert topics.ids() == [0, 1, 2, 3, 4]
    other.abort_transaction(120)


# -- the order of init and read --------------------------------------------------------------


def two_attempts(topics: Topics) -> None:
    """Two attempts at one chunk; the first commits while the second is about to initialise.

    The second has read the ledger by then, as every attempt does to decide. What it read is
    stale when it writes, unless it asks again after its ``init``.
    """
    sink, fence = ready(topics.sink())
    what = at_t0(0, numbered(0, 10))
    rival = topics.sink()
    done = []

    def init_late(producer: Any, timeout: float) -> None:
        if not done:
            done.append(True)
            commit_all(rival, what, fence)
        producer.init_transactions(timeout)

    commit_all(connected(sink, producing_by(init_transactions=init_late)), what, fence)
    assert done


def test_init_comes_before_the_read_that_counts(topics: Topics) -> None:
    two_attempts(topics)
    assert topics.ids() == list(range(10))
    assert topics.committed() == {T0: 10}


def test_the_other_order_doubles_and_is_seen(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake itself: what was read before ``init`` is taken for where the position stands."""
    before: dict[Any, Any] = {}
    entries = Cluster.entries

    def remembered(self: Cluster) -> Any:
        before.update(found := entries(self))
        return found

    monkeypatch.setattr(Cluster, "entries", remembered)
    monkeypatch.setattr(
        Cluster,
        "stored_positions",
        lambda _, tps: {
            tp: PositionRecord(
                *(before[tp].position, before[tp].epoch),
                *("", "", 0, 0, "", 0, 0, 0, 0, "partition", None),
            )
            for tp in tps
            if tp in before  # not yet while the sink is opened
        },
    )
    two_attempts(topics)
    assert topics.ids() == sorted([*range(10)] * 2)


def test_attempts_of_one_run_at_the_same_time(topics: Topics) -> None:
    """Speculation: four threads bring the same chunks; each takes effect once, in order."""
    _, fence = ready(topics.sink())
    failed: list[BaseException] = []

    def attempt() -> None:
        sink = topics.sink()
        try:
            for start in range(0, 30, 10):
                patience = Backoff(0.05, 0.5, 60)
                commit_all(sink, at_t0(start, numbered(start, start + 10)), fence, None, patience)
        except BaseException as error:
            failed.append(error)
        finally:
            sink.close()

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed, failed
    assert [one["id"] for one in topics.values()] == list(range(30))


def test_an_instance_that_was_fenced_writes_nothing(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    cluster = sink.cluster
    identity = sink.pipeline_topics.keys.writer(T0)
    with cluster.transaction(identity) as old, cluster.transaction(identity) as new:
        old.init()
        old.begin()
        new.init()
        old.send(topics.output, [Message(b'{"id": 1}')])
        with pytest.raises(InstanceFenced):
            old.commit()
    assert topics.ids() == []
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)


def test_when_patience_ends_nothing_was_written(topics: Topics) -> None:
    sink, fence = ready(topics.sink())

    def silent(*_: object) -> None:
        raise Unavailable("no answer")

    hurt = connected(sink, producing_by(commit_transaction=silent))
    with pytest.raises(Unavailable):
        commit_all(hurt, at_t0(0, numbered(0, 4)), fence)
    assert topics.ids() == []
    assert topics.committed() == {T0: 0}
