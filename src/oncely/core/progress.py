"""For how long records have waited without a commit: the measure of a pipeline that stands still.

The verdict (``status``, ``top``, pages, exit codes), ``/livez`` and the metrics read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from oncely.core.ranges import TopicPartition

WARN_SECONDS, STALL_SECONDS = 60.0, 300.0
"""Seconds for which records may wait without a commit."""


class Waited(NamedTuple):
    """Seconds for which records have waited without a commit.

    Attributes:
        all: without a commit of any partition; 0 if there are no records to read.
        each: without a commit of this partition; only of those that have records to read.
    """

    all: float
    each: Mapping[TopicPartition, float]


def waited(
    ages: Mapping[TopicPartition, float], since: float, moved: Mapping[TopicPartition, float]
) -> Waited:
    """Measure it.

    Args:
        ages: seconds for which each partition has had records to read; absent if it has none.
        since: seconds since the last commit of any partition.
        moved: seconds since the last commit of each partition; absent if it had none.
    """
    each = {tp: min(age, moved.get(tp, age)) for tp, age in ages.items()}
    return Waited(min(since, max(ages.values(), default=0.0)), each)
