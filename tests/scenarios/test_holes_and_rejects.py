"""Records of aborted transactions never appear, holes are crossed, bad records become rejects."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer

from tests.scenarios.world import World, assert_exactly_once, assert_steps, good, produce

BAD = {
    b"not json": "not JSON",
    b'{"id": "seven"}': "id",
    b'{"id": 9e99}': "id",
    b"": "",
    b'{"id": 1,\n"grp": "a\nb"}': "",
    b'{"id": 5, "grp": "\\u0000"}': "0x00",
}


@pytest.mark.both
def test_holes_and_rejects(make_world: Any, runtime: Any) -> None:
    world: World = make_world(2)
    world.publish(500, partitions=2)
    in_transactions(world)
    produce(world.brokers, world.topic, [(i % 2, b"k%d" % i, bad) for i, bad in enumerate(BAD)])
    world.publish(500, partitions=2, first=10_000)
    in_transactions(world)  # the partitions end with holes
    world.run(runtime, sink={"max_rejects": "100%"})
    found = assert_exactly_once(world, rejects=len(BAD))
    assert_steps(world)
    assert found.records == 1_000 + 2 * 100 + len(BAD)
    assert not world.sql("SELECT 1 FROM rows WHERE grp LIKE 'aborted%'")
    kept = world.sql('SELECT "value", "key", reason, headers, timestamp_ms FROM oncely_rejects')
    for value, key, reason, headers, timestamp in kept:
        assert BAD[bytes(value)] in reason
        assert bytes(key).startswith(b"k")
        assert headers == "[]"
        assert timestamp > 0


def in_transactions(world: World) -> None:
    """A committed transaction and an aborted one, in both partitions."""
    producer = Producer({"bootstrap.servers": world.brokers, "transactional.id": world.name})
    producer.init_transactions()
    for group, first, commit in (("committed", 20_000, True), ("aborted", 30_000, False)):
        producer.begin_transaction()
        for i in range(100):
            value = good(first + i).replace(b': "g', b': "' + group.encode())
            producer.produce(world.topic, value, partition=i % 2)
        producer.flush()
        producer.commit_transaction() if commit else producer.abort_transaction()
