"""Records of a partition become rows in the order of their offsets, within a transaction too."""

from __future__ import annotations

from typing import Any

from oncely.config import parse
from oncely.pipeline import Pipeline
from tests.scenarios.world import World, assert_exactly_once, good, produce, verdict


def test_rows_of_a_transaction_are_in_order_also_round_refused_ones(
    make_world: Any, runtime: Any
) -> None:
    world: World = make_world(2)
    world.make_table()
    world.sql("ALTER TABLE rows ADD CHECK (grp <> 'refused')")  # found by COPY, not before it
    refused = good(1_000).replace(b'"g6"', b'"refused"')
    assert refused != good(1_000)
    records = [(i % 2, b"k", refused if i % 371 == 370 else good(i)) for i in range(2_000)]
    produce(world.brokers, world.topic, records)
    settings = parse(world.settings(sink={"max_rejects": "100%"}))
    Pipeline(settings).run("latest", spark=runtime)
    assert_exactly_once(world, rejects=5)
    [(commits,)] = world.sql("SELECT count(*) FROM oncely_ranges")
    assert commits < 20, "many rows of a transaction"
    world.sql("UPDATE rows SET inserted = -inserted")  # the control: one transaction, wrong order
    assert len(verdict(world).disordered) == 2 * 1_000 - 5 - 2
