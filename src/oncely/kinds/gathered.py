"""Rows of a task that wait to be written, their order in the files, and the ranges and event times
of many files at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from oncely.kinds.conform import conform
from oncely.kinds.data_file import SourceRange
from oncely.kinds.partitions import NO_TIME

Ints: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_RADIX = 1 << 16  # numpy sorts 16 bits by radix, stably, several times faster than 32


@dataclass(frozen=True)
class Origin:
    """The origin of rows.

    Attributes:
        partitions: topic and partition.
        index: of each row, into ``partitions``.
        offset: int64, of each row; rows of one record have the same offset.
    """

    partitions: Sequence[tuple[str, int]]
    index: Ints
    offset: Ints


@dataclass
class Gathered:
    """Rows with their groups, origins and event times. All arrays are as long as the table.

    Attributes:
        rows: the rows; a table without columns loses its length, which is that of ``codes``.
        codes: the group of each row.
        source: the index of each row's topic-partition; None for rows that a transform has mixed.
        offset: the offset of each row's record; None if ``source`` is.
        times: the event time of each row; None if no partition column uses it.
    """

    rows: pa.Table
    codes: Ints
    source: Ints | None
    offset: Ints | None
    times: Ints | None

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.codes)

    def taken(self, chosen: Ints) -> Gathered:
        """Some of the rows, in this order."""
        return Gathered(
            self.rows.take(pa.array(chosen)) if self.rows.num_columns else self.rows,
            self.codes[chosen],
            None if self.source is None else self.source[chosen],
            None if self.offset is None else self.offset[chosen],
            None if self.times is None else self.times[chosen],
        )

    def order(self, groups: int) -> Ints:
        """An order by group in which the rows of a topic-partition stay in order of offset.

        Rows mostly arrive in this order; rows that a shuffle has mixed are sorted.
        """
        narrow = self.codes.astype(np.uint16) if groups <= _RADIX else self.codes
        order: Ints = np.argsort(narrow, kind="stable")
        if self.source is None or self.offset is None or len(order) < 2:
            return order
        codes, source, offset = self.codes[order], self.source[order], self.offset[order]
        alike = codes[1:] == codes[:-1]
        back = (source[1:] < source[:-1]) | (
            (source[1:] == source[:-1]) & (offset[1:] < offset[:-1])
        )
        if not (alike & back).any():
            return order
        # lexsort's last key is the primary key; rows of one record keep their order.
        sorted_anew: Ints = np.lexsort((self.offset, self.source, self.codes))
        return sorted_anew


def joined(parts: Sequence[Gathered], schema: pa.Schema) -> Gathered:
    """All rows concatenated, with the columns of ``schema``, each column in one chunk."""
    rows = [conform(part.rows, schema) for part in parts]
    return Gathered(
        pa.concat_tables(rows).combine_chunks(),
        _concatenated([part.codes for part in parts]),
        _all([part.source for part in parts]),
        _all([part.offset for part in parts]),
        _all([part.times for part in parts]),
    )


def _all(arrays: Sequence[Ints | None]) -> Ints | None:
    known = [array for array in arrays if array is not None]
    return _concatenated(known) if len(known) == len(arrays) else None


def _concatenated(arrays: Sequence[Ints]) -> Ints:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# -- starts of files -----------------------------------------------------------------------


def file_starts(rows: Gathered, order: Ints, target: int) -> Ints:
    """The starts of files among rows in this order.

    Args:
        rows: all rows.
        order: indices of the rows that are written, sorted by group.
        target: approximate number of rows of a file.
    """
    codes = rows.codes[order]
    groups = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
    sizes = np.diff(np.append(groups, len(order)))
    files = np.maximum(1, np.rint(sizes / target).astype(np.int64))
    if not (files > 1).any():
        return groups
    begins = np.zeros(len(order), bool)
    begins[groups] = True
    inside = _same_record(rows, order)
    for which in np.flatnonzero(files > 1).tolist():
        start, size, parts = int(groups[which]), int(sizes[which]), int(files[which])
        for part in range(1, parts):
            cut = start + size * part // parts
            while cut < start + size and inside[cut]:
                cut += 1
            if cut < start + size:
                begins[cut] = True
    starts: Ints = np.flatnonzero(begins)
    return starts


def whole_records(rows: Gathered, gone: Ints) -> Ints:
    """The dropped rows, and all adjacent rows of the same records."""
    inside = _same_record(rows, np.arange(rows.count))
    record = np.cumsum(~inside)
    whole: Ints = np.isin(record, record[gone])
    return whole


def _same_record(rows: Gathered, order: Ints) -> Ints:
    """True for each row that has the same record as the row before it."""
    same = np.zeros(len(order), bool)
    if rows.source is not None and rows.offset is not None:
        source, offset = rows.source[order], rows.offset[order]
        same[1:] = (source[1:] == source[:-1]) & (offset[1:] == offset[:-1])
    return same


# -- descriptions of files -------------------------------------------------------------------


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
