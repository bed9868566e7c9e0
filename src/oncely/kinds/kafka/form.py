"""A chunk as Kafka records: encoded once, split by topic-partition; what the broker would not
accept is rejected.

The broker compares ``max.message.bytes`` with a whole batch, and the smallest possible batch
contains a single record. So a record's size is that of its batch (KIP-98, message format 2) before
compression: it fits with any codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from time import time

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import (
    Batch,
    Chunk,
    Formed,
    IntArray,
    Packet,
    Rejection,
    Staged,
    isolated,
    unexpected,
)
from oncely.core.digest import Recipe, digest_sum
from oncely.core.ranges import TopicPartition
from oncely.kafka.sender import BATCH_HEAD, MessageColumns, Sender, batch_size
from oncely.kafka.topics import TopicLimits
from oncely.kafka.transaction import Message
from oncely.kinds.kafka.format import CONTENT, SOURCE_HEADER, RecordFormat, encoded, header_lists
from oncely.kinds.rows import NO_SINGLE_RECORD, Form, digests_of, row_digests, row_refused
from oncely.kinds.tables import keys_like_rows, rejections_of
from oncely.kinds.topic_publishing import InTime, Load

_NONE = pa.nulls(0, pa.large_binary())
_MOST = 64  # upper bound of all varints of a record without headers
# A timestamp so close to its bound may be beyond it by the broker's clock, or on arrival.
_ROOM_MS = 10_000
Limits = Callable[[Sequence[str]], Mapping[str, TopicLimits]]
"""Names of topics to their limits; missing topics are left out."""


@dataclass(frozen=True)
class Messages:
    """Encoded messages, as columns.

    Attributes:
        topic, key, value, headers: per message; ``headers`` None when no message has any. A
            message without a topic is never written.
        only: the topic of all messages, if there is only one.
        timestamps: per message, in ms since 1970; None where it is now. None: all are.
    """

    topic: Sequence[str | None]
    key: pa.LargeBinaryArray
    value: pa.LargeBinaryArray
    headers: Sequence[Sequence[tuple[str, bytes | None]]] | None
    only: str | None = None
    timestamps: Sequence[int | None] | None = None

    def filter(self, mask: pa.BooleanArray) -> Messages:
        """The messages for which the mask is true."""
        kept = np.flatnonzero(mask).tolist()
        return Messages(
            [self.topic[at] for at in kept],
            self.key.filter(mask),
            self.value.filter(mask),
            self.headers and [self.headers[at] for at in kept],
            self.only,
            self.timestamps and [self.timestamps[at] for at in kept],
        )

    def contents(self, recipe: Recipe) -> pa.Table:
        """The columns of the recipe."""
        columns = {"key": self.key, "value": self.value}
        if "topic" in dict(recipe.columns):
            columns["topic"] = pa.array(self.topic, pa.string())
        return pa.table(columns)

    def by_topic(self, wanted: IntArray) -> dict[str, IntArray]:
        """The messages at these indices, in order, by their topic."""
        if self.only is not None:
            return {self.only: wanted} if len(wanted) else {}
        by_topic: dict[str, list[int]] = {}
        for at in wanted.tolist():
            if (topic := self.topic[at]) is not None:
                by_topic.setdefault(topic, []).append(at)
        return {topic: np.array(own, dtype=np.int64) for topic, own in by_topic.items()}

    @property
    def all(self) -> dict[str, list[Message]]:
        """All messages, in order, by their topic."""
        wanted = self.by_topic(np.arange(len(self.topic)))
        return {topic: self.messages(at) for topic, at in wanted.items()}

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

    def columns(self, at: IntArray) -> MessageColumns:
        """The messages at these indices, without headers."""
        if len(at) == len(self.value):  # all messages, unchanged
            return MessageColumns(self.key, self.value)
        return MessageColumns(self.key.take(pa.array(at)), self.value.take(pa.array(at)))


def digested(formed: Formed[Messages], chunk: Chunk, recipe: Recipe) -> Formed[Messages]:
    """With the digests of the messages."""
    contents = formed.rows.contents(recipe)
    return replace(formed, digests=digests_of(chunk, contents, formed.row_record, recipe))


def of_partition(formed: Formed[Messages], chunk: Chunk, tp: TopicPartition) -> dict[str, IntArray]:
    """The indices of the messages of one topic-partition of a chunk, in order, by their topic."""
    if not len(formed.row_record):
        return {}
    mine = chunk.partition[formed.row_record] == chunk.partitions.index(tp)
    return formed.rows.by_topic(np.flatnonzero(mine))


def encode(chunk: Chunk, form: RecordFormat, limits: Limits) -> Formed[Messages]:
    """Encode a chunk's rows, and its deletes as tombstones, in the order of their records."""
    if not chunk.rows.num_rows and not len(chunk.delete_record):
        none = np.array([], dtype=np.int64)
        return Formed(Messages((), _NONE, _NONE, None), none, chunk.rejections)
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
    found = Formed(Messages(topics, keys, rows, headers, form.topic, times), record)
    unwritable = _unwritable(found, form, known)
    refused = {one.record: one for one in (*unwritable, *bad, *chunk.rejections)}
    return found.without([refused[at] for at in sorted(refused)])


def form_of(form: RecordFormat, limits: Limits) -> Form:
    """What records become in topics: the keys and values of messages."""
    # What a timestamp's distance from the clock was at the time of the write is not known.
    timeless = replace(form, source_timestamp=False)

    def of(chunk: Chunk) -> Formed[pa.Table]:
        found = encode(chunk, timeless, limits)
        return Formed(found.rows.contents(CONTENT), found.row_record, found.rejections)

    return Form(of=of, recipe=form.recipe, lacks_are_null=False)


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
        _, bad = isolated(lambda *_: encoded(rows.select([name])), 1)  # noqa: B023
        if bad:
            return f"column {name!r}: {bad[0]}"
    return unexpected(error)


def _unwritable(
    found: Formed[Messages], form: RecordFormat, known: Mapping[str, TopicLimits]
) -> list[Rejection]:
    """Records whose topic is missing, or does not accept them."""
    now, rows = int(time() * 1000), found.rows
    sole = known.get(rows.only or "")
    if sole is not None and _all_accepted(rows, sole, now):
        return []
    bad = []
    for at, message in enumerate(rows.messages(np.arange(len(rows.topic)))):
        topic = rows.topic[at]
        limits = known.get(topic or "")
        reason = (rows.only is None and form.refused_topic(topic)) or ""
        if not reason and limits is None:
            reason = f"no such topic: {topic!r}"
        elif not reason and limits is not None:
            reason = _refusal(message, topic, limits, now)
        if reason:
            bad.append(Rejection(int(found.row_record[at]), "write", reason))
    return bad


def _all_accepted(found: Messages, limits: TopicLimits, now: int) -> bool:
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
class PackedMessages(Load):
    """Messages that tasks have encoded, and that are read while they are sent."""

    def topics(self, batch: Batch) -> list[str]:
        """The topics of the packets."""
        return sorted({one.name for one in batch.staged if one.name})

    def send(self, writer: Sender, batch: Batch, in_time: InTime) -> None:
        """Send packet by packet."""
        for packet in batch.packets():
            for part in packet.content.combine_chunks().to_batches():
                columns = MessageColumns(part.column("key"), part.column("value"))
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
    messages = found.rows
    topics = messages.topic if messages.only is None else [None] * len(messages.topic)
    of_each = pa.array(topics, SCHEMA.field("topic").type)
    return pa.table([of_each, messages.key, messages.value], schema=SCHEMA)


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
