"""What tests of replays to Kafka share: rejects written, and judged again without a decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka.admin import OffsetSpec

from oncely.commit.backoff import Backoff
from oncely.commit.change import replay
from oncely.core.batch import Reject
from oncely.core.change import Judge, Reprocessed
from oncely.kafka.topics import offsets
from oncely.kinds.destination import Discard, LedgerState
from oncely.kinds.kafka.change import replay_into_topics
from oncely.kinds.kafka.sink import KafkaSink
from oncely.kinds.topic_publishing import DeadLetterTopic, replaying
from oncely.stores.topic.cluster import Cluster
from tests.kafkatools import Topics
from tests.sinktools import SCHEMA, Rec, chunk


def bad(*offsets: int) -> list[Rec]:
    """Records that are rejected, keyed by their offsets."""
    return [Rec(n, bad="no JSON", key=str(n).encode(), value=b"v%d" % n) for n in offsets]


def judging(passes: Callable[[Reject], bool] = lambda _: True) -> Judge:
    """Each reject that passes becomes a row with its offset as id."""

    def again(one: Reject) -> Rec:
        if passes(one):
            return Rec(one.offset, ({"id": one.offset, "name": "again"},))
        return Rec(one.offset, bad="still bad")

    def judge(found: Sequence[Reject]) -> Reprocessed:
        parts = {
            tp: (0, [again(one) for one in own])
            for tp, own in groupby(found, key=lambda one: one.partition)
        }
        return Reprocessed(chunk(parts), found)

    return judge


def mixing(row: Callable[[int], dict[str, object]]) -> Judge:
    """As after a Spark transform: one row, which no record answers for."""

    def judge(found: Sequence[Reject]) -> Reprocessed:
        made = judging(lambda one: one.offset != 0)(found).chunk
        rows = pa.Table.from_pylist([row(made.rows.num_rows)], schema=SCHEMA)
        return Reprocessed(
            replace(made, rows=rows, row_record=np.array([0])), found, traceable=False
        )

    return judge


def replayed(
    sink: KafkaSink, judge: Judge | None = None, at_once: int = 500, patience: Backoff | None = None
) -> tuple[int, int]:
    """A whole replay, as the pipeline's."""
    patience = patience or Backoff(0.01, 0.2, 30)
    settle(sink.bind().cluster, sink.rejects_topic)
    with closing(replay_into_topics(sink.bind())) as letters:
        return replay(letters, judge or judging(), patience, at_once)


def settle(cluster: Cluster, rejects: str) -> None:
    """Wait for the markers of transactions in the rejects' topic.

    A commit is answered before the broker has written them, and its dead letters are visible
    behind them. A transaction that the test has left open is waited for in vain.
    """
    letters, deadline = DeadLetterTopic(cluster, rejects), time.monotonic() + 2
    while time.monotonic() < deadline:
        stable = letters.ends()
        wanted = dict.fromkeys(stable, OffsetSpec.latest())
        if offsets(cluster.admin, "look for transactions", wanted, committed=False) == stable:
            return


def waiting(topics: Topics, limit: int = 1000) -> tuple[list[Reject], int]:
    """The letters that wait, as the pipeline lists them."""
    place = replaying(topics.sink().pipeline_topics)
    with closing(Cluster(place)) as cluster:
        settle(cluster, topics.rejects)
        letters = DeadLetterTopic(cluster, topics.rejects)
        found = letters.survey(limit)
        assert letters.count() == found[1]
        return found


def left(topics: Topics) -> list[int]:
    """The offsets of the records whose letters wait."""
    listed, total = waiting(topics)
    assert total == len(listed)
    return [one.offset for one in listed]


def pipeline_of(discard: Discard) -> Any:
    """What a discard needs of a pipeline whose dead letters are discarded by this function."""
    letters = SimpleNamespace(discarding=lambda: discard, look=lambda: LedgerState(rejects=1))
    return SimpleNamespace(destination=letters)
