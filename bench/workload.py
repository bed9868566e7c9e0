"""The records that every contender moves, and how a result is checked."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import fastavro
import psycopg
from confluent_kafka import Producer

from oncely.testing.servers.kafka import Broker

PARTITIONS = 4
SCHEMA = "id BIGINT, carrier STRING, flight INT, time_hour TIMESTAMP, dep_delay DOUBLE"
TABLE = (
    "CREATE TABLE {} (id bigint, carrier text, flight integer,"
    " time_hour timestamptz, dep_delay double precision)"
)
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
_CARRIERS = ("UA", "AA", "B6", "DL", "EV", "MQ", "US", "WN")


@dataclass(frozen=True)
class Workload:
    """A topic full of records.

    Attributes:
        topic: its name.
        records: how many it holds; ids run from 0.
    """

    topic: str
    records: int

    def wrong(self, url: str, table: str) -> str | None:
        """What is wrong with a table that should hold each record once, or None.

        A fast wrong run scores nothing.
        """
        with psycopg.connect(url) as database:
            found = database.execute(
                f"SELECT count(*), count(DISTINCT id), sum(id), sum(flight),"
                f" count(time_hour), sum(dep_delay) FROM {table}".encode()
            ).fetchone()
        n = self.records
        expected = (
            n,
            n,
            n * (n - 1) // 2,
            sum(flight(i) for i in range(n)),
            n,
            float(sum(delay(i) for i in range(n))),
        )
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
    at = f"2013-{i % 12 + 1:02}-{i % 28 + 1:02}T{i % 24:02}:00:00Z"
    return (
        f'{{"id":{i},"carrier":"{_CARRIERS[i % 8]}","flight":{flight(i)},'
        f'"time_hour":"{at}","dep_delay":{delay(i)}}}'
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
        "carrier": _CARRIERS[i % 8],
        "flight": flight(i),
        "time_hour": hour(i),
        "dep_delay": delay(i),
    }


def publish(
    broker: Broker,
    topic: str,
    records: int,
    partitions: int = PARTITIONS,
    key: Callable[[int], bytes] | None = None,
    *,
    of: Callable[[int], bytes] = record,
    compression: str = "none",
) -> Workload:
    """Create the topic and fill it, evenly over the partitions; without a key by default."""
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
                    topic, of(i), None if key is None else key(i), partition=i % partitions
                )
                break
            except BufferError:
                producer.poll(0.1)
        if i % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    return Workload(topic, records)
