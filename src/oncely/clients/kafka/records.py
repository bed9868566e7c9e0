"""Records of Kafka as Arrow tables, and single records of such tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.topics import TopicPartition

RECORDS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""Records in the form of Spark's Kafka source."""

LATEST_MS = (2**63 - 1) // 1000
"""The last timestamp that a column can hold, in the year 294,247; later ones are null."""
EVERY_COLUMN = frozenset(RECORDS.names)
_ORIGIN = frozenset({"topic", "partition", "offset"})


class KafkaRecord(NamedTuple):
    """A record as Kafka stores it; its offset is the key under which it is returned.

    Attributes:
        timestamp_ms: milliseconds since 1970, or None.
        key: bytes, or None.
        value: bytes, or None for a tombstone.
        headers: name and bytes, in order.
    """

    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class Row(NamedTuple):
    """A record of columns, as far as a message of confluent-kafka is asked for the same."""

    batch: pa.RecordBatch
    at: int

    def offset(self) -> int:
        """The record's offset."""
        offset: int = self.batch["offset"][self.at].as_py()
        return offset

    def leader_epoch(self) -> int:
        """The leader epoch; -1 if it is unknown."""
        epoch: int = self.batch["leader_epoch"][self.at].as_py()
        return epoch


@dataclass(frozen=True)
class Taken(Sequence[Row]):
    """Consecutive records of a partition in columns; parts of it are not copied.

    Attributes:
        batch: ``offset``, ``leader_epoch`` and columns of :data:`RECORDS`, of several partitions.
        rows: those of this partition.
    """

    batch: pa.RecordBatch
    rows: range

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Taken: ...
    def __getitem__(self, at: int | slice) -> Row | Taken:
        found = self.rows[at]
        return Taken(self.batch, found) if isinstance(found, range) else Row(self.batch, found)


def table_of(
    messages_of: Mapping[TopicPartition, Sequence[Any]], needs: frozenset[str]
) -> pa.Table:
    """Records as a table with their origin and the columns that are needed.

    Args:
        messages_of: per partition, ascending, without errors: messages of confluent-kafka, or
            :class:`Taken` at once.
        needs: names of :data:`RECORDS`.

    Returns:
        ``topic`` (a dictionary of strings), ``partition``, ``offset``, and ``needs``.
    """
    counts = [len(some) for some in messages_of.values()]
    topics = sorted({tp.topic for tp in messages_of})
    topic = np.repeat(np.array([topics.index(tp.topic) for tp in messages_of], np.int32), counts)
    number = np.repeat(np.array([tp.partition for tp in messages_of], np.int32), counts)
    columns: dict[str, Any] = {
        "topic": pa.DictionaryArray.from_arrays(topic, pa.array(topics, pa.string())),
        "partition": pa.array(number),
    }
    names = ["offset", *sorted(needs - _ORIGIN)]
    if taken := [one for one in messages_of.values() if isinstance(one, Taken)]:
        records = _joined(taken)
        return pa.table(columns | {name: records[name] for name in names})
    messages = [one for some in messages_of.values() for one in some]
    return pa.table(columns | {name: _COLUMNS[name](messages) for name in names})


def _joined(taken: Sequence[Taken]) -> pa.Table:
    """Records that were taken at once; those that are neighbours in memory stay together."""
    runs: list[range] = []
    for one in taken:
        start, stop = one.rows.start, one.rows.stop
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        runs.append(range(start, stop))
    return pa.Table.from_batches([taken[0].batch.slice(run.start, len(run)) for run in runs])


def each(records: pa.Table) -> Iterator[tuple[TopicPartition, int, KafkaRecord]]:
    """Partition, offset and record of each row of a table with all columns of :data:`RECORDS`."""
    # Kafka's timestamps may lie beyond the year 9999, Python's may not.
    micros = records["timestamp"].cast(pa.int64())
    columns = [micros if name == "timestamp" else records[name] for name in RECORDS.names]
    rows: Iterable[Any] = zip(*(one.to_pylist() for one in columns), strict=True)
    for topic, number, offset, at, key, value, headers in rows:
        pairs = tuple((one["key"], one["value"]) for one in headers)
        record = KafkaRecord(None if at is None else at // 1000, key, value, pairs)
        yield TopicPartition(topic, number), offset, record


def _timestamps(messages: Sequence[Any]) -> pa.Array:
    told = [one.timestamp() for one in messages]
    values = pa.array([ms if kind else None for kind, ms in told], pa.int64())
    try:
        micros = pc.multiply_checked(values, 1000)
    except pa.ArrowInvalid:  # nanoseconds as milliseconds, for example
        low, high = pc.greater_equal(values, -LATEST_MS), pc.less_equal(values, LATEST_MS)
        micros = pc.multiply(pc.if_else(pc.and_(low, high), values, None), 1000)
    return micros.cast(RECORDS.field("timestamp").type)


def _headers(messages: Sequence[Any]) -> pa.Array:
    headers = [one.headers() or () for one in messages]
    offsets = np.cumsum([0, *map(len, headers)], dtype=np.int32)
    pairs = [pair for one in headers for pair in one]
    names = pa.array([name for name, _ in pairs], pa.string())
    values = pa.array([value for _, value in pairs], pa.binary())
    together = pa.StructArray.from_arrays([names, values], ["key", "value"])
    return pa.ListArray.from_arrays(offsets, together)


_COLUMNS: Mapping[str, Callable[[Sequence[Any]], pa.Array]] = {
    "offset": lambda messages: pa.array([one.offset() for one in messages], pa.int64()),
    "timestamp": _timestamps,
    "key": lambda messages: pa.array([one.key() for one in messages], pa.binary()),
    "value": lambda messages: pa.array([one.value() for one in messages], pa.binary()),
    "headers": _headers,
}
