"""Dead letters of a pipeline into Kafka by the command line: listed, replayed, gone.

The records were rejected because the columns were too narrow; the file is mended, and what
passes now stands in the output once.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from tests.conftest import produce
from tests.scenarios import runtimes
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World, toml

BIG = 1 << 40
KEY = b'{"k": 1}'
NARROW = {
    "schema": "id INT NOT NULL, grp STRING",
    "key": {"format": "json", "schema": "k INT NOT NULL"},
}
WIDE = {"schema": "id BIGINT NOT NULL, grp STRING", "key": {"format": "string", "column": "k"}}


@pytest.fixture
def world(make_world: Any, broker: Broker, runtime: Any) -> World:
    """Twelve records: five too big for the columns, one no JSON, one a tombstone of a bad key."""
    world: World = make_world(2)
    header = [("trace", b"1")]
    values = [record(i) if i % 2 else record(BIG + i) for i in range(10)]
    records = [(i % 2, KEY, value, header) for i, value in enumerate(values)]
    produce(broker, world.topic, [*records, (0, KEY, b"not json"), (1, b"?", None)])
    Pipeline(parse(settings(world, NARROW))).run("latest", spark=runtime)
    return world


def record(i: int) -> bytes:
    return json.dumps({"id": i, "grp": "g"}).encode()


def settings(world: World, decode: dict[str, Any], **sink: Any) -> dict[str, Any]:
    made = world.settings(decode=decode)
    made["sink"] = {
        "kind": "kafka",
        "topic": f"{world.name}.out",
        "ledger_topic": f"{world.name}.ledger",
        "headers": True,
        "max_rejects": 100,
        **sink,
    }
    return made


def file(world: World, decode: dict[str, Any], **sink: Any) -> Path:
    path = world.folder / f"{world.name}.toml"
    path.write_text(toml(settings(world, decode, **sink)))
    return path


def written(world: World) -> Counter[int]:
    """How often each id stands in the output."""
    found = messages(world.brokers, f"{world.name}.out")
    assert all(one.headers() == [("trace", b"1")] for one in found)
    return Counter(json.loads(one.value())["id"] for one in found)


def test_list_mend_replay(world: World) -> None:
    narrow = file(world, NARROW)
    assert oncely_json("status", narrow)["rejects"] == 7
    listed = oncely_json("rejects", "list", narrow, "--limit", "2")
    assert listed["total"] == 7
    assert listed["rejects"][0].keys() == {
        "topic", "partition", "offset", "timestamp_ms", "key", "value", "headers", "stage",
        "reason",
    }  # fmt: skip
    first = listed["rejects"][0]
    assert (first["topic"], first["partition"], first["offset"]) == (world.topic, 0, 0)
    assert json.loads(first["value"])["id"] == BIG
    assert (first["key"], first["headers"], first["stage"]) == (
        KEY.decode(),
        [["trace", "1"]],
        "decode",
    )
    assert written(world) == Counter([1, 3, 5, 7, 9])

    wide = file(world, WIDE)
    assert oncely_json("rejects", "replay", wide) == {"moved": 5, "kept": 2}
    assert written(world) == Counter([1, 3, 5, 7, 9, *(BIG + i for i in range(0, 10, 2))])
    assert oncely_json("rejects", "replay", wide) == {"moved": 0, "kept": 2}
    assert oncely_json("status", wide)["rejects"] == 2
    screen = oncely("rejects", "list", wide).stdout
    assert "not json" in screen
    assert "a tombstone written" in screen
    assert "2 rejects" in screen
    assert sum(written(world).values()) == 10


def test_a_compacted_output_is_refused(world: World, broker: Broker) -> None:
    entry = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, f"{world.name}.out", incremental_configs=[entry])
    admin = broker.admin()
    admin.incremental_alter_configs([resource])[resource].result(120)
    refused = oncely("rejects", "replay", file(world, WIDE), expect=2)
    assert "is compacted" in refused.stderr
    assert "way out" in refused.stderr
    assert sum(written(world).values()) == 5


def test_a_spark_transform_gets_the_decoded_rows(world: World, spark: Any) -> None:
    made = settings(world, {"schema": WIDE["schema"] + ", pad STRING"}, headers=False)
    made = {key: made[key] for key in made.keys() - runtimes.PROCESSES.keys()}
    made["transform"] = {"spark": "tests.scenarios.transforms:counted"}
    assert Pipeline(parse(made)).replay(spark=spark) == (5, 2)
    sums = [json.loads(one.value()) for one in messages(world.brokers, f"{world.name}.out")]
    assert [one["n"] for one in sums if "n" in one] == [5]
    assert Pipeline(parse(made)).status().rejects == 2
