"""A sample of the records of topics, read without a consumer group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from oncely.clients.kafka.range_reader import RangeReader
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.sources.kafka import KafkaSource, Watermarks

Sample = Mapping[TopicPartition, list[Any]]
"""Messages of confluent-kafka by partition, ascending."""


def sample(source: KafkaSource, count: int) -> Sample:
    """Committed records, half of them the oldest and half the newest of each partition.

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
    with closing(RangeReader(source.brokers, source.kafka)) as reader:
        return {
            tp: list(_read(reader, tp, marks[tp], share))
            for tp, share in sorted(shares(marks, count).items())
        }


def shares(marks: Mapping[TopicPartition, Watermarks], count: int) -> dict[TopicPartition, int]:
    """The number of offsets of each partition, as even as their sizes allow."""
    sizes = {tp: one.stable - one.low for tp, one in marks.items() if one.stable > one.low}
    found, left = {}, count
    for at, tp in enumerate(sorted(sizes, key=lambda tp: (sizes[tp], tp))):
        found[tp] = min(sizes[tp], -(-left // (len(sizes) - at)))
        left -= found[tp]
    return {tp: share for tp, share in found.items() if share}


def _read(reader: RangeReader, tp: TopicPartition, marks: Watermarks, share: int) -> Iterator[Any]:
    newest = marks.stable - share // 2
    yield from _oldest(reader, tp, OffsetRange(marks.low, newest), share - share // 2)
    for messages in reader.read(tp, OffsetRange(newest, marks.stable)):
        yield from messages


def _oldest(reader: RangeReader, tp: TopicPartition, range_: OffsetRange, most: int) -> list[Any]:
    """The first records of a range: offsets without one, such as aborted records, don't count."""
    found: list[Any] = []
    with closing(reader.read(tp, range_)) as batches:
        for messages in batches:
            found += messages[: most - len(found)]
            if len(found) >= most:
                break
    return found
