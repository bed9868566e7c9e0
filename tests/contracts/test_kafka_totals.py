"""Totals of a compacted ledger: counts and digest of all ranges since an offset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely.commit.path import pass_over
from oncely.core.batch import Batch
from oncely.core.claim import Counts, Takeover
from oncely.core.digest import Recipe, digest_sum, row_digests
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kinds.kafka.format import RecordFormat
from oncely.stores.document import Totals
from oncely.testing.servers.kafka import Broker
from tests.filestools import publish_all
from tests.kafkatools import Topics, forget_group, make_topics
from tests.replaytools import bad, judging, replayed
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    T1,
    Rec,
    at_t0,
    chunk,
    commit_all,
    impatient,
    numbered,
    open_sink,
    ready,
    rec,
    together,
    with_rows,
)

PLAIN = "1 row key=raw value=raw"
WITH_OFFSET = "1 offset key=raw value=raw"


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker)


def totals(topics: Topics, tp: TopicPartition = T0) -> Totals | None:
    """In the newest record of the ledger topic; the copy in the group has the same."""
    sink = topics.sink()
    try:
        in_ledger = sink.cluster.settled().positions[tp]
        in_group = sink.cluster.stable_offsets([tp])[tp]
    finally:
        sink.close()
    assert in_ledger.entry == in_group.entry
    assert in_ledger.totals == in_group.totals
    return in_ledger.totals


def of_messages(messages: Sequence[Any], recipe: str = PLAIN, at: Sequence[int] = ()) -> int:
    known = Recipe.parse(recipe)
    columns = {
        "key": pa.array([one.key() for one in messages], pa.large_binary()),
        "value": pa.array([one.value() for one in messages], pa.large_binary()),
        "topic": pa.array([one.topic() for one in messages], pa.string()),
    }
    return digest_sum(row_digests(pa.table(columns), np.array(at, np.int64), known))


def test_totals_add_up_since_the_start(topics: Topics) -> None:
    sink, fence = ready(topics.sink(), {T0: 10, T1: 0})
    records = [*numbered(10, 13), Rec(13), Rec(15, bad="no JSON")]
    commit_all(sink, chunk({T0: (10, records), T1: (0, numbered(90, 92))}), fence)
    first = [one for one in topics.records(topics.output) if json.loads(one.value())["id"] < 90]
    assert totals(topics) == Totals(10, 1, 5, 3, 1, 1, of_messages(first), PLAIN)
    commit_all(sink, at_t0(16, numbered(16, 20)), fence)
    pass_over(together(sink), {T0: OffsetRange(20, 22)}, fence, "hole", impatient())
    both = [one for one in topics.records(topics.output) if json.loads(one.value())["id"] < 90]
    assert totals(topics) == Totals(10, 1, 9, 7, 1, 1, of_messages(both), PLAIN)
    sink.close()


def test_they_survive_takeovers_and_lost_group_offsets(broker: Broker, topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    again, fence = ready(topics.sink())
    commit_all(again, at_t0(3, numbered(3, 5)), fence)
    whole = Totals(0, 1, 5, 5, 0, 0, of_messages(topics.records(topics.output)), PLAIN)
    assert totals(topics) == whole
    for one in (sink, again):
        one.close()
    forget_group(broker, topics)
    third, fence = ready(topics.sink())
    commit_all(third, at_t0(5, numbered(5, 6)), fence)
    found = totals(topics)
    assert found is not None
    assert (found.since, found.rows) == (0, 6)
    third.close()


def test_a_reset_begins_them_anew(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    sink.open(Takeover(SOURCE, dict, {}, reset=lambda _: {T0: 2}))
    assert totals(topics) is None
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(2, numbered(2, 4)), fence)
    last = topics.records(topics.output)[-2:]
    assert totals(topics) == Totals(2, fence.epoch, 2, 2, 0, 0, of_messages(last), PLAIN)
    sink.close()


def test_another_recipe_begins_them_anew(topics: Topics) -> None:
    sink, fence = ready(topics.sink())
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    sink.close()
    form = RecordFormat(SCHEMA, topic=topics.output, keep_source=True)
    sink, fence = ready(topics.sink(form))
    commit_all(sink, at_t0(5, numbered(5, 7)), fence)
    last = topics.records(topics.output)[-2:]
    digest = of_messages(last, WITH_OFFSET, [5, 6])
    assert totals(topics) == Totals(5, fence.epoch, 2, 2, 0, 0, digest, WITH_OFFSET)
    assert [one.headers() for one in last] == [
        [("oncely.source", b'["t",0,%d]' % at)] for at in (5, 6)
    ]
    sink.close()


def test_the_header_replaces_that_of_an_earlier_pipeline(topics: Topics) -> None:
    form = RecordFormat(SCHEMA, topic=topics.output, keep_source=True)
    sink, fence = ready(replace(topics.sink(form), headers=True))
    before = [("a", b"1"), ("oncely.source", b'["u",7,9]'), ("a", None)]
    what = at_t0(0, [Rec(0, ({"id": 0, "name": "x"},), headers=before), rec(4, id=1, name="y")])
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers = pa.chunked_array(
        [[[{"key": key, "value": value} for key, value in before], None]], kind
    )
    commit_all(sink, replace(what, headers=headers), fence)
    assert [one.headers() for one in topics.records(topics.output)] == [
        [("a", b"1"), ("a", None), ("oncely.source", b'["t",0,0]')],
        [("oncely.source", b'["t",0,4]')],
    ]
    sink.close()


def test_rejected_messages_have_no_part(topics: Topics) -> None:
    """A message that is too large is found after all of them were encoded."""
    sink, fence = ready(topics.sink())
    records = [rec(0, id=0, name="a"), rec(1, id=1, name="x" * 2_000_000), rec(2, id=2, name="b")]
    commit_all(sink, at_t0(0, records), fence)
    written = topics.records(topics.output)
    assert totals(topics) == Totals(0, 1, 3, 2, 1, 0, of_messages(written), PLAIN)
    sink.close()


def test_a_topic_column_is_part_of_the_content(topics: Topics) -> None:
    schema = pa.schema([*SCHEMA, ("to", pa.string())])
    form = RecordFormat(schema, topic_column="to")
    sink, fence = ready(topics.sink(form))
    commit_all(sink, at_t0(0, [rec(0, id=0, name="a", to=topics.output)], schema), fence)
    recipe = "1 row key=raw topic=text value=raw"
    digest = of_messages(topics.records(topics.output), recipe)
    assert totals(topics) == Totals(0, 1, 1, 1, 0, 0, digest, recipe)
    sink.close()


def test_a_batch(topics: Topics) -> None:
    sink = replace(topics.sink(), by_batch=True)
    fence = open_sink(sink, {T0: 0, T1: 0}).fence
    sink.bind()
    rows = at_t0(0, numbered(0, 30)).rows
    ranges = {T0: OffsetRange(0, 40), T1: OffsetRange(0, 3)}
    counts = {T0: Counts(40, 0, 0, 0), T1: Counts(3, 0, 0, 0)}
    publish_all(sink, with_rows(Batch(ranges, counts), sink, rows.slice(0, 20), rows[20:]), fence)
    digest = of_messages(topics.records(topics.output))
    assert totals(topics) == Totals(0, 1, 40, 30, 0, 0, digest, PLAIN)
    assert totals(topics, T1) == Totals(0, 1, 3, 0, 0, 0, 0, "")
    sink.close()


def test_replays_amend_the_totals(topics: Topics) -> None:
    """In a record of their own: positions are moved by other transactional ids."""
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    commit_all(sink, chunk({T0: (0, [*numbered(0, 2), *bad(2, 3)]), T1: (0, bad(7))}), fence)
    written = topics.records(topics.output)
    assert replayed(sink, judging(lambda one: one.offset != 3)) == (2, 1)
    assert totals(topics) == Totals(0, 1, 4, 2, 2, 0, of_messages(written), PLAIN)
    more = topics.records(topics.output)[len(written) :]
    changes = topics.sink().cluster.settled().amended
    assert {json.loads(one.value())["id"] for one in more} == {2, 7}
    for tp, id_ in {T0: 2, T1: 7}.items():
        (mine,) = [one for one in more if json.loads(one.value())["id"] == id_]
        assert changes[tp] == Totals(0, 1, 0, 1, -1, 0, of_messages([mine]), PLAIN)
    assert replayed(sink) == (1, 0)
    assert topics.sink().cluster.settled().amended[T0].counts == Counts(0, 2, -2, 0)
    sink.close()
