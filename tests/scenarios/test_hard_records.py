"""A huge record passes; a record that kills the decoder is found and becomes a reject."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle

from oncely.config import parse
from oncely.decode.base import Decoded, Decoder
from oncely.pipeline import Pipeline
from tests.scenarios.world import World, assert_exactly_once, good, produce


def test_a_huge_record(make_world: Any, spark: Any) -> None:
    world: World = make_world(1, **{"max.message.bytes": str(32 << 20)})
    world.publish(200, partitions=1)
    produce(world.brokers, world.topic, [(0, b"huge", good(7_000, 24 << 20))])
    world.publish(200, partitions=1, first=8_000)
    Pipeline(parse(world.settings())).run("latest", spark=spark)
    assert_exactly_once(world)
    assert world.sql("SELECT length(pad) FROM rows WHERE id = 7000") == [(24 << 20,)]


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


def test_a_record_that_kills_the_decoder(make_world: Any, spark: Any) -> None:
    world: World = make_world(1)
    world.publish(300, partitions=1)
    deadly = good(5_555).replace(b'"g', b'"DEADLY g')
    produce(world.brokers, world.topic, [(0, b"deadly", deadly)])
    world.publish(300, partitions=1, first=6_000)
    DeadlyPipeline(parse(world.settings())).run("latest", spark=spark)
    assert_exactly_once(world, rejects=1)
    assert "crashes the decoder" in world.sql("SELECT reason FROM oncely_rejects")[0][0]
