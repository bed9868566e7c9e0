"""Rows of a Spark transform as encoded messages, until the driver sends them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from oncely.core.batch import Chunk, Packet, Staged
from oncely.core.digest import digest_sum
from oncely.sinks.base import NO_SINGLE_RECORD, row_refused
from oncely.sinks.kafka.messages import Encoded, Limits, encode
from oncely.sinks.kafka.record_format import RecordFormat
from oncely.sinks.row_digests import row_digests

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),  # null: the sink's only topic
        ("key", pa.large_binary()),
        ("value", pa.large_binary()),
        ("headers", _HEADERS),  # null: none
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
    headers = pa.array(_headers(found), SCHEMA.field("headers").type)
    return pa.table([topics, found.key, found.value, headers], schema=SCHEMA)


def _topics(found: Encoded) -> Sequence[str | None]:
    return found.topic if found.only is None else [None] * len(found.topic)


def _headers(found: Encoded) -> Sequence[Any]:
    if found.headers is None:
        return [None] * len(found.value)
    return [[{"key": name, "value": value} for name, value in own] for own in found.headers]


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
