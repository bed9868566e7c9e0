"""Committing to Kafka: records, rejects, offset and ledger take effect together, once, in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oncely.core.ranges import OffsetRange
from oncely.local.kafka import Broker
from oncely.sinks.base import Written
from tests.kafkatools import Topics, make_topics, ready
from tests.sinktools import T0, T1, Rec, at_t0, chunk, commit_all, numbered


@pytest.fixture
def topics(broker: Broker) -> Iterator[Topics]:
    return make_topics(broker)


def test_records_rejects_and_position_take_effect_together(topics: Topics) -> None:
    sink, fence = ready(topics.sink(), {T0: 10, T1: 0})
    records = [*numbered(10, 13), Rec(13), Rec(15, bad="no JSON")]
    outcomes = commit_all(sink, chunk({T0: (10, records), T1: (0, numbered(100, 102))}), fence)
    assert topics.ids() == [10, 11, 12, 100, 101]
    assert topics.committed() == {T0: 16, T1: 102}
    assert topics.ledger_positions() == {T0: (16, 1), T1: (102, 1)}
    assert sorted(topics.ledger_ranges()) == [(0, 10, 16, "data"), (1, 0, 102, "data")]
    assert {o.partition: o.written for o in outcomes} == {
        T0: Written(5, 3, 1, 1),
        T1: Written(2, 2, 0, 0),
    }
    assert not any(o.replayed for o in outcomes)


def test_a_replayed_chunk_writes_nothing(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    what = at_t0(0, [*numbered(0, 5), Rec(5, bad="no JSON")])
    commit_all(sink, what, fence)
    again = commit_all(sink, what, fence)
    assert topics.ids() == [0, 1, 2, 3, 4]
    assert [(o.range, o.written, o.replayed) for o in again] == [
        (OffsetRange(0, 6), Written(0, 0, 0, 0), True)
    ]
    assert len(topics.records(topics.rejects)) == 1
