"""A huge record passes; a record that kills the decoder is found and becomes a reject."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark import cloudpickle

from oncely.audit import audit
from oncely.audit.report import Finding
from oncely.config import parse
from oncely.decode.base import Decoded, Decoder
from oncely.pipeline import Pipeline
from tests.scenarios.world import World, assert_exactly_once, good, produce, run_to_end


def test_a_huge_record(make_world: Any, runtime: Any) -> None:
    world: World = make_world(1, **{"max.message.bytes": str(32 << 20)})
    world.publish(200, partitions=1)
    produce(world.brokers, world.topic, [(0, b"huge", good(7_000, 24 << 20))])
    world.publish(200, partitions=1, first=8_000)
    Pipeline(parse(world.settings())).run("latest", spark=runtime)
    assert_exactly_once(world)
    assert world.sql("SELECT length(pad) FROM rows WHERE id = 7000") == [(24 << 20,)]


def publish_large(world: World, count: int, size: int) -> None:
    """Records that compress well."""
    producer = Producer(
        {
            "bootstrap.servers": world.brokers,
            "compression.type": "gzip",
            "message.max.bytes": 100_000_000,
            "batch.size": 16 << 20,
            "linger.ms": 100,
        }
    )
    for i in range(count):
        producer.produce(world.topic, good(i, size), partition=0)
        if i % 20 == 0:
            producer.flush(60)
    assert producer.flush(60) == 0


@pytest.mark.long
def test_records_that_are_much_larger_than_what_is_fetched(make_world: Any) -> None:
    """Half a MB in the topic holds 512 MB of records: a heap of that size has none of them."""
    world: World = make_world(1)
    publish_large(world, 1_000, 512 << 10)
    file = world.file(
        spark={"conf": {"spark.driver.memory": "512m"}},
        transform={"sql": "SELECT id, grp FROM input"},
    )
    run_to_end(file, timeout=400)
    assert_exactly_once(world)


@dataclass(frozen=True)
class Deadly:
    """A decoder that takes its process down when it meets the marker."""

    inner: Decoder

    @property
    def schema(self) -> pa.Schema:
        return self.inner.schema

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs

    def decode(self, records: pa.Table) -> Decoded:
        if any(b"DEADLY" in (value or b"") for value in records.column("value").to_pylist()):
            os.abort()
        return self.inner.decode(records)


@dataclass(frozen=True)
class DeadlyPipeline(Pipeline):
    @cached_property
    def decoder(self) -> Any:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        return Deadly(super().decoder)


@pytest.mark.both
def test_a_record_that_kills_the_decoder(make_world: Any, runtime: Any) -> None:
    world: World = make_world(1)
    world.publish(300, partitions=1)
    deadly = good(5_555).replace(b'"g', b'"DEADLY g')
    produce(world.brokers, world.topic, [(0, b"deadly", deadly)])
    world.publish(300, partitions=1, first=6_000)
    pipeline = DeadlyPipeline(parse(world.settings()))
    pipeline.run("latest", spark=runtime)
    assert_exactly_once(world, rejects=1)
    assert "crashes the decoder" in world.sql("SELECT reason FROM oncely_rejects")[0][0]
    # Audit and repair process the records again, and must see what the run has seen.
    world.sql("DELETE FROM rows WHERE id = 6000")
    world.sql("UPDATE rows SET pad = 'x' WHERE id = 200")
    world.sql("DELETE FROM oncely_rejects")
    report = audit(pipeline)
    assert report.found == {"lost": 2, "altered": 1}
    found = [Finding(one.partition, one.offset, one.kind) for one in report.findings]
    assert pipeline.repair(found, execute=True).impossible == ()
    assert audit(pipeline).verdict == "clean"
    assert "crashes the decoder" in world.sql("SELECT reason FROM oncely_rejects")[0][0]
