"""The independent reader: what is in the topic, what is in the tables, and do they agree?

It shares no code with the pipeline, nor with the publisher: the topic is read by librdkafka with
``read_committed``, the records by Python's ``json`` under the rules of :mod:`demo.rules`, the
tables by plain SQL. It runs as a process of its own and tells in its answer whether Oncely was
in it.

Both ends stand still before anything is compared: the topic's last stable offsets are taken
first and asked again at the end, each table is read in one snapshot.
"""

from __future__ import annotations

import json
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psycopg
from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from demo.rules import COLUMNS, Values, row_of

_BROKERS, _DATABASE = "READER_BROKERS", "READER_DATABASE_"
_ASK, _SILENCE = 10.0, 30.0  # seconds

Place = tuple[int, int]
"""Partition and offset."""


# -- the topic -----------------------------------------------------------------------------


@dataclass
class Topic:
    """A topic's readable records, judged.

    Attributes:
        ends: last stable offset of each partition.
        good: id to the row it must become.
        broken: place to the record's bytes.
        where: id to its record's place.
    """

    ends: dict[int, int] = field(default_factory=dict)
    good: dict[int, Values] = field(default_factory=dict)
    broken: dict[Place, bytes | None] = field(default_factory=dict)
    where: dict[int, Place] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """How many records a read_committed reader gets."""
        return len(self.good) + len(self.broken)

    def add(self, place: Place, value: bytes | None) -> None:
        """Judge a record.

        Raises:
            ValueError: its id was there before, so rows could not be told apart.
        """
        row = row_of(value)
        if row is None:
            self.broken[place] = value
            return
        if row[0] in self.good:
            raise ValueError(f"id {row[0]} is in the topic twice: at {place} too")
        self.good[row[0]] = row
        self.where[row[0]] = place


def stable_ends(brokers: str, topic: str) -> dict[int, int]:
    """Ask for the last stable offset (LSO, KIP-98) of each partition."""
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": 2})
    found = admin.list_topics(topic, timeout=_ASK).topics[topic]
    wanted = {TopicPartition(topic, number): OffsetSpec.latest() for number in found.partitions}
    answers = admin.list_offsets(
        wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_ASK
    )
    return {partition.partition: one.result().offset for partition, one in answers.items()}


def read_topic(brokers: str, topic: str) -> Topic:
    """Read everything up to the last stable offsets.

    Raises:
        RuntimeError: the topic falls silent before its end, or it grew meanwhile.
    """
    read = Topic(stable_ends(brokers, topic))
    for message in messages(brokers, topic, read.ends):
        read.add((message.partition(), message.offset()), message.value())
    if stable_ends(brokers, topic) != read.ends:
        raise RuntimeError(f"topic {topic} grew while it was read: both ends must stand still")
    return read


def messages(
    brokers: str, topic: str, ends: Mapping[int, int], begins: Mapping[int, int] | None = None
) -> Iterator[Message]:
    """The messages of each partition up to its end, as a read_committed reader gets them.

    Raises:
        RuntimeError: the topic falls silent before.
    """
    begins = begins or {}
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "demo-reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,  # the last offset may hold no record: a marker, an abort
            "auto.offset.reset": "error",
            "log_level": 2,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, number, begins.get(number, 0)) for number in ends])
        open_ = {number for number, end in ends.items() if end > begins.get(number, 0)}
        heard = time.monotonic()
        while open_:
            for message in consumer.consume(10_000, 0.5):
                heard = time.monotonic()
                if message.error() is None:
                    if message.offset() < ends[message.partition()]:
                        yield message
                elif message.error().code() == KafkaError._PARTITION_EOF:
                    if message.offset() >= ends[message.partition()]:
                        open_.discard(message.partition())
                else:
                    raise KafkaException(message.error())
            if time.monotonic() - heard > _SILENCE:
                raise RuntimeError(f"nothing came for {_SILENCE:.0f} s; partitions left: {open_}")
    finally:
        consumer.close()


# -- the tables ----------------------------------------------------------------------------


@dataclass
class Tables:
    """Rows, and rejects where there is a table of them: (place, the record's bytes)."""

    rows: list[Values]
    rejects: list[tuple[Place, bytes | None]] | None


def read_tables(url: str, table: str, rejects: str | None, topic: str) -> Tables:
    """Read both tables in one snapshot. The names are SQL, as the caller quotes them."""
    with psycopg.connect(url, application_name="demo-reader") as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        connection.execute("SET LOCAL TimeZone = 'UTC'")
        rows = _all(connection, f"SELECT {', '.join(COLUMNS)} FROM {table}")
        if rejects is None:
            return Tables(rows, None)
        kept = _all(
            connection,
            f'SELECT "partition", "offset", "value" FROM {rejects} WHERE topic = %s',
            topic,
        )
        return Tables(rows, [((partition, offset), value) for partition, offset, value in kept])


def _all(connection: psycopg.Connection[Values], query: str, *params: object) -> list[Values]:
    with connection.cursor(binary=True) as cursor:
        return cursor.execute(query.encode(), params).fetchall()


