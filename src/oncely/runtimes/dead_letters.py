"""Creation of dead letters from rejected records.

The transfer from the JVM to Python costs time for each column, so key, headers and timestamp are
included only if the decoder needs them. For the few records that are rejected they are read from
Kafka again, by offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from oncely.core.batch import Record, RecordFetcher, Reject, Rejection
from oncely.core.topics import TopicPartition
from oncely.runtimes.chunks import Origin

_AT_ONCE = 200


def dead_letters(
    source: RecordFetcher,
    records: pa.Table,
    origins: Sequence[Origin],
    why: Sequence[Rejection],
) -> list[Reject]:
    """A reject for each origin: the value from Spark, the rest from the broker."""
    wanted: dict[TopicPartition, list[int]] = {}
    for tp, offset in origins:
        wanted.setdefault(tp, []).append(offset)
    found = {tp: _fetch(source, tp, sorted(offsets)) for tp, offsets in wanted.items()}
    values: list[Any] = records["value"].to_pylist()
    return [
        _reject(tp, offset, value, found[tp].get(offset), one)
        for (tp, offset), value, one in zip(origins, values, why, strict=True)
    ]


def _fetch(source: RecordFetcher, tp: TopicPartition, offsets: list[int]) -> dict[int, Record]:
    """Fetch a few at a time: a call's time is bounded, and scattered records take milliseconds
    each."""
    found: dict[int, Record] = {}
    for at in range(0, len(offsets), _AT_ONCE):
        found.update(source.fetch(tp, offsets[at : at + _AT_ONCE]))
    return found


def _reject(
    tp: TopicPartition, offset: int, value: bytes | None, record: Record | None, why: Rejection
) -> Reject:
    if record is None:  # deleted by retention in the meantime
        return Reject(tp, offset, None, None, value, (), why.stage, why.reason)
    kept = (record.timestamp_ms, record.key, value)
    return Reject(tp, offset, *kept, record.headers, why.stage, why.reason)
