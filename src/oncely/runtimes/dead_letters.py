"""Creation of dead letters from rejected records.

Each column of the records costs time, so key, headers and timestamp are read only if the decoder
or the sink needs them. For the few records that are rejected they are read from Kafka again, by
offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from oncely.clients.kafka.records import KafkaRecord
from oncely.core.batch import Reject, Rejection
from oncely.core.topics import TopicPartition
from oncely.runtimes.chunks import Origin
from oncely.sources.kafka import KafkaSource


def dead_letters(
    source: KafkaSource,
    records: pa.Table,
    origins: Sequence[Origin],
    why: Sequence[Rejection],
) -> list[Reject]:
    """A reject for each origin: the value from its columns, the rest from the broker."""
    wanted: dict[TopicPartition, list[int]] = {}
    for tp, offset in origins:
        wanted.setdefault(tp, []).append(offset)
    found = {tp: source.fetch(tp, sorted(offsets)) for tp, offsets in wanted.items()}
    values: list[Any] = records["value"].to_pylist()
    return [
        _reject(tp, offset, value, found[tp].get(offset), one)
        for (tp, offset), value, one in zip(origins, values, why, strict=True)
    ]


def _reject(
    tp: TopicPartition, offset: int, value: bytes | None, record: KafkaRecord | None, why: Rejection
) -> Reject:
    if record is None:  # deleted by retention in the meantime
        return Reject(tp, offset, None, None, value, (), why.stage, why.reason)
    kept = (record.timestamp_ms, record.key, value)
    return Reject(tp, offset, *kept, record.headers, why.stage, why.reason)
