"""A sample of the records of topics, read without a consumer group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

import pyarrow as pa

from oncely.clients.kafka.reader import Reader
from oncely.clients.kafka.records import EVERY_COLUMN, table_of
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.sources.kafka import KafkaSource, Watermarks


def sample(source: KafkaSource, count: int) -> pa.Table:
    """Committed records, half of them the oldest and half the newest of each partition, by
    partition and ascending: a table of the form of :data:`oncely.clients.kafka.records.RECORDS`.

    Old records have the old form of what producers have changed since. Nothing is written to the
    cluster, and no group is used.

    Args:
        source: the topics.
        count: the number of records, fewer if there are not as many.

    Raises:
        TopicMissing: a topic is missing.
        ConfigError: the broker refuses the client.
        Unavailable: no answer.
    """
    marks = source.watermarks()
    with closing(Reader(source.brokers, source.kafka)) as reader:
        found = [
            records
            for tp, share in sorted(shares(marks, count).items())
            for records in _read(reader, tp, marks[tp], share)
        ]
    return pa.concat_tables([table_of([], EVERY_COLUMN), *found]).unify_dictionaries()


def shares(marks: Mapping[TopicPartition, Watermarks], count: int) -> dict[TopicPartition, int]:
    """The number of offsets of each partition, as even as their sizes allow."""
    sizes = {tp: one.stable - one.low for tp, one in marks.items() if one.stable > one.low}
    found, left = {}, count
    for at, tp in enumerate(sorted(sizes, key=lambda tp: (sizes[tp], tp))):
        found[tp] = min(sizes[tp], -(-left // (len(sizes) - at)))
        left -= found[tp]
    return {tp: share for tp, share in found.items() if share}


def _read(reader: Reader, tp: TopicPartition, marks: Watermarks, share: int) -> Iterator[pa.Table]:
    newest = marks.stable - share // 2
    yield from _oldest(reader, tp, OffsetRange(marks.low, newest), share - share // 2)
    yield from reader.tables({tp: OffsetRange(newest, marks.stable)}, lost="skip")


def _oldest(
    reader: Reader, tp: TopicPartition, range_: OffsetRange, most: int
) -> Iterator[pa.Table]:
    """The first records of a range: offsets without one, such as aborted records, don't count."""
    with closing(reader.tables({tp: range_}, lost="skip")) as tables:
        for records in tables:
            yield records.slice(0, most)
            most -= records.num_rows
            if most <= 0:
                return