# -- the comparison ------------------------------------------------------------------------


@dataclass
class Verdict:
    """The count.

    Attributes:
        records: in the topic, as a read_committed reader gets them.
        good: of them flights.
        rows: in the table.
        rejects: in the table of rejects.
        lost: flights without a row; broken records without a reject, where rejects are kept.
        duplicated: rows and rejects that are there once more than they should be.
        changed: rows that differ from their record, rejects that differ from their bytes.
        unexpected: rows of no flight (broken or never committed), rejects of no broken record.
        examples: the first few of what is wrong, in words.
    """

    records: int = 0
    good: int = 0
    rows: int = 0
    rejects: int = 0
    lost: int = 0
    duplicated: int = 0
    changed: int = 0
    unexpected: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, example: str) -> None:
        """Keep an example, as long as there are few."""
        if len(self.examples) < 10:
            self.examples.append(example)


def compare(topic: Topic, tables: Tables) -> Verdict:
    """Compare record by record: rows by id and by every value, rejects by offset and bytes."""
    verdict = Verdict(topic.records, len(topic.good), len(tables.rows))
    _compare_rows(topic, tables.rows, verdict)
    if tables.rejects is not None:
        verdict.rejects = len(tables.rejects)
        _compare_rejects(topic, tables.rejects, verdict)
    return verdict


def _compare_rows(topic: Topic, rows: Iterable[Values], verdict: Verdict) -> None:
    seen: set[int] = set()
    for row in rows:
        wanted = topic.good.get(row[0])
        if wanted is None:
            verdict.unexpected += 1
            verdict.note(f"a row with id {row[0]}, but no readable flight has that id")
        elif row[0] in seen:
            verdict.duplicated += 1
            verdict.note(f"id {row[0]} is in the table again; its record is at {_at(topic, row)}")
        elif row != wanted:
            verdict.changed += 1
            verdict.note(f"id {row[0]} differs: {row!r} for {wanted!r}")
        seen.add(row[0])
    for lost in topic.good.keys() - seen:
        verdict.lost += 1
        verdict.note(f"id {lost} has no row; its record is at {topic.where[lost]}")


def _compare_rejects(
    topic: Topic, rejects: Iterable[tuple[Place, bytes | None]], verdict: Verdict
) -> None:
    seen: set[Place] = set()
    for place, value in rejects:
        if place not in topic.broken:
            verdict.unexpected += 1
            verdict.note(f"a reject at {place}, but no broken record is there")
        elif place in seen:
            verdict.duplicated += 1
            verdict.note(f"the record at {place} is rejected twice")
        elif value != topic.broken[place]:
            verdict.changed += 1
            verdict.note(f"the reject at {place} has other bytes than the record")
        seen.add(place)
    for lost in topic.broken.keys() - seen:
        verdict.lost += 1
        verdict.note(f"the broken record at {lost} is no reject")


def _at(topic: Topic, row: Values) -> str:
    partition, offset = topic.where[row[0]]
    return f"partition {partition}, offset {offset}"


# -- a process of its own ------------------------------------------------------------------


def environment(brokers: str, databases: Mapping[str, str]) -> dict[str, str]:
    """The environment of ``python -m demo.reader``: URLs hold passwords, arguments are public."""
    named = {f"{_DATABASE}{name.upper()}": url for name, url in databases.items()}
    return {**os.environ, _BROKERS: brokers, **named}


def flights_before(topic: Topic, positions: Iterable[Mapping[int, int]]) -> list[int]:
    """Count the good records that lie before each of the positions (partition to offset)."""
    offsets: dict[int, list[int]] = {partition: [] for partition in topic.ends}
    for partition, offset in topic.where.values():
        offsets[partition].append(offset)
    for found in offsets.values():
        found.sort()
    return [
        sum(bisect_left(offsets[partition], at) for partition, at in one.items())
        for one in positions
    ]


def main(arguments: list[str]) -> None:
    """Compare ``topic name=table[,rejects] …``, a database for each name; print JSON.

    Standard input: ``{name: [{partition: offset}, …]}``, positions that were seen on the way.
    For each the answer tells how many flights lie before it.
    """
    topic_name, *wanted = arguments
    topic = read_topic(os.environ[_BROKERS], topic_name)
    on_the_way = json.load(sys.stdin)
    answer: dict[str, Any] = {}
    for one in wanted:
        name, _, names = one.partition("=")
        table, _, rejects = names.partition(",")
        url = os.environ[f"{_DATABASE}{name.upper()}"]
        tables = read_tables(url, table, rejects or None, topic_name)
        positions = ({int(k): v for k, v in at.items()} for at in on_the_way.get(name, []))
        answer[name] = {
            **asdict(compare(topic, tables)),
            "flights_before": flights_before(topic, positions),
        }
    answer["pipeline_code_imported"] = any(name.split(".")[0] == "oncely" for name in sys.modules)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
