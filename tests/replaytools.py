"""What tests of replays to Kafka share: rejects written, and judged again without a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby

import numpy as np
import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.replay import replay
from oncely.core.batch import Reject
from oncely.ledgers.topic.cluster import Cluster
from oncely.sinks.base import Judge, Judged
from oncely.sinks.kafka.dead_letters import DeadLetters, replaying
from oncely.sinks.kafka.replay import replay_into_topics
from oncely.sinks.kafka.sink import KafkaSink
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

    def judge(found: Sequence[Reject]) -> Judged:
        parts = {
            tp: (0, [again(one) for one in own])
            for tp, own in groupby(found, key=lambda one: one.partition)
        }
        return Judged(chunk(parts))

    return judge


def mixing(row: Callable[[int], dict[str, object]]) -> Judge:
    """As after a Spark transform: one row, which no record answers for."""

    def judge(found: Sequence[Reject]) -> Judged:
        made = judging(lambda one: one.offset != 0)(found).chunk
        rows = pa.Table.from_pylist([row(made.rows.num_rows)], schema=SCHEMA)
        return Judged(replace(made, rows=rows, row_record=np.array([0])), traceable=False)

    return judge


def replayed(
    sink: KafkaSink, judge: Judge | None = None, at_once: int = 500, patience: Backoff | None = None
) -> tuple[int, int]:
    """A whole replay, as the pipeline's."""
    patience = patience or Backoff(0.01, 0.2, 30)
    with closing(replay_into_topics(sink.bind())) as letters:
        return replay(letters, judge or judging(), patience, at_once)


def waiting(topics: Topics, limit: int = 1000) -> tuple[list[Reject], int]:
    """The letters that wait, as the pipeline lists them."""
    place = replaying(topics.sink().pipeline_topics)
    with closing(Cluster(place)) as cluster:
        letters = DeadLetters(cluster, topics.rejects)
        found = letters.survey(limit)
        assert letters.count() == found[1]
        return found


def left(topics: Topics) -> list[int]:
    """The offsets of the records whose letters wait."""
    listed, total = waiting(topics)
    assert total == len(listed)
    return [one.offset for one in listed]
