"""A chunk as Kafka records: encoded once, cut by topic-partition, too large ones rejected.

The broker compares ``max.message.bytes`` with a whole batch, and a record alone in its batch is
the smallest one there is. So a record's size is that of its batch (KIP-98, message format 2)
before compression: whatever a codec makes of it, it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa

from oncely.clients.kafka.producer import Columns, binaries, lengths
from oncely.clients.kafka.transaction import Message
from oncely.core.batch import Chunk, IntArray, Rejection
from oncely.core.topics import TopicPartition
from oncely.sinks.kafka.record_format import RecordFormat, header_lists

T = TypeVar("T")

_NONE = pa.array([], pa.large_binary())
_BATCH = 61  # bytes before the records of a batch
_FIXED = 3  # attributes, timestamp delta and offset delta of its first record
_MOST = 64  # more than all varints of a record without headers
Limits = Callable[[Sequence[str]], Mapping[str, int]]
"""Names of topics to ``max.message.bytes``; those that are not there are left out."""


@dataclass(frozen=True)
class Encoded:
    """What a chunk becomes.

    Attributes:
        record: per message, the record it came from (int64), ascending.
        topic, key, value, headers: per message; ``headers`` None when no message has any.
        rejections: the chunk's own, and those of records that can't be written.
        limits: of the topics that are written to.
        only: the one topic that all messages go to, if there is one.
    """

    record: IntArray
    topic: Sequence[str | None]
    key: pa.LargeBinaryArray
    value: pa.LargeBinaryArray
    headers: Sequence[Sequence[tuple[str, bytes | None]]] | None
    rejections: tuple[Rejection, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    only: str | None = None

    @classmethod
    def nothing(cls, rejections: tuple[Rejection, ...] = ()) -> Encoded:
        """No message."""
        return cls(np.array([], dtype=np.int64), (), _NONE, _NONE, None, rejections)

    def of(self, chunk: Chunk, tp: TopicPartition) -> dict[str, IntArray]:
        """The messages of one topic-partition, in order, by the topic they go to."""
        if not len(self.record):
            return {}
        mine = chunk.partition[self.record] == chunk.partitions.index(tp)
        return self._by_topic(np.flatnonzero(mine))

    @property
    def all(self) -> dict[str, IntArray]:
        """All messages, in order, by the topic they go to."""
        return self._by_topic(np.arange(len(self.record)))

    def _by_topic(self, wanted: IntArray) -> dict[str, IntArray]:
        if self.only is not None and not self.rejections:
            return {self.only: wanted} if len(wanted) else {}
        bad = {one.record for one in self.rejections}
        by_topic: dict[str, list[int]] = {}
        for at in wanted.tolist():
            topic = self.topic[at]
            if topic is not None and int(self.record[at]) not in bad:
                by_topic.setdefault(topic, []).append(at)
        return {topic: np.array(own, dtype=np.int64) for topic, own in by_topic.items()}

    def messages(self, at: IntArray) -> list[Message]:
        """Those messages, with headers."""
        plain = self.columns(at)
        headers = [self.headers[i] for i in at.tolist()] if self.headers else [()] * len(at)
        return list(map(Message, binaries(plain.value), binaries(plain.key), headers))

    def columns(self, at: IntArray) -> Columns:
        """Those messages without their headers."""
        if len(at) == len(self.value):  # all of them, as they stand
            return Columns(self.key, self.value)
        return Columns(self.key.take(pa.array(at)), self.value.take(pa.array(at)))


def encode(chunk: Chunk, form: RecordFormat, limits: Limits) -> Encoded:
    """Encode a chunk's rows, and its deletes as tombstones, in the order of their records."""
    if not chunk.rows.num_rows and not len(chunk.delete_record):
        return Encoded.nothing(chunk.rejections)
    rows, bad = _values(chunk, form)
    keys = form.keys(chunk.rows) if chunk.rows.num_rows else _NONE
    topics = form.topics(chunk.rows) if chunk.rows.num_rows else []
    headers = form.header_lists(chunk.rows) if chunk.rows.num_rows else None
    record = chunk.row_record
    if chunk.deletes is not None and len(chunk.delete_record):
        gone = len(chunk.delete_record)
        record = np.concatenate([record, chunk.delete_record])
        order = np.argsort(record, kind="stable")
        record = record[order]
        rows = _merged(rows, pa.nulls(gone, pa.large_binary()), order)
        keys = _merged(keys, form.keys(chunk.deletes), order)
        topics = _ordered([*topics, *[form.topic] * gone], order)
        headers = _ordered([*headers, *[[]] * gone], order) if headers else None
    if headers is None and chunk.headers is not None:
        headers = header_lists(chunk.headers.take(pa.array(record)))
    named = {form.topic} if form.topic is not None else set(topics)
    known = limits(sorted(topic for topic in named if topic is not None))
    found = Encoded(record, topics, keys, rows, headers, (), known, form.topic)
    refused = {one.record: one for one in (*chunk.rejections, *bad, *_unwritable(found))}
    return Encoded(
        record, topics, keys, rows, headers,
        tuple(refused[at] for at in sorted(refused)), known, form.topic,
    )  # fmt: skip


