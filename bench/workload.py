"""The records that every contender moves, and how a result is checked."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime

import fastavro
import psycopg
from confluent_kafka import Producer

from oncely.testing.servers.kafka import Broker

PARTITIONS = 4
SCHEMA = "id BIGINT, carrier STRING, flight INT, time_hour TIMESTAMP, dep_delay DOUBLE"
COLUMNS = "id bigint, carrier text, flight int, time_hour timestamptz, dep_delay double precision"
AVRO = {
    "type": "record",
    "name": "Flight",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "carrier", "type": ["null", "string"]},
        {"name": "flight", "type": ["null", "int"]},
        {"name": "time_hour", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "dep_delay", "type": ["null", "double"]},
    ],
}
_PARSED = fastavro.parse_schema(AVRO)
CARRIERS = ("UA", "AA", "B6", "DL", "EV", "MQ", "US", "WN")


def wrong_table(url: str, table: str, n: int) -> str | None:
    """What is wrong with a table that should hold each of ``n`` records once, or None."""
    with psycopg.connect(url) as database:
        found = database.execute(
            f"SELECT count(*), count(DISTINCT id), sum(id), sum(flight),"
            f" count(time_hour), sum(dep_delay) FROM {table}".encode()
        ).fetchone()
    flights, delays = sum(map(flight, range(n))), float(sum(map(delay, range(n))))
    expected = (n, n, n * (n - 1) // 2, flights, n, delays)
    return None if found == expected else f"{table}: found {found}, expected {expected}"


def flight(i: int) -> int:
    """The flight number of record ``i``: 8,000 different ones."""
    return 1000 + i % 8000


def delay(i: int) -> float:
    """The delay of record ``i`` in minutes, evenly over four hours."""
    return (i % 240) - 20.5


def hour(i: int) -> datetime:
    """The hour of record ``i``."""
    return datetime(2013, i % 12 + 1, i % 28 + 1, i % 24, tzinfo=UTC)


def record(i: int) -> bytes:
    """Record ``i``: 99 to 103 bytes of JSON."""
    hour = f"2013-{i % 12 + 1:02}-{i % 28 + 1:02}T{i % 24:02}"
    return flight_json(i, CARRIERS[i % 8], hour)


def flight_json(i: int, carrier: str, hour: str) -> bytes:
    """A record of a carrier at an hour, given as ``2013-01-31T23``."""
    return (
        f'{{"id":{i},"carrier":"{carrier}","flight":{flight(i)},'
        f'"time_hour":"{hour}:00:00Z","dep_delay":{delay(i)}}}'
    ).encode()


def avro_record(i: int) -> bytes:
    """Record ``i`` as an Avro datum of 27 to 29 bytes."""
    datum, out = row(i), io.BytesIO()
    fastavro.schemaless_writer(out, _PARSED, datum)
    return out.getvalue()


def row(i: int) -> dict[str, object]:
    """The row of record ``i``."""
    return {
        "id": i,
        "carrier": CARRIERS[i % 8],
        "flight": flight(i),
        "time_hour": hour(i),
        "dep_delay": delay(i),
    }


def publish(
    broker: Broker,
    topic: str,
    records: int,
    *,
    partitions: int = PARTITIONS,
    of: Callable[[int], bytes] = record,
    key: Callable[[int], bytes] | None = None,
    side_by_side: int = 1,
    compression: str = "none",
) -> None:
    """Create the topic and fill it, evenly over the partitions; without a key by default.

    ``side_by_side``: so many neighbours are in the same partition.
    """
    broker.create_topic(topic, partitions)
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            # A new topic refuses first requests, and without this their retries change the order.
            "enable.idempotence": True,
            "linger.ms": 50,
            "batch.num.messages": 10_000,
            "queue.buffering.max.messages": 200_000,
            "compression.type": compression,
            "message.max.bytes": 2_000_000,
        }
    )
    for i in range(records):
        while True:
            try:
                producer.produce(
                    topic, of(i), key and key(i), partition=i // side_by_side % partitions
                )
                break
            except BufferError:
                producer.poll(0.1)
        if i % 10_000 == 0:
            producer.poll(0)
    producer.flush()
