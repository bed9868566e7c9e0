"""Checks of the positions that a run has taken over, against the logs of its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oncely.core import events
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.errors import DataLost, SourceMismatch
from oncely.sources.kafka import KafkaSource, Watermarks

Positions = Mapping[TopicPartition, Position]
Marks = Mapping[TopicPartition, Watermarks]


def missing_before(
    source: KafkaSource, positions: Positions, marks: Marks
) -> dict[TopicPartition, OffsetRange]:
    """The offsets that were deleted from the topic before they were read.

    Args:
        source: the topics.
        positions: the ledger's.
        marks: bounds of the logs, which may have been read before the positions.

    Raises:
        SourceMismatch: a log ends before its position.
        Unavailable: no answer.
    """
    if any(at > marks[tp].high for tp, at in positions.items()):
        # The previous run has continued while this one waited for its locks.
        marks = source.watermarks()
    for tp, at in sorted(positions.items()):
        if at > marks[tp].high:
            raise SourceMismatch(
                f"{tp} ends at {marks[tp].high}, and the ledger has read up to {at}:"
                " the topic has gone back",
                way_out="restore the topic, or move the position with `oncely offsets reset`",
            )
    return {
        tp: OffsetRange(at, marks[tp].low) for tp, at in positions.items() if at < marks[tp].low
    }


def settle_gaps(
    gaps: Mapping[TopicPartition, OffsetRange],
    on_gap: str,
    listener: events.Listener,
    record: Callable[[Mapping[TopicPartition, OffsetRange]], None],
) -> dict[TopicPartition, Position]:
    """Record lost ranges in the history, or refuse to continue; returns the positions after them.

    Raises:
        DataLost: records are gone and ``on_gap`` is ``fail``.
    """
    for tp, missing in sorted(gaps.items()):
        listener(events.GapFound(tp, missing))
        if on_gap == "fail":
            raise DataLost(
                f"{tp}: offsets {missing} were deleted from the topic before they were read",
                way_out='source.on_gap = "record" continues and keeps the range in the history',
            )
    if gaps:
        record(gaps)
    return {tp: missing.end for tp, missing in gaps.items()}
