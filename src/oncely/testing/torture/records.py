"""The records that handlers are tortured with: those of a file, or samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from confluent_kafka import Producer

from oncely.errors import Unavailable, WrongInput
from oncely.kafka import records as json_lines
from oncely.testing.servers.kafka import Broker

SAMPLES = 5
"""Records of each topic, if none are given."""


@dataclass(frozen=True)
class Record:
    """A record to publish."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()


def read(file: Path, topics: Sequence[str]) -> list[Record]:
    """The records of a file: a JSON object in each line, ``{"topic", "key", "value", "headers"}``.

    A value that is no text is published as it is written. ``topic`` may be left out if there is
    only one.

    Raises:
        WrongInput: names the line.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"--records {file}: {error}") from None
    found = [_record(line, topics, f"--records {file}, line {number}")
             for number, line in enumerate(lines, 1) if line.strip()]  # fmt: skip
    if not found:
        raise WrongInput(f"--records {file}: no records")
    return found


def _record(line: str, topics: Sequence[str], where: str) -> Record:
    given = json_lines.members(line, where, {"topic", *json_lines.MEMBERS})
    named = msgspec.json.decode(given["topic"]) if "topic" in given else None
    topic = topics[0] if named is None and len(topics) == 1 else named
    if not isinstance(topic, str) or topic not in topics:
        raise WrongInput(f"{where}: topic {topic!r} has no handler", way_out=f"one of {topics}")
    value, key, headers, _ = json_lines.message_of(given, where)
    return Record(topic, value, key, headers)


def samples(topics: Sequence[str], schema: pa.Schema, *, raw: bool) -> list[Record]:
    """JSON objects with a value for each column of a decoder; ``{"id": …}`` if it decodes none."""
    names = pa.schema([("id", pa.int64())]) if raw else schema
    rows = [{one.name: _sample(one, n) for one in names} for n in range(SAMPLES)]
    return [Record(topic, json.dumps(row).encode(), str(n).encode())
            for topic in topics for n, row in enumerate(rows)]  # fmt: skip


def _sample(column: pa.Field, number: int) -> Any:
    kind = column.type
    if pa.types.is_boolean(kind):
        return number % 2 == 0
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_floating(kind):
        return number
    if pa.types.is_timestamp(kind):
        return f"2026-01-01T00:00:{number:02d}Z"
    if pa.types.is_date(kind):
        return f"2026-01-{number + 1:02d}"
    return f"{column.name} {number}" if pa.types.is_string(kind) else None


def publish(broker: Broker, topics: Sequence[str], records: Sequence[Record]) -> None:
    """Create the topics, with one partition, and publish the records.

    Raises:
        Unavailable: they are not acknowledged.
    """
    for topic in topics:
        broker.create_topic(topic, 1)
    producer = Producer({**broker.client_config(), "linger.ms": 5, "log_level": 0})
    for one in records:
        producer.produce(one.topic, one.value, one.key, partition=0, headers=list(one.headers))
    if producer.flush(60):
        raise Unavailable("the records were not acknowledged")
