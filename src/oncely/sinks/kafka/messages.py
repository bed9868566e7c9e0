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

from oncely.core.offsets import TopicPartition
from oncely.decode.base import Rejection
from oncely.sinks.base import Chunk, IntArray
from oncely.sinks.kafka.form import Form, header_lists
from oncely.sinks.kafka.transaction import Message

T = TypeVar("T")

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
    key: Sequence[bytes | None]
    value: Sequence[bytes | None]
    headers: Sequence[Sequence[tuple[str, bytes | None]]] | None
    rejections: tuple[Rejection, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    only: str | None = None

    def of(self, chunk: Chunk, tp: TopicPartition) -> dict[str, list[int]]:
        """The messages of one topic-partition, in order, by the topic they go to."""
        if not len(self.record):
            return {}
        mine = chunk.partition[self.record] == chunk.partitions.index(tp)
        wanted = np.flatnonzero(mine)
        if self.only is not None and not self.rejections:
            return {self.only: wanted.tolist()} if len(wanted) else {}
        bad = {one.record for one in self.rejections}
        by_topic: dict[str, list[int]] = {}
        for at in wanted.tolist():
            topic = self.topic[at]
            if topic is not None and int(self.record[at]) not in bad:
                by_topic.setdefault(topic, []).append(at)
        return by_topic

    def messages(self, at: Sequence[int]) -> list[Message]:
        """Those messages, with headers."""
        none: tuple[tuple[str, bytes | None], ...] = ()
        return [
            Message(self.value[i], self.key[i], self.headers[i] if self.headers else none)
            for i in at
        ]

    def plain(self, at: Sequence[int]) -> list[dict[str, object]]:
        """Those messages as librdkafka's batches take them, which have no headers."""
        if len(at) == len(self.value):  # all of them, as they stand
            return [
                {"value": value, "key": key}
                for value, key in zip(self.value, self.key, strict=True)
            ]
        return [{"value": self.value[i], "key": self.key[i]} for i in at]


def encode(chunk: Chunk, form: Form, limits: Limits) -> Encoded:
    """Encode a chunk's rows, and its deletes as tombstones, in the order of their records."""
    if not chunk.rows.num_rows and not len(chunk.delete_record):
        return Encoded(np.array([], dtype=np.int64), (), (), (), None, chunk.rejections)
    rows, bad = _values(chunk, form)
    keys = form.keys(chunk.rows) if chunk.rows.num_rows else []
    topics = form.topics(chunk.rows) if chunk.rows.num_rows else []
    headers = form.header_lists(chunk.rows) if chunk.rows.num_rows else None
    record = chunk.row_record
    if chunk.deletes is not None and len(chunk.delete_record):
        gone = len(chunk.delete_record)
        record = np.concatenate([record, chunk.delete_record])
        order = np.argsort(record, kind="stable")
        record = record[order]
        rows = _ordered([*rows, *[None] * gone], order)
        keys = _ordered([*keys, *form.keys(chunk.deletes)], order)
        topics = _ordered([*topics, *[form.topic] * gone], order)
        headers = _ordered([*headers, *[[]] * gone], order) if headers else None
    if headers is None and chunk.headers is not None:
        headers = header_lists(chunk.headers.take(pa.array(record)))
    known = limits(sorted({t for t in topics if t is not None}))
    found = Encoded(record, topics, keys, rows, headers, (), known, form.topic)
    refused = {one.record: one for one in (*chunk.rejections, *bad, *_unwritable(found))}
    return Encoded(
        record, topics, keys, rows, headers,
        tuple(refused[at] for at in sorted(refused)), known, form.topic,
    )  # fmt: skip


def _values(chunk: Chunk, form: Form) -> tuple[list[bytes | None], list[Rejection]]:
    """The rows' values; those of rows that can't be encoded are None, and rejected."""
    if not chunk.rows.num_rows:
        return [], []
    try:
        return form.values(chunk.rows), []
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        pass
    done: list[bytes | None] = []
    bad: list[Rejection] = []
    for at in range(chunk.rows.num_rows):
        try:
            done += form.values(chunk.rows.slice(at, 1))
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            done.append(None)
            reason = f"can't be encoded: {type(error).__name__}: {error}"
            bad.append(Rejection(int(chunk.row_record[at]), "write", reason))
    return done, bad


def _unwritable(found: Encoded) -> list[Rejection]:
    """Records whose topic is not there, or does not take their size."""
    if found.only is not None and found.only in found.limits and found.headers is None:
        largest = _longest(found.key) + _longest(found.value)
        if _BATCH + _MOST + largest <= found.limits[found.only]:
            return []
    bad = []
    smallest = min(found.limits.values(), default=0)
    plain = found.headers is None
    for at, topic in enumerate(found.topic):
        limit = found.limits.get(topic or "")
        if limit is None:
            reason = "sink.topic_column is null" if topic is None else f"no such topic: {topic!r}"
            bad.append(Rejection(int(found.record[at]), "write", reason))
            continue
        key, value = found.key[at], found.value[at]
        if plain and _BATCH + _MOST + len(key or b"") + len(value or b"") <= smallest:
            continue
        size = batch_size(Message(value, key, found.headers[at] if found.headers else ()))
        if size > limit:
            reason = f"{size} bytes are too large for topic {topic!r}, which takes {limit}"
            bad.append(Rejection(int(found.record[at]), "write", reason))
    return bad


def _longest(parts: Sequence[bytes | None]) -> int:
    return max(map(len, filter(None, parts)), default=0)


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


def _ordered(items: list[T], order: IntArray) -> list[T]:
    return [items[at] for at in order.tolist()]
