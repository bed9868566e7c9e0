"""Batch commit to Kafka: messages, publications that do not end well, and zombies."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from oncely.commit.path import pass_over
from oncely.core.batch import Chunk
from oncely.core.claim import Claim, Fence, PositionMoved
from oncely.core.ranges import OffsetRange
from oncely.errors import InvariantViolation, Stopped, Unavailable
from oncely.kafka.client import make
from oncely.kafka.sender import Producer
from oncely.kinds import topic_publishing
from oncely.kinds.kafka.format import RawValue, RecordFormat
from oncely.kinds.kafka.sink import KafkaSink
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics, open_sink
from tests.scenarios import publishing_jobs as jobs
from tests.scenarios.kafka_jobs import Calls, patient
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    T1,
    T2,
    at_t0,
    commit_on,
    numbered,
    publish_on,
    together,
)


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker)


def ready(topics: Topics, **more: Any) -> tuple[KafkaSink, Fence]:
    sink = jobs.batch_sink(topics, **more)
    return sink, open_sink(sink, jobs.START).fence


def test_keys_and_topics_of_rows(topics: Topics, broker: Broker) -> None:
    schema = pa.schema([("to", pa.string()), ("k", pa.int64()), ("v", pa.binary())])
    second = broker.create_topic(f"second-{topics.output}", 1, {"max.message.bytes": "2000"})
    form = RecordFormat(schema, RawValue("v"), topic_column="to", key="k")
    sink = jobs.batch_sink(topics, form=form)
    fence = open_sink(sink, jobs.START).fence
    data = [
        {"to": topics.output, "k": 1, "v": b"a" * 5000},
        {"to": second, "k": None, "v": b"b"},
        {"to": second, "k": 3, "v": None},
        *({"to": second, "k": n, "v": b"c" * 900} for n in range(10)),
    ]
    what = jobs.publication(sink, pa.Table.from_pylist(data, schema))
    assert {one.name for one in what.staged} == {topics.output, second}
    jobs.publish_all(sink, what, fence)
    (one,) = topics.records(topics.output)
    assert (one.key(), one.value()) == (b"1", b"a" * 5000)
    two = [(m.key(), m.value()) for m in topics.records(second)]
    assert two[:2] == [(None, b"b"), (b"3", None)]
    assert [key for key, _ in two[2:]] == [str(n).encode() for n in range(10)]


@pytest.mark.parametrize(
    ("form", "row", "match"),
    [
        ({"topic": "out"}, {"id": 1, "name": "x" * 2_000_000}, "bytes are too large for topic"),
        ({"topic_column": "name"}, {"id": 1, "name": "nowhere"}, "no such topic: 'nowhere'"),
        ({"topic_column": "name"}, {"id": 1, "name": None}, "sink.topic_column is null"),
    ],
)
def test_a_row_that_is_no_message_stops(
    topics: Topics, form: dict[str, str], row: dict[str, Any], match: str
) -> None:
    own = {"topic": topics.output} if "topic" in form else form
    sink = jobs.batch_sink(topics, form=RecordFormat(SCHEMA, **own))
    open_sink(sink, jobs.START)
    assert sink.pack(pa.Table.from_pylist([{"id": 5, "name": topics.output}], SCHEMA))
    with pytest.raises(Stopped, match=match):
        sink.pack(pa.Table.from_pylist([row], SCHEMA))


# -- what a publication leaves when it does not end well --------------------------------------


class Faulty:
    """Makes producers of which one method does something else."""

    def __init__(self, name: str, instead: Callable[..., Any]) -> None:
        self._name, self._instead = name, instead

    def __call__(self, kind: Any, *args: Any, **own: Any) -> Any:
        made = make(kind, *args, **own)
        return _Faulty(made, self._name, self._instead) if issubclass(kind, Producer) else made


class _Faulty:
    def __init__(self, inner: Any, name: str, instead: Callable[..., Any]) -> None:
        self._inner, self._name, self._instead = inner, name, instead

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name != self._name:
            return method
        return lambda *args, **own: self._instead(method, *args, **own)


def once(instead: Callable[..., Any]) -> Callable[..., Any]:
    """At the first call only."""
    done: list[bool] = []

    def call(method: Any, *args: Any, **own: Any) -> Any:
        if done:
            return method(*args, **own)
        done.append(True)
        return instead(method, *args, **own)

    return call


def faulty(sink: KafkaSink, name: str, instead: Callable[..., Any]) -> KafkaSink:
    connect = Faulty(name, instead)
    return dataclasses.replace(
        sink, pipeline_topics=dataclasses.replace(sink.pipeline_topics, connect=connect)
    )


@pytest.mark.parametrize("committed", [True, False])
def test_a_lost_answer_is_settled_by_asking(topics: Topics, committed: bool) -> None:
    sink, fence = ready(topics)
    what = jobs.of_two_tasks(sink)
    stale = sink.ledger.positions(fence)

    def silent(method: Any, *args: Any) -> None:
        if committed:
            method(*args)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    with pytest.raises(Unavailable, match="commit_transaction"):
        faulty(sink, "commit_transaction", silent).publish(
            what, fence, Claim(fence, what.ranges, stale)
        )
    if committed:
        with pytest.raises(PositionMoved):
            sink.publish(what, fence, Claim(fence, what.ranges, stale))  # blindly
    assert jobs.publish_all(sink, what, fence) == committed
    jobs.look(topics)


def test_what_can_not_be_is_not_published(topics: Topics) -> None:
    sink, fence = ready(topics)
    part, entries = jobs.rows(range(15)), sink.ledger.positions(fence)
    with pytest.raises(InvariantViolation, match="rows without a range"):
        publish_on(sink, jobs.publication(sink, part, ends=jobs.START), entries, fence)
    with pytest.raises(InvariantViolation, match="does not begin at the position"):
        publish_on(sink, jobs.publication(sink, part, start={T0: 1, T1: 0}), entries, fence)
    with pytest.raises(InvariantViolation, match="by publishing"):
        commit_on(sink, at_t0(0, numbered(0, 2)), entries, fence)
    with pytest.raises(InvariantViolation, match="is moved in mode batch"):
        commit_on(topics.sink(), at_t0(0, numbered(0, 2)), entries, fence)
    with pytest.raises(InvariantViolation, match="does not publish"):
        publish_on(topics.sink(), jobs.publication(sink, part), entries, fence)
    jobs.look(topics, there=False)
    publish_on(
        sink, jobs.publication(sink, ends=jobs.START, rejects=False), entries, fence
    )  # no new data


def test_a_publication_that_takes_too_long_says_what_to_change(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, fence = ready(topics)
    what = jobs.of_two_tasks(sink)
    late = 0.0
    monkeypatch.setattr(topic_publishing, "monotonic", lambda: time.monotonic() + late)

    def slowly(method: Any, *args: Any) -> Any:
        nonlocal late
        late = 61.0
        return method(*args)

    slow = faulty(sink, "produce_batch", slowly)
    with pytest.raises(Unavailable, match="longer than the 60 s") as told:
        slow.publish(what, fence, Claim(fence, what.ranges, sink.ledger.positions(fence)))
    assert "sink.transaction_timeout" in told.value.way_out
    assert "spark.max_records_per_batch" in told.value.way_out
    jobs.look(topics, there=False)
    late = 0.0
    jobs.publish_all(sink, what, fence)
    jobs.look(topics)


# -- who else writes --------------------------------------------------------------------------


def test_holes_and_partitions_found_while_running(topics: Topics) -> None:
    sink, fence = ready(topics)
    sink.ledger.add_partitions(fence, {T2: 4}, SOURCE)
    nothing = Chunk.of_nothing({T0: OffsetRange(0, 3), T2: OffsetRange(4, 9)})
    for replayed in (False, True):
        done = pass_over(together(sink), nothing.ranges, fence, "hole", patient())
        assert [one.replayed for one in done] == [replayed] * 2
    jobs.carry_on(sink, fence, T2, 9, 12)
    assert topics.committed() == {T0: 3, T1: 0, T2: 12}
    assert topics.ids() == [9, 10, 11]


BEFORE = ("before", 1, "")
BETWEEN = ("after", 1, "commit_transaction")  # the epoch is taken, no position is written yet
KINDS = [("publish", "batch"), ("publish", "partition"), ("hole", "batch"), ("commit", "batch"),
         ("add", "batch")]  # fmt: skip


@pytest.mark.parametrize("moment", [BEFORE, BETWEEN], ids=["before", "between"])
@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_a_zombie_that_has_read_before_or_within_the_takeover(
    topics: Topics, kind: str, mode: str, moment: tuple[str, int, str]
) -> None:
    """It has initialised its id and read; it goes on when the new run has written."""
    when, at, only = moment
    jobs.taken_over(kind, mode, topics, lambda old: Calls(at, when, old.start, only))


def test_init_comes_before_the_read_that_counts(topics: Topics) -> None:
    """The old run had decided, and initialises its id when the new run has written."""
    old = jobs.zombie("publish", topics, at=1)
    old.start()
    new = jobs.batch_sink(topics)
    jobs.carry_on(new, open_sink(new, {T0: 0}).fence, T0, 0, 10)
    assert isinstance(old.finish(), PositionMoved)
    assert topics.ids() == list(range(10))


@pytest.mark.parametrize("call", ["send_offsets_to_transaction", "commit_transaction"])
def test_a_zombie_in_an_open_transaction(topics: Topics, call: str) -> None:
    """What it has left open neither hides anything from the new run nor takes effect."""
    sink, fence = ready(topics)
    what, entries = jobs.of_two_tasks(sink), sink.ledger.positions(fence)
    old = jobs.Paused(
        sink, lambda one: one.publish(what, fence, Claim(fence, what.ranges, entries)), 1, call
    )
    old.start()
    new, newer = ready(topics)
    jobs.publish_all(new, jobs.of_two_tasks(new), newer)
    jobs.look(topics)
    assert isinstance(old.finish(), Unavailable)
    jobs.look(topics)
