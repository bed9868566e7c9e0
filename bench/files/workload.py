"""Events in the order of their time, as a log has them: a week, hour by hour, eight carriers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Producer

from oncely.testing.servers.kafka import Broker

SCHEMA = "id BIGINT, carrier STRING, flight INT, time_hour TIMESTAMP, dep_delay DOUBLE"
PARTITION_BY = ["carrier", "date(time_hour)", "hour(time_hour)"]
PARTITIONS = 4
HOURS = 7 * 24
_CARRIERS = ("UA", "AA", "B6", "DL", "EV", "MQ", "US", "WN")


@dataclass(frozen=True)
class Events:
    """A topic of events.

    Attributes:
        topic: its name.
        records: how many; ids run from 0.
        groups: distinct carriers, other than the eight; for very many open directories.
    """

    topic: str
    records: int
    groups: int = 0

    def carrier(self, i: int) -> str:
        """The carrier of event ``i``."""
        return f"c{i % self.groups:05d}" if self.groups else _CARRIERS[i % 8]

    def hour(self, i: int) -> int:
        """Hours since the week began: in order, so that an hour's events are neighbours."""
        return 0 if self.groups else i * HOURS // self.records

    def value(self, i: int) -> bytes:
        """Event ``i``: about 100 bytes of JSON."""
        hour = self.hour(i)
        at = f"2013-01-{hour // 24 + 1:02}T{hour % 24:02}:00:00Z"
        return (
            f'{{"id":{i},"carrier":"{self.carrier(i)}","flight":{1000 + i % 8000},'
            f'"time_hour":"{at}","dep_delay":{(i % 240) - 20.5}}}'
        ).encode()

    def directory(self, i: int) -> str:
        """Where event ``i`` belongs."""
        hour = self.hour(i)
        return f"carrier={self.carrier(i)}/date=2013-01-{hour // 24 + 1:02}/hour={hour % 24:02}"

    def wrong(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
        """What is wrong with rows and their directories, looked at one by one; None: nothing."""
        seen = bytearray(self.records)
        for directory, row in rows:
            i = int(row["id"])
            expected = (1000 + i % 8000, (i % 240) - 20.5, self.carrier(i))
            if (row["flight"], row["dep_delay"], row["carrier"]) != expected:
                return f"record {i} became {dict(row)}"
            if directory != self.directory(i):
                return f"record {i} lies in {directory}"
            if seen[i]:
                return f"record {i} is repeated"
            seen[i] = 1
        missing = self.records - sum(seen)
        return f"{missing} records are missing" if missing else None


def publish(broker: Broker, events: Events, partitions: int = PARTITIONS) -> Events:
    """Create the topic and fill it, evenly over the partitions."""
    broker.create_topic(events.topic, partitions)
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "enable.idempotence": True,
            "linger.ms": 50,
            "batch.num.messages": 10_000,
            "queue.buffering.max.messages": 200_000,
        }
    )
    for i in range(events.records):
        while True:
            try:
                producer.produce(events.topic, events.value(i), partition=i // 8 % partitions)
                break
            except BufferError:
                producer.poll(0.1)
        if i % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    return events
