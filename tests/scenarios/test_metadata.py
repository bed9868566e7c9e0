"""Topic, partition, offset, timestamp, key and headers of a record as columns of its row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Producer

from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.testing.readers import messages
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World, toml

METADATA = {
    "topic": "of_topic",
    "partition": "of_partition",
    "offset": "of_offset",
    "timestamp": "sent_at",
    "key": "customer",
    "headers": {"trace": "trace_id", "ce.type": "event_type"},
}
_COLUMNS = "id, of_topic, of_partition, of_offset, sent_at, customer, trace_id, event_type"
_START_MS = 1_767_225_600_123
Row = tuple[Any, ...]


def send(world: World) -> None:
    """Ten records with keys and headers, of which one has a header that is no text."""
    producer = Producer({"bootstrap.servers": world.brokers})
    for i in range(10):
        headers = [("trace", b"first"), ("trace", b"\xff" if i == 7 else b"t%d" % i)]
        more = {"headers": [*headers, ("ce.type", None)] if i % 2 else None}
        key = None if i == 4 else b"c%d" % i
        producer.produce(world.topic, b'{"id": %d}' % i, key, partition=i % 2,
                         timestamp=_START_MS + i, **more)  # fmt: skip
    assert producer.flush(30) == 0


def wanted(world: World) -> Iterator[Row]:
    """What a plain consumer reads, record by record."""
    for one in messages(world.brokers, world.topic):
        i = json.loads(one.value())["id"]
        at = datetime.fromtimestamp(one.timestamp()[1] / 1000, UTC)
        key = None if one.key() is None else one.key().decode()
        if i != 7:
            yield (i, world.topic, one.partition(), one.offset(), at, key,
                   f"t{i}" if i % 2 else None, None)  # fmt: skip


def settings(world: World, **sink: Any) -> dict[str, Any]:
    decode = {"format": "json", "schema": "id BIGINT", "metadata": deepcopy(METADATA)}
    made = world.settings(sink={"max_rejects": 1, **sink})
    return made | {"decode": decode}


def test_a_worker_writes_them_and_audit_repair_and_backfill_make_the_same(
    make_world: Any,
) -> None:
    world: World = make_world(2)
    send(world)
    file = world.folder / "pipeline.toml"
    file.write_text(toml(settings(world)))
    assert oncely_json("plan", file, "--sample", 20)["sample"]["rejected"] == 1
    oncely("work", file, "--until", "latest", *world.logged)
    rows = f"SELECT {_COLUMNS} FROM rows ORDER BY id"
    assert world.sql(rows) == sorted(wanted(world))
    oncely("audit", file)
    world.sql("DELETE FROM rows WHERE id IN (3, 4)")
    world.sql("UPDATE rows SET trace_id = 'forged' WHERE id = 5")
    oncely("audit", file, expect=1)
    oncely("repair", file, "--execute")
    assert world.sql(rows) == sorted(wanted(world))
    oncely("backfill", file, "--offsets", f"{world.topic}:0:0-5", "--execute")
    assert world.sql(rows) == sorted(wanted(world))
    without = settings(world)
    del without["decode"]["metadata"]["headers"]["trace"]
    file.write_text(toml(without))
    oncely("rejects", "replay", file)
    assert world.sql("SELECT id, customer, of_offset FROM rows WHERE id = 7") == [(7, "c7", 3)]


def into_table(world: World, runtime: Any) -> list[Row]:
    Pipeline(parse(settings(world))).run("latest", spark=runtime)
    return world.sql(f"SELECT {_COLUMNS} FROM rows")


def into_rows(world: Any, runtime: Any) -> list[Row]:
    Pipeline(parse(settings(world, partition_by=[]))).run("latest", spark=runtime)
    rows = world.place.rows() if hasattr(world, "place") else world.rows()
    return [tuple(row[name] for name in _COLUMNS.split(", ")) for row in rows]


def into_topic(world: Any, runtime: Any) -> list[Row]:
    Pipeline(parse(settings(world, key="customer"))).run("latest", spark=runtime)
    records = world.records()
    rows = [json.loads(one.value()) for one in records]
    assert [one.key() for one in records] == [
        row["customer"] and row["customer"].encode() for row in rows
    ]
    for row in rows:
        row["sent_at"] = datetime.fromisoformat(row["sent_at"])
    return [tuple(row[name] for name in _COLUMNS.split(", ")) for row in rows]


@pytest.mark.both
@pytest.mark.parametrize(
    ("world", "written"),
    [
        ("make_world", into_table),
        ("make_delta_world", into_rows),
        ("make_files_world", into_rows),
        ("make_topic_world", into_topic),
    ],
)
def test_a_run_writes_them_into_every_kind_of_destination(
    world: str, written: Any, runtime: Any, request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(world)(2)
    send(made)
    assert sorted(written(made, runtime)) == sorted(wanted(made))
