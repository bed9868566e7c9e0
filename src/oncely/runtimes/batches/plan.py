"""The ranges of a batch, and their division into tasks. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from oncely.core.ranges import OffsetRange, Position, TopicPartition

OFFSETS_A_TASK = 50_000
"""A task costs about as much as writing this many rows: smaller batches share one."""

Ranges = Mapping[TopicPartition, OffsetRange]


def plan_ranges(
    positions: Mapping[TopicPartition, Position],
    ends: Mapping[TopicPartition, Position],
    limit: int,
) -> dict[TopicPartition, OffsetRange]:
    """The ranges of the next batch, as Spark's Kafka source plans them with
    ``maxOffsetsPerTrigger``.

    If there is more than the limit, each partition has a share in proportion to what is there. A
    partition with a share below one offset has one, so a batch can have more offsets than the limit
    if more partitions than that are busy.

    Args:
        positions: the next offset of each partition.
        ends: the offsets at which readers of committed records end.
        limit: the greatest number of offsets.
    """
    sizes = {tp: ends[tp] - at for tp, at in positions.items() if ends.get(tp, at) > at}
    total = sum(sizes.values())
    planned = {}
    for tp, size in sorted(sizes.items()):
        offsets = size if total <= limit else min(size, max(1, limit * size // total))
        planned[tp] = OffsetRange(positions[tp], positions[tp] + offsets)
    return planned


def shares_of(ranges: Ranges, most: int | None = None) -> list[dict[TopicPartition, OffsetRange]]:
    """Divide ranges among tasks, with about the same number of offsets each; none is cut.

    Args:
        ranges: those of a batch.
        most: the number of tasks; by default as many as their offsets are worth.
    """
    tasks = most or -(-offsets_of(ranges) // OFFSETS_A_TASK)
    tasks = max(1, min(tasks, len(ranges)))
    shares: list[dict[TopicPartition, OffsetRange]] = [{} for _ in range(tasks)]
    loads = [(0, number) for number in range(tasks)]
    for tp, range_ in sorted(ranges.items(), key=lambda one: (one[1].start - one[1].end, one[0])):
        load, number = heapq.heappop(loads)
        shares[number][tp] = range_
        heapq.heappush(loads, (load + range_.end - range_.start, number))
    return shares


def offsets_of(ranges: Ranges) -> int:
    """The number of offsets."""
    return sum(range_.end - range_.start for range_ in ranges.values())
