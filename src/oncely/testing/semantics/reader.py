"""Independent counts by plain clients, without code of the pipeline."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastavro
import psycopg

from oncely.testing.readers import messages


def in_table(url: str, table: str) -> Counter[int]:
    """Occurrences of each id in a table."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(f'SELECT id, count(*) FROM "{table}" GROUP BY id').fetchall()
    return Counter({int(id_): int(count) for id_, count in rows})


def in_topic(brokers: str, topic: str) -> Counter[int]:
    """Occurrences of each id for a reader of committed records, in a topic of one partition.

    Raises:
        TimeoutError: the end of the topic was not reached.
        KafkaException: another error of the broker.
    """
    return Counter(json.loads(message.value())["id"] for message in messages(brokers, topic))


def in_files(brokers: str, manifest: str, root: Path) -> Counter[int]:
    """Occurrences of each id in the Avro files of a manifest topic.

    Other files below the root are ignored. A listed file that is missing or has another checksum
    contributes no ids: its records count as lost.

    Raises:
        TimeoutError: the end of the topic was not reached.
        KafkaException: another error of the broker.
    """
    named: dict[str, Mapping[str, Any]] = {}
    for message in messages(brokers, manifest):
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


def in_delta(root: Path) -> Counter[int]:
    """Occurrences of each id in the newest version of a Delta table."""
    from deltalake import DeltaTable

    return Counter(DeltaTable(root).to_pyarrow_table(columns=["id"])["id"].to_pylist())


def damage(found: Counter[int], records: int) -> tuple[int, int]:
    """The number of missing ids from 0 on, and the number of effects beyond the first."""
    lost = sum(1 for one in range(records) if not found[one])
    return lost, sum(count - 1 for count in found.values() if count > 1)


def _ids(file: Path, entry: Mapping[str, Any]) -> list[int]:
    """The ids in a file; none if it differs from its manifest entry."""
    try:
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            return []
        ids = [row["id"] for row in fastavro.reader(io.BytesIO(data))]
    except (OSError, ValueError, EOFError, KeyError):
        return []
    return ids if len(ids) == entry["rows"] else []
