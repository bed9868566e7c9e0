"""The lag of a pipeline, in offsets and in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from oncely.core.ranges import Position, TopicPartition
from oncely.sources.kafka import KafkaSource


class PartitionLag(NamedTuple):
    """One line of ``oncely status``.

    Attributes:
        topic: the topic.
        partition: its partition.
        position: the next offset to read; None if the ledger has none yet.
        end: the last stable offset.
        lag: offsets between the two; holes are included, so it is no record count.
        lag_seconds: age of the next record to read; 0 if all records are read, None if it is
            unknown: no timestamp, or only transaction markers are left.
    """

    topic: str
    partition: int
    position: Position | None
    end: Position
    lag: int
    lag_seconds: float | None


def measure_lag(
    source: KafkaSource, positions: Mapping[TopicPartition, Position], now_ms: int
) -> list[PartitionLag]:
    """Compare the present positions and ends of every partition.

    A partition without a position is counted from its first offset, at which reading will begin.

    Args:
        source: the topics.
        positions: the ledger's positions.
        now_ms: the present, in ms since 1970.

    Raises:
        ConfigError: a topic is missing, or the broker refuses the client.
        Unavailable: no answer.
    """
    marks = source.watermarks()
    reading = {tp: max(positions.get(tp, mark.low), mark.low) for tp, mark in marks.items()}
    behind = {tp: at for tp, at in reading.items() if at < marks[tp].stable}
    ages = source.timestamps_at(behind) if behind else {}
    lines = []
    for tp, mark in sorted(marks.items()):
        position = positions.get(tp)
        lag = max(0, mark.stable - (mark.low if position is None else position))
        lag_seconds = _seconds(ages, behind, tp, now_ms)
        lines.append(PartitionLag(*tp, position, mark.stable, lag, lag_seconds))
    return lines


def open_transactions(
    source: KafkaSource, lines: Iterable[PartitionLag], now_ms: int
) -> dict[TopicPartition, float]:
    """The partitions at whose end a transaction is open: seconds since its first record.

    Its first record is the one at the last stable offset, which has not moved since ``lines``.
    Raises the errors of :func:`measure_lag`.
    """
    ends = {TopicPartition(one.topic, one.partition): one.end for one in lines}
    marks = source.watermarks().items()
    hidden = [(tp, mark.stable) for tp, mark in marks if ends.get(tp) == mark.stable < mark.high]
    firsts = [
        (tp, one.timestamp_ms) for tp, at in hidden for one in source.fetch(tp, [at]).values()
    ]
    return {tp: (now_ms - at) / 1000 for tp, at in firsts if at is not None}


def _seconds(
    ages: Mapping[TopicPartition, int | None],
    behind: Mapping[TopicPartition, Position],
    tp: TopicPartition,
    now_ms: int,
) -> float | None:
    if tp not in behind:
        return 0.0
    timestamp_ms = ages.get(tp)
    return None if timestamp_ms is None else max(0, now_ms - timestamp_ms) / 1000
