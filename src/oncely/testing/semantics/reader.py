"""Counts from outside: plain clients, nothing of the pipeline's code."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fastavro
import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

_PATIENCE = 60.0  # seconds without a message or an end


def in_table(url: str, table: str) -> Counter[int]:
    """How often each id stands in a table."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(f'SELECT id, count(*) FROM "{table}" GROUP BY id').fetchall()
    return Counter({int(id_): int(count) for id_, count in rows})


def in_topic(brokers: str, topic: str) -> Counter[int]:
    """How often a reader of committed records sees each id in a topic of one partition.

    Raises:
        TimeoutError: the end of the topic did not come.
        KafkaException: the broker answered something else.
    """
    return Counter(json.loads(message.value())["id"] for message in _messages(brokers, topic))


def in_files(brokers: str, manifest: str, root: Path) -> Counter[int]:
    """How often each id stands in the Avro files that a manifest topic names.

    What it does not name is not there, whatever lies below the root. What it names and is missing,
    or is not what was named, holds nothing: its records count as lost.

    Raises:
        TimeoutError: the end of the topic did not come.
        KafkaException: the broker answered something else.
    """
    named: dict[str, Mapping[str, Any]] = {}
    for message in _messages(brokers, manifest):
        path, value = message.key().decode(), message.value()
        if path.startswith("["):  # the topic's owner
            continue
        if value is None:
            named.pop(path, None)
        else:
            named[path] = json.loads(value)
    found: Counter[int] = Counter()
    for path, entry in named.items():
        found.update(_ids(root / path, entry))
    return found


def damage(found: Counter[int], records: int) -> tuple[int, int]:
    """How many of the ids from 0 on are missing, and how many effects are beyond the first."""
    lost = sum(1 for one in range(records) if not found[one])
    return lost, sum(count - 1 for count in found.values() if count > 1)


def _ids(file: Path, entry: Mapping[str, Any]) -> list[int]:
    """The ids in a file; none when it is not the one that was named."""
    try:
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            return []
        ids = [row["id"] for row in fastavro.reader(io.BytesIO(data))]
    except (OSError, ValueError, EOFError, KeyError):
        return []
    return ids if len(ids) == entry["rows"] else []


def _messages(brokers: str, topic: str) -> Iterator[Any]:
    """What a reader of committed records sees in a topic of one partition, to its end."""
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": "oncely-semantics-reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
            "log_level": 0,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        while True:
            message = consumer.poll(_PATIENCE)
            if message is None:
                raise TimeoutError(f"the end of topic {topic} did not come")
            if (error := message.error()) is None:
                yield message
            elif error.code() == KafkaError._PARTITION_EOF:
                return
            else:
                raise KafkaException(error)
    finally:
        consumer.close()