def _values(chunk: Chunk, form: RecordFormat) -> tuple[pa.LargeBinaryArray, list[Rejection]]:
    """The rows' values; those of rows that can't be encoded are None, and rejected."""
    if not chunk.rows.num_rows:
        return _NONE, []
    try:
        return form.values(chunk.rows), []
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        pass
    done: list[bytes | None] = []
    bad: list[Rejection] = []
    for at in range(chunk.rows.num_rows):
        try:
            done += binaries(form.values(chunk.rows.slice(at, 1)))
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            done.append(None)
            reason = f"can't be encoded: {type(error).__name__}: {error}"
            bad.append(Rejection(int(chunk.row_record[at]), "write", reason))
    return pa.array(done, pa.large_binary()), bad


def _unwritable(found: Encoded) -> list[Rejection]:
    """Records whose topic is not there, or does not take their size."""
    if found.only is not None and found.only in found.limits and found.headers is None:
        largest = int(lengths(found.key).max() + lengths(found.value).max())
        if _BATCH + _MOST + largest <= found.limits[found.only]:
            return []
    bad = []
    smallest = min(found.limits.values(), default=0)
    plain = found.headers is None
    keys, values = binaries(found.key), binaries(found.value)
    for at, topic in enumerate(found.topic):
        limit = found.limits.get(topic or "")
        if limit is None:
            reason = "sink.topic_column is null" if topic is None else f"no such topic: {topic!r}"
            bad.append(Rejection(int(found.record[at]), "write", reason))
            continue
        key, value = keys[at], values[at]
        if plain and _BATCH + _MOST + len(key or b"") + len(value or b"") <= smallest:
            continue
        size = batch_size(Message(value, key, found.headers[at] if found.headers else ()))
        if size > limit:
            reason = f"{size} bytes are too large for topic {topic!r}, which takes {limit}"
            bad.append(Rejection(int(found.record[at]), "write", reason))
    return bad


def batch_size(message: Message) -> int:
    """Bytes of a batch that holds nothing but this message, uncompressed."""
    body = _FIXED + _sized(message.key) + _sized(message.value) + _varint(len(message.headers))
    for name, value in message.headers:
        body += _sized(name.encode()) + _sized(value)
    return _BATCH + _varint(body) + body


def _sized(data: bytes | None) -> int:
    """Bytes of a length and what it counts; null has the length -1."""
    return 1 if data is None else _varint(len(data)) + len(data)


def _varint(number: int) -> int:
    """Bytes of a number that is not negative as a zigzag varint."""
    return max(1, -(-(2 * number).bit_length() // 7))


def _merged(
    rows: pa.LargeBinaryArray, deletes: pa.LargeBinaryArray, order: IntArray
) -> pa.LargeBinaryArray:
    return pa.concat_arrays([rows, deletes]).take(pa.array(order))


def _ordered(items: list[T], order: IntArray) -> list[T]:
    return [items[at] for at in order.tolist()]
