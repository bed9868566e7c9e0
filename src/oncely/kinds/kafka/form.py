"""A chunk as Kafka records: encoded once, split by topic-partition; what the broker would not
accept is rejected.

The broker compares ``max.message.bytes`` with a whole batch, and the smallest possible batch
contains a single record. So a record's size is that of its batch (KIP-98, message format 2) before
compression: it fits with any codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from time import time

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Batch, Chunk, IntArray, Packet, Rejection, Staged
from oncely.core.digest import Digests, Recipe, digest_sum
from oncely.core.isolate import isolated, unexpected
from oncely.core.ranges import TopicPartition
from oncely.kafka.sender import BATCH_HEAD, Columns, Sender, batch_size
from oncely.kafka.topics import TopicLimits
from oncely.kafka.transaction import Message
from oncely.kinds.base import NO_SINGLE_RECORD, row_digests, row_refused
from oncely.kinds.kafka import arrow_json
from oncely.kinds.kafka.format import SOURCE_HEADER, RecordFormat, header_lists
from oncely.kinds.rows import keys_like_rows, rejections_of
from oncely.kinds.topic_publishing import InTime

_NONE = pa.nulls(0, pa.large_binary())
_MOST = 64  # upper bound of all varints of a record without headers
# A timestamp so close to its bound may be beyond it by the broker's clock, or on arrival.
_ROOM_MS = 10_000
Limits = Callable[[Sequence[str]], Mapping[str, TopicLimits]]
"""Names of topics to their limits; missing topics are left out."""


@dataclass(frozen=True)
class Encoded:
    """The messages of a chunk, encoded.

    Attributes:
        record: per message, the record it came from (int64), ascending.
        topic, key, value, headers: per message; ``headers`` None when no message has any.
        rejections: the chunk's rejections, and those of records that cannot be written.
        limits: the limits of the sink's topics.
        only: the topic of all messages, if there is only one.
        timestamps: per message, in ms since 1970; None where it is now. None: all are.
    """

    record: IntArray
    topic: Sequence[str | None]
    key: pa.LargeBinaryArray
    value: pa.LargeBinaryArray
    headers: Sequence[Sequence[tuple[str, bytes | None]]] | None
    rejections: tuple[Rejection, ...] = ()
    limits: Mapping[str, TopicLimits] = field(default_factory=dict)
    only: str | None = None
    timestamps: Sequence[int | None] | None = None

    @classmethod
    def nothing(cls, rejections: tuple[Rejection, ...] = ()) -> Encoded:
        """A result without messages."""
        return cls(np.array([], dtype=np.int64), (), _NONE, _NONE, None, rejections)

    def of(self, chunk: Chunk, tp: TopicPartition) -> dict[str, IntArray]:
        """The messages of one topic-partition, in order, by their output topic."""
        if not len(self.record):
            return {}
        mine = chunk.partition[self.record] == chunk.partitions.index(tp)
        return self._by_topic(np.flatnonzero(mine))

    @property
    def written(self) -> IntArray:
        """Per message that is written, its record."""
        bad = [one.record for one in self.rejections]
        return self.record[~np.isin(self.record, bad)] if bad else self.record

    def digests(self, chunk: Chunk, recipe: Recipe) -> Digests:
        """The digests of the messages that are written."""
        table = self.contents(recipe)
        if self.rejections:
            bad = [one.record for one in self.rejections]
            table = table.filter(pa.array(~np.isin(self.record, bad)))
        offsets = chunk.offset[self.written] if recipe.offset else None
        return Digests(row_digests(table, offsets, recipe), str(recipe))

    def contents(self, recipe: Recipe) -> pa.Table:
        """The columns of the recipe."""
        columns = {"key": self.key, "value": self.value}
        if "topic" in dict(recipe.columns):
            columns["topic"] = pa.array(self.topic, pa.string())
        return pa.table(columns)

    @property
    def all(self) -> dict[str, IntArray]:
        """All messages, in order, by their output topic."""
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
        """The messages at these indices, with headers."""
        plain = self.columns(at)
        headers = [self.headers[i] for i in at.tolist()] if self.headers else [()] * len(at)
        times = [self.timestamps[i] for i in at.tolist()] if self.timestamps else [None] * len(at)
        return list(map(Message, plain.value.to_pylist(), plain.key.to_pylist(), headers, times))

    @property
    def plain(self) -> bool:
        """True if the messages have neither headers nor timestamps of their own."""
        return self.headers is None and self.timestamps is None

    def columns(self, at: IntArray) -> Columns:
        """The messages at these indices, without headers."""
        if len(at) == len(self.value):  # all messages, unchanged
            return Columns(self.key, self.value)
        return Columns(self.key.take(pa.array(at)), self.value.take(pa.array(at)))


def encode(chunk: Chunk, form: RecordFormat, limits: Limits) -> Encoded:
    """Encode a chunk's rows, and its deletes as tombstones, in the order of their records."""
    if not chunk.rows.num_rows and not len(chunk.delete_record):
        return Encoded.nothing(chunk.rejections)
    rows, bad = _values(chunk, form)
    keys = form.keys(chunk.rows) if chunk.rows.num_rows else _NONE
    topics = form.topics(chunk.rows) if chunk.rows.num_rows else []
    record = chunk.row_record
    if chunk.deletes is not None and len(chunk.delete_record):
        gone = len(chunk.delete_record)
        record = np.concatenate([record, chunk.delete_record])
        order = np.argsort(record, kind="stable")
        record = record[order]
        rows = _merged(rows, pa.nulls(gone, pa.large_binary()), order)
        deleted, lost = _deleted(chunk.deletes, form)
        bad += rejections_of(chunk.delete_record, lost)
        keys = _merged(keys, deleted, order)
        named = [*topics, *[form.topic] * gone]
        topics = [named[at] for at in order.tolist()]
    headers = None if chunk.headers is None else header_lists(chunk.headers.take(pa.array(record)))
    if form.keep_source:
        headers = _with_origin(headers, chunk, record)
    distinct = {form.topic} if form.topic is not None else set(topics)
    known = limits(sorted(one for one in distinct if one and not form.refused_topic(one)))
    times = _times(chunk, form, record)
    found = Encoded(record, topics, keys, rows, headers, (), known, form.topic, times)
    refused = {one.record: one for one in (*_unwritable(found, form), *bad, *chunk.rejections)}
    return replace(found, rejections=tuple(refused[at] for at in sorted(refused)))


