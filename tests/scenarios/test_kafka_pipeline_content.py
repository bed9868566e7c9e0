"""Topic to topic: what a record is made of, and what becomes of one that can't be written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest

from oncely.config import parse
from oncely.core import events
from oncely.errors import DataLost, TooManyRejects
from oncely.kafka.topics import ledger_partition
from oncely.pipeline import Pipeline
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from tests.conftest import produce
from tests.scenarios.topic_world import TopicWorld, assert_exactly_once, origin, value

TRACE = ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def run(world: TopicWorld, session: Any, **sections: Any) -> None:
    Pipeline(parse(world.settings(**sections))).run("latest", spark=session)


@pytest.fixture
def world(make_topic_world: Any) -> TopicWorld:
    world: TopicWorld = make_topic_world(1)
    return world


def test_headers_travel_with_their_record(world: TopicWorld, runtime: Any, broker: Broker) -> None:
    headers = [TRACE, ("twice", b"1"), ("twice", None), ("empty", b"")]
    records = [(0, b"a", value(0), headers), (0, b"b", value(1)), (0, b"c", b"{", headers)]
    produce(broker, world.topic, records)
    run(world, runtime, sink={"headers": True, "timestamp": "source", "max_rejects": 1})
    first, second = world.records()
    assert (first.headers(), second.headers()) == (headers, None)
    times = [one.timestamp() for one in world.records(world.topic)]
    assert [first.timestamp(), second.timestamp()] == times[:2]
    (letter,) = world.records(world.rejects)
    assert letter.headers()[:4] == headers, "also those of a dead letter"
    assert (letter.key(), letter.value()) == (b"c", b"{")


def test_headers_stay_behind_unless_they_are_asked_for(
    world: TopicWorld, runtime: Any, broker: Broker
) -> None:
    produce(broker, world.topic, [(0, b"a", value(0), [TRACE])])
    run(world, runtime)
    (only,) = world.records()
    assert only.headers() is None


def test_a_key_column_and_a_topic_column(world: TopicWorld, runtime: Any, broker: Broker) -> None:
    there = [broker.create_topic(f"{world.name}-{n}") for n in range(2)]
    world.publish(10, partitions=1)
    sql = (f"SELECT id, id * 2 AS twice, CASE WHEN id < 9 THEN '{world.name}-' || (id % 2)"
           " ELSE 'nowhere' END AS goes FROM input")  # fmt: skip
    run(
        world, runtime, transform={"sql": sql},
        sink={"topic": None, "topic_column": "goes", "rejects_topic": world.rejects,
              "key": "twice", "max_rejects": 1},
    )  # fmt: skip
    for n, topic in enumerate(there):
        found = [(json.loads(one.key()), json.loads(one.value())) for one in world.records(topic)]
        assert found == [(i * 2, {"id": i, "twice": i * 2}) for i in range(n, 9, 2)]
    (letter,) = world.records(world.rejects)
    assert origin(letter) == (0, 9)
    assert b"no such topic: 'nowhere'" in dict(letter.headers())["oncely.reason"]
    assert not world.exists("nowhere")


def test_bytes_go_through_as_they_are(world: TopicWorld, runtime: Any, broker: Broker) -> None:
    bodies = [b"\x00\xff", b"", None, b"x" * 100_000]
    keys = [b"\x01", None, b"gone", b""]
    produce(broker, world.topic, [(0, k, v) for k, v in zip(keys, bodies, strict=True)])
    raw = {"format": "raw", "columns": ["key", "value"]}
    settings = world.settings(sink={"key": "key", "value": "value"}) | {"decode": raw}
    Pipeline(parse(settings)).run("latest", spark=runtime)
    found = [(one.key(), one.value()) for one in world.records()]
    assert found == list(zip(keys, bodies, strict=True)), "and a null value is a tombstone"


def test_avro(world: TopicWorld, runtime: Any, tmp_path: Path) -> None:
    schema = {
        "type": "record", "name": "Row",
        "fields": [{"name": "id", "type": "long"}, {"name": "grp", "type": ["null", "string"]}],
    }  # fmt: skip
    file = tmp_path / "row.avsc"
    file.write_text(json.dumps(schema))
    world.publish(5, partitions=1)
    run(
        world, runtime, transform={"sql": "SELECT id, grp FROM input"},
        sink={"value": "avro", "schema_file": str(file), "schema_id": 7},
    )  # fmt: skip
    bodies = [one.value() for one in world.records()]
    assert {body[:5] for body in bodies} == {b"\x00\x00\x00\x00\x07"}
    parsed = fastavro.parse_schema(schema)
    found = [fastavro.schemaless_reader(io.BytesIO(one[5:]), parsed) for one in bodies]
    assert found == [{"id": i, "grp": f"k{i}"} for i in range(5)]


def test_a_record_that_is_too_large_is_a_reject(
    world: TopicWorld, runtime: Any, broker: Broker
) -> None:
    """The record fits into the source and the rejects; the output takes less."""
    world.make_output({"max.message.bytes": "5000"})
    sizes = [10, 4_800, 6_000, 20_000, 10]
    records = [(0, b"k", value(i, size)) for i, size in enumerate(sizes)]
    produce(broker, world.topic, records)
    run(world, runtime, sink={"max_rejects": 2})
    assert world.ids() == [0, 1, 4]
    letters = world.records(world.rejects)
    assert [origin(one) for one in letters] == [(0, 2), (0, 3)]
    assert [one.value() for one in letters] == [value(2, 6_000), value(3, 20_000)]
    assert all(b"too large for topic" in dict(one.headers())["oncely.reason"] for one in letters)


def test_too_many_rejects_stop_and_say_so(world: TopicWorld, runtime: Any, broker: Broker) -> None:
    produce(broker, world.topic, [(0, None, b"{"), (0, None, b"{"), (0, None, value(1))])
    with pytest.raises(TooManyRejects):
        run(world, runtime, sink={"max_rejects": 1})
    assert world.ids() == []
    run(world, runtime, sink={"max_rejects": 2})
    assert world.ids() == [1]
    assert len(world.records(world.rejects)) == 2


# -- what the source may hold --------------------------------------------------------------


def test_holes_of_aborted_and_compacted_records(
    make_topic_world: Any, runtime: Any, broker: Broker
) -> None:
    from confluent_kafka import Producer

    world: TopicWorld = make_topic_world(2)
    world.publish(50, partitions=2)
    client = Producer({**broker.client_config(), "transactional.id": world.name})
    client.init_transactions(120)
    for commits in (True, False):
        client.begin_transaction()
        for n in range(2):
            for i in range(5):
                at = 50 + 10 * n + i
                client.produce(world.topic, value(at if commits else at + 1000), b"k", partition=n)
        assert client.flush(120) == 0  # else an abort would find nothing in the log
        (client.commit_transaction if commits else client.abort_transaction)(20)
    await_that(lambda: not world.held_back(world.topic), "the last marker")
    run(world, runtime)
    assert world.ids() == [*range(50), *range(50, 55), *range(60, 65)]
    ends = {n: 25 + 5 + 1 + 5 + 1 for n in range(2)}
    assert world.positions() == ends, "over the markers and what was aborted"
    assert world.shown() == ends
    run(world, runtime)
    assert len(world.ids()) == 60


def test_a_partition_that_is_added(make_topic_world: Any, runtime: Any, broker: Broker) -> None:
    world: TopicWorld = make_topic_world(1)
    world.make_output()
    world.publish(40, partitions=1)
    run(world, runtime, source={"start": "latest"})
    broker.add_partitions(world.topic, 3)
    records = [(n, f"n{n}".encode(), value(1_000 + n)) for n in (1, 2)]
    produce(broker, world.topic, records)
    run(world, runtime, source={"start": "latest"})
    assert world.ids() == [1_001, 1_002], "a later partition begins at its first record"
    assert world.positions() == {0: 40, 1: 1, 2: 1}


def test_records_that_are_gone(make_topic_world: Any, runtime: Any, broker: Broker) -> None:
    world: TopicWorld = make_topic_world(2)
    world.make_output()
    world.publish(100, partitions=2)
    run(world, runtime)
    world.publish(100, partitions=2, first=100)
    broker.delete_records(world.topic, {0: 80})
    with pytest.raises(DataLost, match=r"\[50, 80\)"):
        run(world, runtime)
    assert len(world.ids()) == 100
    run(world, runtime, source={"on_gap": "record"})
    assert len(world.ids()) == 170
    kinds = [json.loads(one.value()) for one in world.records(world.ledger)]
    gaps = [(one["start"], one["end"]) for one in kinds if one.get("kind") == "gap"]
    assert gaps == [(50, 80)]
    run(world, runtime)
    assert len(world.ids()) == 170


def test_another_pipeline_hides_the_end_of_the_ledger(world: TopicWorld, runtime: Any) -> None:
    """Driver and tasks find out what was committed, though the ledger topic does not show it."""
    from confluent_kafka import Producer

    world.make_output()
    world.publish(2_000, partitions=1)
    other = Producer({"bootstrap.servers": world.brokers, "transactional.id": world.name})
    other.init_transactions(120)

    def hear(event: events.Event) -> None:
        if isinstance(event, events.PipelineOpened):
            other.begin_transaction()
            own = ledger_partition(world.name)
            other.produce(world.ledger, b"{}", b'["position","another","t",0]', own)
            assert other.flush(120) == 0

    settings = parse(world.settings(spark={"max_records_per_batch": 1_000}))
    Pipeline(settings).run("latest", spark=runtime, listener=hear)
    assert world.held_back(world.ledger)
    other.abort_transaction(120)
    await_that(lambda: not world.held_back(world.ledger), "the last marker")
    assert assert_exactly_once(world) == 2_000


@pytest.mark.both
def test_rejects_and_order_over_several_runs(make_topic_world: Any, runtime: Any) -> None:
    world: TopicWorld = make_topic_world(4)
    world.make_output()
    for first in (0, 700):
        world.publish(700, first=first, bad_every=111)
        run(world, runtime, sink={"max_rejects": 100}, spark={"max_records_per_batch": 350})
    assert assert_exactly_once(world) == 1_400 - 13


def test_the_rows_of_a_spark_transform_go_to_their_topics(
    world: TopicWorld, spark: Any, broker: Broker
) -> None:
    """Each batch in one transaction, with rejects and positions."""
    topics = {broker.create_topic(name): first for first, name in enumerate(("even", "odd"))}
    world.publish(1_000, partitions=1, bad_every=100)
    heard: list[events.Event] = []
    sections: dict[str, Any] = {
        "transform": {"spark": "tests.scenarios.transforms:by_parity"},
        "sink": {
            "topic": None, "topic_column": "goes", "rejects_topic": world.rejects,
            "max_rejects": "100%",
        },
        "spark": {"max_records_per_batch": 400},
    }  # fmt: skip
    pipeline = Pipeline(parse(world.settings(**sections)))
    pipeline.run("latest", spark=spark, listener=heard.append)
    bad = {origin(one)[1] for one in world.records(world.rejects)}
    assert len(bad) == 10
    for topic, first in topics.items():
        found = sorted(json.loads(one.value())["id"] for one in world.records(topic))
        assert found == [i for i in range(first, 1_000, 2) if i not in bad]
    batches = [one for one in heard if isinstance(one, events.BatchCommitted)]
    assert [one.records for one in batches] == [400, 400, 200]
    assert sum(one.rows for one in batches) == 990
    assert world.positions() == {0: 1_000}
