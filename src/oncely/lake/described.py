"""Ranges and event times of files for the manifest, computed for many files at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oncely.lake.gathered import Gathered, Ints
from oncely.lake.partitions import NO_TIME
from oncely.lake.records import SourceRange

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Description:
    """The description of a file.

    Attributes:
        ranges: by topic-partition, in the order of the rows.
        event_time: first and last, microseconds since 1970 UTC.
    """

    ranges: list[SourceRange]
    event_time: tuple[int, int] | None

    @property
    def first(self) -> tuple[str, int, int] | None:
        """Topic, partition and offset of the first record."""
        if not self.ranges:
            return None
        return self.ranges[0].topic, self.ranges[0].partition, self.ranges[0].start


def describe(rows: Gathered, starts: Ints, sources: Sequence[tuple[str, int]]) -> list[Description]:
    """Describe files.

    Args:
        rows: the rows of all files, in the order of the files.
        starts: the first row of each file, ascending, beginning with 0.
        sources: topic-partitions.
    """
    ranges = _ranges(rows, starts, sources)
    times = _times(rows, starts)
    return [Description(r, t) for r, t in zip(ranges, times, strict=True)]


def _times(rows: Gathered, starts: Ints) -> Sequence[tuple[int, int] | None]:
    if rows.times is None:
        return [None] * len(starts)
    last = np.maximum.reduceat(rows.times, starts).tolist()  # NO_TIME is the smallest number
    first = np.minimum.reduceat(np.where(rows.times == NO_TIME, _NEVER, rows.times), starts)
    return [
        None if end == NO_TIME else (begin, end)
        for begin, end in zip(first.tolist(), last, strict=True)
    ]


def _ranges(
    rows: Gathered, starts: Ints, sources: Sequence[tuple[str, int]]
) -> list[list[SourceRange]]:
    if rows.source is None or rows.offset is None:
        return [[] for _ in starts]
    # A run is the part of a file from one topic-partition, ascending: its ends are the range.
    begins = np.zeros(rows.count, bool)
    begins[starts] = True
    begins[1:] |= rows.source[1:] != rows.source[:-1]
    runs = np.flatnonzero(begins)
    ends = np.append(runs[1:], rows.count) - 1
    file_of = np.searchsorted(starts, runs, side="right") - 1
    found: list[list[SourceRange]] = [[] for _ in starts]
    for file, source, start, last in zip(
        file_of.tolist(),
        rows.source[runs].tolist(),
        rows.offset[runs].tolist(),
        rows.offset[ends].tolist(),
        strict=True,
    ):
        topic, partition = sources[source]
        found[file].append(SourceRange(topic, partition, start, last + 1))
    return found
