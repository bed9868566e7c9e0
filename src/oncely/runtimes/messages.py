"""Messages of confluent-kafka as Arrow tables, in the form of Spark's Kafka source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from oncely.runtimes.reprocess import RECORDS


def table_of(messages: Sequence[Any], needs: frozenset[str]) -> pa.Table:
    """Messages as a table with their origin, their value, and the columns that are needed.

    Args:
        messages: without errors, ascending in each partition.
        needs: names of :data:`oncely.runtimes.reprocess.RECORDS`.
    """
    columns: dict[str, Any] = {
        "topic": pa.array([one.topic() for one in messages], pa.string()).dictionary_encode(),
        "partition": pa.array([one.partition() for one in messages], pa.int32()),
        "offset": pa.array([one.offset() for one in messages], pa.int64()),
        "value": pa.array([one.value() for one in messages], pa.binary()),
    }
    for name in sorted(needs - columns.keys()):
        values = [_PARTS[name](one) for one in messages]
        columns[name] = pa.array(values, RECORDS.field(name).type)
    return pa.table(columns)


def _timestamp(message: Any) -> int | None:
    kind, milliseconds = message.timestamp()
    return milliseconds * 1000 if kind else None


_PARTS: dict[str, Callable[[Any], object]] = {
    "timestamp": _timestamp,
    "key": lambda message: message.key(),
    "headers": lambda message: [
        {"key": name, "value": value} for name, value in message.headers() or ()
    ],
}
