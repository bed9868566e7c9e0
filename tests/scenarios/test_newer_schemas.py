"""Records of a newer Avro schema arrive during a run: it begins again, as a restart does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from oncely.config import parse
from oncely.core import events
from oncely.errors import TableMismatch
from oncely.pipeline import Pipeline
from tests.registrytools import FakeRegistry, running, wire
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.delta_world import DeltaWorld
from tests.scenarios.world import World, produce, toml

_OLD = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "user", "type": "string"}],
}
_NEW = _OLD | {
    "fields": [*_OLD["fields"], {"name": "coupon", "type": ["null", "string"], "default": None}]
}


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with running() as server:
        yield server


def send(world: World, registry: FakeRegistry, schema: Any, ids: range) -> None:
    """Records of a schema that is registered with the first of them."""
    written = registry.add(schema, f"{world.topic}-value")
    data = [{"id": i, "user": "u", "coupon": f"c{i}"} for i in ids]
    produce(world.brokers, world.topic, ((0, None, wire(written, schema, one)) for one in data))


def avro(world: World, registry: FakeRegistry, **sections: Any) -> dict[str, Any]:
    """The settings of the pipeline."""
    return world.settings(**sections) | {
        "decode": {"format": "avro", "schema_registry": registry.url}
    }


def newer_meanwhile(world: World, registry: FakeRegistry) -> Callable[[events.Event], None]:
    """Sends records of the newer schema when a run has taken the ledger over."""
    waiting = [range(5, 10)]

    def heard(event: events.Event) -> None:
        if isinstance(event, events.PipelineOpened) and waiting:
            send(world, registry, _NEW, waiting.pop())

    return heard


def of_earlier_version(settings: dict[str, Any]) -> Pipeline:
    """A pipeline that does not compare schemas."""
    pipeline = Pipeline(parse(settings))
    pipeline.__dict__["decoder"] = replace(pipeline.decoder, newest=())  # type: ignore[type-var]
    return pipeline


def coupons(count: int) -> list[tuple[int, str | None]]:
    return [(i, None if i < 5 else f"c{i}") for i in range(count)]


def test_a_field_without_a_column_ends_the_run_as_plan_does(
    make_world: Any, registry: FakeRegistry
) -> None:
    """Records before it are committed, and none is written without the field."""
    world: World = make_world(1)
    send(world, registry, _OLD, range(5))
    settings = avro(world, registry)
    with pytest.raises(TableMismatch, match="coupon") as caught:
        Pipeline(parse(settings)).work("latest", listener=newer_meanwhile(world, registry))
    file = world.folder / "pipeline.toml"
    file.write_text(toml(settings))
    (problem,) = oncely_json("plan", file, expect=2)["problems"]
    assert problem["message"] in str(caught.value)
    assert world.count() in (0, 5)
    world.sql("ALTER TABLE rows ADD coupon text")
    assert Pipeline(parse(settings)).work("latest")
    assert world.sql("SELECT id, coupon FROM rows ORDER BY id") == coupons(10)


@pytest.mark.parametrize("how", ["work", "run"])
def test_a_field_with_a_column_is_written_by_the_same_run(
    make_world: Any, registry: FakeRegistry, runtime: Any, how: str
) -> None:
    assert_written_by_the_same_run(make_world(1), registry, how, runtime)


def test_a_field_with_a_column_is_written_by_the_same_run_of_a_spark_transform(
    make_world: Any, registry: FakeRegistry, spark: Any
) -> None:
    transform = {"spark": "tests.scenarios.transforms:unchanged"}
    sections = {"transform": transform, "sink": {"keep_source": False}}
    assert_written_by_the_same_run(make_world(1), registry, "run", spark, **sections)


def assert_written_by_the_same_run(
    world: World, registry: FakeRegistry, how: str, session: Any, **sections: Any
) -> None:
    world.sql(
        'CREATE TABLE rows (id bigint, "user" text, coupon text, kafka_topic text,'
        " kafka_partition integer, kafka_offset bigint)"
    )
    send(world, registry, _OLD, range(5))
    pipeline = Pipeline(parse(avro(world, registry, **sections)))
    listener = newer_meanwhile(world, registry)
    if how == "work":
        assert pipeline.work("latest", listener=listener)
    else:
        assert pipeline.run("latest", spark=session, listener=listener)
    assert world.sql("SELECT id, coupon FROM rows ORDER BY id") == coupons(10)


def test_into_a_delta_table_it_becomes_a_column(
    make_delta_world: Any, registry: FakeRegistry, runtime: Any
) -> None:
    world: DeltaWorld = make_delta_world()
    send(world, registry, _OLD, range(5))
    settings = avro(world, registry)
    Pipeline(parse(settings)).run(
        "latest", spark=runtime, listener=newer_meanwhile(world, registry)
    )
    rows = sorted((one["id"], one.get("coupon")) for one in world.place.rows())
    assert rows == coupons(10), json.dumps(rows)


def test_an_audit_tells_of_values_that_earlier_rows_lack(
    make_world: Any, registry: FakeRegistry
) -> None:
    """A version that did not compare schemas has written the rows."""
    world: World = make_world(1)
    send(world, registry, _OLD, range(5))
    settings = avro(world, registry)
    of_earlier_version(settings).work("latest", listener=newer_meanwhile(world, registry))
    file = world.folder / "pipeline.toml"
    file.write_text(toml(settings))
    assert "'coupon'" in str(oncely_json("audit", file)["limits"]), "there is no such column"
    world.sql("ALTER TABLE rows ADD coupon text")
    send(world, registry, _NEW, range(10, 12))
    Pipeline(parse(settings)).work("latest")
    (left,) = oncely_json("audit", file, expect=4)["undecided"]
    assert (left["start"], left["end"]) == (0, 10)
    assert "without coupon, and 5 of the last 10 records have values" in left["reason"]
    assert world.sql("SELECT count(*) FROM rows WHERE coupon IS NULL") == [(10,)]
    command = left["reason"].partition("`oncely ")[2].rstrip("`").replace("FILE", str(file))
    oncely(*command.split(), "--execute")
    assert oncely_json("audit", file)["undecided"] == []
    assert world.sql("SELECT id, coupon FROM rows ORDER BY id") == coupons(12)


def test_an_audit_tells_the_same_of_a_delta_table(
    make_delta_world: Any, registry: FakeRegistry, runtime: Any
) -> None:
    world: DeltaWorld = make_delta_world()
    send(world, registry, _OLD, range(5))
    settings = avro(world, registry, sink={"keep_source": True})
    listener = newer_meanwhile(world, registry)
    of_earlier_version(settings).run("latest", spark=runtime, listener=listener)
    file = world.folder / "pipeline.toml"
    file.write_text(toml(settings))
    (left,) = oncely_json("audit", file, expect=4)["undecided"]
    assert "without coupon, and 5 of the last 10 records have values of it" in left["reason"]