def _deleted(deletes: pa.Table, form: RecordFormat) -> tuple[pa.LargeBinaryArray, dict[int, str]]:
    """The keys of tombstones in the form of those of rows, and the reason for each without one."""
    if form.key is None:
        return form.keys(deletes), {}
    if form.key in deletes.column_names:
        like, bad = keys_like_rows(deletes, form.schema, [form.key])
        return form.keys(like), bad
    reason = f"a tombstone has no column {form.key!r}, the key of messages (sink.key)"
    count = deletes.num_rows
    return pa.nulls(count, pa.large_binary()), dict.fromkeys(range(count), reason)


def _times(chunk: Chunk, form: RecordFormat, record: IntArray) -> list[int | None] | None:
    """The timestamps of the messages' records, if they are kept."""
    if not form.source_timestamp or chunk.timestamps is None:
        return None
    times = chunk.timestamps.take(pa.array(record)).cast(pa.timestamp("us", "UTC"))
    micros = times.cast(pa.int64()).to_pylist()
    return [None if one is None else one // 1000 for one in micros]


def _with_origin(
    headers: Sequence[Sequence[tuple[str, bytes | None]]] | None, chunk: Chunk, record: IntArray
) -> list[list[tuple[str, bytes | None]]]:
    """The headers, with the origin of each message in place of that of an earlier pipeline."""
    before: Sequence[Sequence[tuple[str, bytes | None]]] = headers or [()] * len(record)
    names = [(tp.topic, tp.partition) for tp in chunk.partitions]
    places = zip(chunk.partition[record].tolist(), chunk.offset[record].tolist(), strict=True)
    origins = [msgspec.json.encode([*names[at], offset]) for at, offset in places]
    return [
        [*(one for one in own if one[0] != SOURCE_HEADER), (SOURCE_HEADER, origin)]
        for own, origin in zip(before, origins, strict=True)
    ]


def _values(chunk: Chunk, form: RecordFormat) -> tuple[pa.LargeBinaryArray, list[Rejection]]:
    """The rows' values; those of rows that cannot be encoded are None, and rejected."""
    if not chunk.rows.num_rows:
        return _NONE, []
    parts, bad = isolated(
        lambda start, stop: form.values(chunk.rows.slice(start, stop - start)), chunk.rows.num_rows
    )
    if not bad:
        return parts[0][1], []
    none = pa.nulls(1, pa.large_binary())
    done = [one for _, one in sorted([*parts, *((row, none) for row in bad)], key=itemgetter(0))]
    rejections = [
        Rejection(
            int(chunk.row_record[row]),
            "write",
            f"can't be encoded: {_why(chunk.rows.slice(row, 1), form, bad[row])}",
        )
        for row in sorted(bad)
    ]
    return pa.concat_arrays(done), rejections


def _why(rows: pa.Table, form: RecordFormat, error: Exception) -> str:
    """The reason for which a row can't be encoded, with its column if that alone can't, either."""
    for name in form.value_columns if form.value == "json" else ():
        _, bad = isolated(lambda *_: arrow_json.encoded(rows.select([name])), 1)  # noqa: B023
        if bad:
            return f"column {name!r}: {bad[0]}"
    return unexpected(error)


def _unwritable(found: Encoded, form: RecordFormat) -> list[Rejection]:
    """Records whose topic is missing, or does not accept them."""
    now = int(time() * 1000)
    sole = found.limits.get(found.only or "")
    if sole is not None and _all_accepted(found, sole, now):
        return []
    bad = []
    for at, message in enumerate(found.messages(np.arange(len(found.record)))):
        topic = found.topic[at]
        limits = found.limits.get(topic or "")
        reason = (found.only is None and form.refused_topic(topic)) or ""
        if not reason and limits is None:
            reason = f"no such topic: {topic!r}"
        elif not reason and limits is not None:
            reason = _refusal(message, topic, limits, now)
        if reason:
            bad.append(Rejection(int(found.record[at]), "write", reason))
    return bad


def _all_accepted(found: Encoded, limits: TopicLimits, now: int) -> bool:
    """True if the only topic surely accepts all messages: none of them need be looked at."""
    if found.headers is not None or (limits.keyed and found.key.null_count):
        return False
    times = [one for one in found.timestamps or () if one is not None]
    if times and (_untimely(min(times), limits, now) or _untimely(max(times), limits, now)):
        return False
    sizes = map(pc.binary_length, (found.key, found.value))
    largest = sum(pc.max(one).as_py() or 0 for one in sizes)
    return BATCH_HEAD + _MOST + largest <= limits.size


def _refusal(message: Message, topic: str | None, limits: TopicLimits, now: int) -> str:
    """The reason for which the broker would not accept a message; empty if it would."""
    if any(not isinstance(name, str) or "\0" in name for name, _ in message.headers):
        return "the name of a header is null or contains a NUL (0x00)"
    if limits.keyed and message.key is None:
        return f"no key, and topic {topic!r} is compacted (cleanup.policy)"
    if message.timestamp is not None and (bound := _untimely(message.timestamp, limits, now)):
        return f"timestamp {message.timestamp} is out of the bounds of topic {topic!r}: {bound}"
    if not message.headers:
        plain = len(message.key or b"") + len(message.value or b"")
        if BATCH_HEAD + _MOST + plain <= limits.size:
            return ""
    size = batch_size(message)
    if size <= limits.size:
        return ""
    return f"{size} bytes are too large for topic {topic!r}, which takes {limits.size}"


def _untimely(timestamp: int, limits: TopicLimits, now: int) -> str:
    """The setting that excludes a timestamp at this time, in ms; empty if none does."""
    if timestamp <= 0:  # librdkafka writes the present for 0
        return "it is not after 1970-01-01T00:00:00Z"
    distances = ("before", now - timestamp, limits.past), ("after", timestamp - now, limits.future)
    for side, distance, bound in distances:
        if distance > bound - min(_ROOM_MS, bound // 10):
            return f"message.timestamp.{side}.max.ms is {bound}"
    return ""


def _merged(
    rows: pa.LargeBinaryArray, deletes: pa.LargeBinaryArray, order: IntArray
) -> pa.LargeBinaryArray:
    return pa.concat_arrays([rows, deletes]).take(pa.array(order))


# -- rows of a Spark transform as packets --------------------------------------------------


@dataclass(frozen=True)
class PackedMessages:
    """Messages that tasks have encoded, and that are read while they are sent."""

    def topics(self, batch: Batch) -> list[str]:
        """The topics of the packets."""
        return sorted({one.name for one in batch.staged if one.name})

    def ready(self) -> None:
        """Nothing to check: the messages do not depend on other state."""

    def fresh(self) -> None:
        """Nothing to check: messages do not expire."""

    def send(self, writer: Sender, batch: Batch, in_time: InTime) -> None:
        """Send packet by packet."""
        for packet in batch.packets():
            for part in packet.content.combine_chunks().to_batches():
                columns = Columns(part.column("key"), part.column("value"))
                writer.send_columns(packet.staged.name or "", columns)
            in_time()


SCHEMA = pa.schema(
    [
        ("topic", pa.string()),  # null: the sink's only topic
        ("key", pa.large_binary()),
        ("value", pa.large_binary()),
    ]
)


def packets(rows: pa.Table, form: RecordFormat, limits: Limits) -> list[Packet]:
    """Encode rows, in a packet for each topic.

    Raises:
        Stopped: a row cannot be encoded. After a transform a row belongs to no single record, so it
            cannot become a reject.
    """
    return [_packet(topic, part, form) for topic, part in _by_topic(_encoded(rows, form, limits))]


def _packet(topic: str | None, part: pa.Table, form: RecordFormat) -> Packet:
    digest = digest_sum(row_digests(part, None, form.recipe))
    name = form.topic if topic is None else topic
    return Packet(Staged(name, part.num_rows, digest, str(form.recipe)), part)


def _encoded(rows: pa.Table, form: RecordFormat, limits: Limits) -> pa.Table:
    none, each = np.array([], dtype=np.int64), np.arange(rows.num_rows)
    chunk = Chunk({}, (), each, each, rows, each, None, none, (), lambda _: [])
    found = encode(chunk, form, limits)
    if found.rejections:
        raise row_refused(found.rejections[0].reason, NO_SINGLE_RECORD)
    topics = pa.array(_topics(found), SCHEMA.field("topic").type)
    return pa.table([topics, found.key, found.value], schema=SCHEMA)


def _topics(found: Encoded) -> Sequence[str | None]:
    return found.topic if found.only is None else [None] * len(found.topic)


def _by_topic(messages: pa.Table) -> Iterator[tuple[str | None, pa.Table]]:
    """The messages of each topic, in order."""
    column = messages.column("topic").combine_chunks()
    if column.null_count == len(column):
        yield None, messages
        return
    topics = column.dictionary_encode()
    index = topics.indices.to_numpy()
    for at, topic in enumerate(topics.dictionary.to_pylist()):
        yield topic, messages.take(pa.array(np.flatnonzero(index == at)))
