"""Positions that neither ledger topic nor group knows: only a reset says where to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from oncely.commit.path import commit
from oncely.core.claim import Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import Stopped
from oncely.kinds.topic_destination import LedgerTopic
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import (
    Topics,
    lose_all,
    lose_position,
    lose_record_and_position,
    make_topics,
    open_sink,
    ready,
)
from tests.replaytools import bad, left
from tests.sinktools import SOURCE, T0, T1, at_t0, chunk, commit_all, impatient, numbered, together

START = {T0: 0, T1: 0}


LOSSES = pytest.mark.parametrize(
    ("lose", "lost"),
    [(lose_position, {T1}), (lose_record_and_position, {T1}), (lose_all, {T0, T1})],
)
Lose = Callable[[Broker, Topics], None]


@pytest.fixture
def topics(broker: Broker) -> Topics:
    """Two partitions were read: three records, and five with a reject."""
    topics = make_topics(broker)
    open_sink(topics.sink(), START)
    open_sink(topics.sink(), START)
    sink, fence = ready(topics.sink(), START)
    records = [*numbered(100, 104), *bad(104)]
    what = chunk({T0: (0, numbered(0, 3)), T1: (0, records)})
    list(commit(together(sink), what, fence, None, impatient()))
    return topics


def reset(topics: Topics, to: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    return dict(
        topics.sink().open(Takeover(SOURCE, lambda: START, START, reset=lambda _: to)).positions
    )


def refused(topics: Topics, lost: set[TopicPartition]) -> str:
    """By a run, and before by `plan`; the way out that they name."""
    ledger = LedgerTopic(topics.sink().pipeline_topics, topics.rejects)
    for refuses in (
        lambda: ledger.check([T0, T1], [topics.output], create=True),
        lambda: open_sink(topics.sink(), START),
    ):
        with pytest.raises(Stopped, match="its positions are lost for") as caught:
            refuses()
        assert {tp for tp in (T0, T1) if str(tp) in caught.value.message} == lost
    return caught.value.way_out


@LOSSES
def test_a_reset_says_where_to_go_on(
    topics: Topics, broker: Broker, lose: Lose, lost: set[TopicPartition]
) -> None:
    """The way out that the refusal names."""
    lose(broker, topics)
    assert "offsets reset" in refused(topics, lost)
    assert reset(topics, {T0: 1, T1: 103}) == {T0: 1, T1: 103}
    LedgerTopic(topics.sink().pipeline_topics, topics.rejects).check(
        [T0, T1], [topics.output], create=True
    )
    sink, fence = topics.sink(), open_sink(topics.sink(), START).fence
    commit_all(sink, chunk({T0: (1, numbered(1, 4)), T1: (103, numbered(103, 106))}), fence)
    assert topics.ids() == sorted([0, 1, 1, 2, 2, 3, 100, 101, 102, 103, 103, 104, 105])
    assert topics.committed() == {T0: 4, T1: 106}


@LOSSES
def test_a_reset_voids_the_dead_letters_of_what_is_read_again(
    topics: Topics, broker: Broker, lose: Lose, lost: set[TopicPartition]
) -> None:
    """They carry epochs that nobody knows any more; those that a reset gives out are newer."""
    assert left(topics) == [104]
    lose(broker, topics)
    reset(topics, {T0: 3, T1: 102})
    assert left(topics) == []


@LOSSES
def test_a_reset_that_leaves_a_lost_position_out_changes_nothing(
    topics: Topics, broker: Broker, lose: Lose, lost: set[TopicPartition]
) -> None:
    lose(broker, topics)
    before = [one.value() for one in topics.records(topics.ledger)]
    with pytest.raises(Stopped, match="the reset gives none; nothing was changed") as caught:
        reset(topics, {T0: 1})
    assert str(T1) in caught.value.message
    assert str(T0) not in caught.value.message
    assert [one.value() for one in topics.records(topics.ledger)] == before
    refused(topics, lost)


def test_only_the_lost_position_needs_a_target(topics: Topics, broker: Broker) -> None:
    lose_position(broker, topics)
    assert reset(topics, {T1: 101}) == {T0: 3, T1: 101}
    sink, fence = topics.sink(), open_sink(topics.sink(), START).fence
    commit_all(sink, at_t0(3, numbered(3, 5)), fence)
    assert topics.committed() == {T0: 5, T1: 101}


def test_a_reset_is_told_where_the_other_positions_stand(topics: Topics, broker: Broker) -> None:
    lose_position(broker, topics)
    sink = topics.sink()
    asked: list[Mapping[TopicPartition, int]] = []

    def shifted(now: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        asked.append(now)
        return {T0: now[T0] - 1, T1: 100}

    assert sink.open(Takeover(SOURCE, lambda: START, START, reset=shifted)).positions == {
        T0: 2,
        T1: 100,
    }
    assert [dict(one) for one in asked] == [{T0: 3}] * 2
