"""Messages of confluent-kafka as Arrow tables, in the form of Spark's Kafka source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.core.topics import TopicPartition
from oncely.runtimes.reprocess import RECORDS


def table_of(
    messages_of: Mapping[TopicPartition, Sequence[Any]], needs: frozenset[str]
) -> pa.Table:
    """Messages as a table with their origin, their value, and the columns that are needed.

    Args:
        messages_of: per partition, ascending, without errors.
        needs: names of :data:`oncely.runtimes.reprocess.RECORDS`.
    """
    messages = [one for some in messages_of.values() for one in some]
    counts = [len(some) for some in messages_of.values()]
    topics = sorted({tp.topic for tp in messages_of})
    topic = np.repeat(np.array([topics.index(tp.topic) for tp in messages_of], np.int32), counts)
    number = np.repeat(np.array([tp.partition for tp in messages_of], np.int32), counts)
    columns: dict[str, Any] = {
        "topic": pa.DictionaryArray.from_arrays(topic, pa.array(topics, pa.string())),
        "partition": pa.array(number),
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
