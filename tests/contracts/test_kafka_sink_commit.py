"""Committing to Kafka: records, rejects, offset and ledger take effect together, once, in order."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.clients.kafka.client import make
from oncely.clients.kafka.transaction import InstanceFenced, Message
from oncely.commit.backoff import Backoff
from oncely.core.claim import Claim, Counts, Fence, PositionMoved
from oncely.core.ledger import Entry
from oncely.core.ranges import OffsetRange
from oncely.errors import InvariantViolation, TooManyRejects, Unavailable
from oncely.ledgers.topic.cluster import Cluster
from oncely.ledgers.topic.records import PositionRecord
from oncely.sinks.kafka.sink import KafkaSink
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics, ready
from tests.sinktools import T0, T1, Rec, at_t0, chunk, commit_all, numbered


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker)


def test_records_rejects_and_position_take_effect_together(topics: Topics) -> None:
    sink, fence = ready(topics.sink(), {T0: 10, T1: 0})
    records = [*numbered(10, 13), Rec(13), Rec(15, bad="no JSON")]
    outcomes = commit_all(sink, chunk({T0: (10, records), T1: (0, numbered(100, 102))}), fence)
    assert topics.ids() == [10, 11, 12, 100, 101]
    assert topics.committed() == {T0: 16, T1: 102}
    assert topics.ledger_positions() == {T0: (16, 1), T1: (102, 1)}
    assert sorted(topics.ledger_ranges()) == [(0, 10, 16, "data"), (1, 0, 102, "data")]
    assert {o.partition: o.counts for o in outcomes} == {
        T0: Counts(5, 3, 1, 1),
        T1: Counts(2, 2, 0, 0),
    }
    assert not any(o.replayed for o in outcomes)


def test_a_replayed_chunk_writes_nothing(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    what = at_t0(0, [*numbered(0, 5), Rec(5, bad="no JSON")])
    commit_all(sink, what, fence)
    for again in (sink, topics.sink()):  # the second knows nothing but what the cluster says
        outcomes = commit_all(again, what, fence)
        assert [(o.range, o.counts, o.replayed) for o in outcomes] == [
            (OffsetRange(0, 6), Counts(0, 0, 0, 0), True)
        ]
    assert topics.ids() == [0, 1, 2, 3, 4]
    assert len(topics.records(topics.rejects)) == 1


def test_of_an_overlapping_chunk_only_what_is_new_is_written(topics: Topics) -> None:
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    first = [*numbered(0, 4), Rec(4, bad="no JSON")]
    commit_all(sink, at_t0(0, first), fence)
    wider = [*first, Rec(5, bad="still none"), *numbered(6, 9)]
    outcomes = commit_all(sink, chunk({T0: (0, wider), T1: (0, numbered(50, 52))}), fence)
    assert topics.ids() == [0, 1, 2, 3, 6, 7, 8, 50, 51]
    assert {(o.partition, o.range, o.counts) for o in outcomes} == {
        (T0, OffsetRange(5, 9), Counts(4, 3, 1, 0)),
        (T1, OffsetRange(0, 52), Counts(2, 2, 0, 0)),
    }
    assert len(topics.records(topics.rejects)) == 2


def test_a_moved_position_leaves_nothing(topics: Topics) -> None:
    """The compare-and-set, seen alone: decided on a ledger that has moved since."""
    sink, fence = ready(topics.sink())
    stale = sink.ledger.positions(fence)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    for what in (at_t0(0, numbered(0, 3)), at_t0(0, numbered(20, 22))):
        with pytest.raises(PositionMoved):
            sink.commit(what, fence, Claim(fence, what.ranges, stale))
    assert topics.ids() == [0, 1, 2]
    assert len(topics.ledger_ranges()) == 1


def test_of_several_partitions_each_takes_effect_by_itself(topics: Topics) -> None:
    """Decision 8: the one that moved is left out, and asking again tells the other was done."""
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    stale = sink.ledger.positions(fence)
    commit_all(sink, chunk({T1: (0, numbered(50, 52))}), fence)
    both = chunk({T0: (0, numbered(0, 2)), T1: (0, numbered(50, 52))})
    with pytest.raises(PositionMoved):
        sink.commit(both, fence, Claim(fence, both.ranges, stale))
    assert topics.ids() == [0, 1, 50, 51]
    assert all(one.replayed for one in commit_all(sink, both, fence))
    assert topics.ids() == [0, 1, 50, 51]


def test_too_many_rejects_write_nothing(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    what = at_t0(0, [*numbered(0, 2), Rec(2, bad="a"), Rec(3, bad="b")])
    with pytest.raises(TooManyRejects) as caught:
        commit_all(sink, what, fence, max_rejects=1)
    assert topics.ids() == []
    assert [str(one) for one in caught.value.refused.records] == [
        "t-0 offset 2: a; value value",
        "t-0 offset 3: b; value value",
    ]
    commit_all(sink, what, fence, max_rejects=2)
    assert topics.ids() == [0, 1]


def test_a_chunk_ahead_of_the_ledger_is_a_defect_and_writes_nothing(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    with pytest.raises(InvariantViolation, match=r"\[0, 5\) were not committed before"):
        commit_all(sink, at_t0(5, numbered(5, 8)), fence)
    with pytest.raises(InvariantViolation, match="no position in the ledger"):
        commit_all(sink, chunk({T1: (0, numbered(0, 2))}), fence)
    with pytest.raises(InvariantViolation, match="the ledger's epoch is 1, and ours 2"):
        commit_all(sink, at_t0(0, numbered(0, 2)), Fence(fence.pipeline, fence.epoch + 1))
    assert topics.ids() == []


def test_the_sink_is_picklable(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    shipped: KafkaSink = pickle.loads(pickle.dumps(sink))
    commit_all(shipped, at_t0(0, numbered(0, 2)), fence)
    assert topics.ids() == [0, 1]


def test_what_an_open_transaction_of_others_hides_is_found(topics: Topics) -> None:
    """Pipelines may share a ledger topic; its end is hidden while any of them is in a commit.

    Decided on what can be seen alone, the range after it would begin beyond the position.
    """
    sink, fence = ready(topics.sink())
    other = Producer({"bootstrap.servers": topics.bootstrap, "transactional.id": topics.pipeline})
    other.init_transactions(20)
    other.begin_transaction()
    other.produce(topics.ledger, b"{}", b'["position","another","t",0]')
    assert other.flush(20) == 0
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    worker = topics.sink()  # another process
    assert worker.ledger.positions(fence)[T0].position == 0, "hidden"
    assert worker.ledger.positions(fence, settled=True) == {T0: Entry(3, fence.epoch)}
    third = topics.sink()
    commit_all(third, at_t0(3, numbered(3, 5)), fence)
    assert topics.ids() == [0, 1, 2, 3, 4]
    other.abort_transaction(20)


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

    def connect(kind: Any, *args: Any, **own: Any) -> Any:
        made = make(kind, *args, **own)
        return Late(made, rival_commits) if issubclass(kind, Producer) else made

    def rival_commits() -> None:
        if not done:
            done.append(True)
            commit_all(rival, what, fence)

    slow = dataclasses.replace(sink, place=dataclasses.replace(sink.place, connect=connect))
    commit_all(slow, what, fence)
    assert done


class Late:
    """A producer before whose ``init_transactions`` something happens."""

    def __init__(self, inner: Any, before: Any) -> None:
        self._inner, self._before = inner, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def init_transactions(self, timeout: float) -> None:
        self._before()
        self._inner.init_transactions(timeout)


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
        "standing",
        lambda _, tps: {
            tp: PositionRecord(before[tp].position, before[tp].epoch, "", "", 0, 0, "")
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
    identity = sink.place.words.writer(T0)
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

    class Silent(Late):
        def commit_transaction(self, timeout: float) -> None:
            raise Unavailable("no answer")

    def connect(kind: Any, *args: Any, **own: Any) -> Any:
        made = make(kind, *args, **own)
        return Silent(made, lambda: None) if issubclass(kind, Producer) else made

    hurt = dataclasses.replace(sink, place=dataclasses.replace(sink.place, connect=connect))
    with pytest.raises(Unavailable):
        commit_all(hurt, at_t0(0, numbered(0, 4)), fence)
    assert topics.ids() == []
    assert topics.committed() == {T0: 0}
