"""What the check compares: the ledger of one pipeline, and its files, as values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from oncely.core.claim import NO_RECORDS, SKIPPED, Counts
from oncely.core.ranges import OffsetRange, Position, TopicPartition, grouped, normalize

DATA = "data"
HOLE = "hole"
GAP = "gap"
JOINED = "joined"
AHEAD = "ahead"
"""Committed while the position was before it: its epoch may be older than those before it."""
TAKEN = "taken"
"""The position got another epoch and was not moved."""
RESET = "reset"
COMMITS = frozenset({DATA, HOLE, GAP, JOINED, AHEAD})
MOVES = frozenset({*COMMITS, SKIPPED, TAKEN, RESET})
AMENDMENTS = frozenset({"replay", "repair", "backfill"})
"""Later changes within ranges that were committed before; no position depends on them."""


AROUND = 3
"""Entries that are shown before and after a broken one."""


@dataclass(frozen=True)
class Entry:
    """An entry of the history: a committed range, or a change of a position without one.

    Attributes:
        partition: the topic-partition.
        start, end: its offsets; they may be invalid.
        epoch: the run that wrote it.
        kind: as stored.
        counts: None if they are not stored.
        superseded: the epoch of the reset that has undone it; 0 if it counts.
        at: when it was written, by the clock of the store.
        letters: the dead letters within it; None if they are not counted.
        place: where it is stored.
    """

    partition: TopicPartition
    start: int
    end: int
    epoch: int
    kind: str = DATA
    counts: Counts | None = NO_RECORDS
    superseded: int = 0
    at: datetime | None = None
    letters: int | None = None
    place: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Epoch and offset."""
        return self.epoch, self.start

    def covers(self, start: int, end: int) -> bool:
        """True if the offsets are within the entry."""
        return self.start <= start and end <= self.end

    def __str__(self) -> str:
        said = [f"{self.partition} [{self.start}, {self.end}) {self.kind} by epoch {self.epoch}"]
        if self.counts is not None and self.kind in COMMITS:
            c = self.counts
            said.append(
                f"{c.records} records, {c.rows} rows, {c.rejects} rejects, {c.filtered} filtered"
            )
        if self.superseded:
            said.append(f"superseded by the reset of epoch {self.superseded}")
        if self.at is not None:
            said.append(f"at {self.at.isoformat()}")
        if self.place:
            said.append(self.place)
        return ", ".join(said)


def shown(entries: Sequence[Entry], at: int) -> tuple[str, ...]:
    """The entries around an index."""
    return tuple(str(one) for one in entries[max(0, at - AROUND) : at + AROUND])


class Covered:
    """The offsets that ranges cover, in an order in which they are found by bisection."""

    def __init__(self, ranges: Iterable[OffsetRange]) -> None:
        self._ranges = normalize(ranges)

    def lacks(self, one: OffsetRange) -> tuple[OffsetRange, ...]:
        """The offsets of a range that none of them covers: disjoint, ascending, never empty."""
        first = bisect_right(self._ranges, one.start, key=lambda it: it.end)
        end = bisect_left(self._ranges, one.end, first, key=lambda it: it.start)
        return one.minus(self._ranges[first:end])


class Held(NamedTuple):
    """A position, and the epoch that holds it."""

    position: Position
    epoch: int


@dataclass(frozen=True)
class NamedFile:
    """A file that belongs to the table.

    Attributes:
        path: below the root.
        bytes: its size; None if it is not stored.
        ranges: the offsets that contain all of its records.
        epoch, batch: its publisher.
        batched: False if it contains replayed dead letters, or rows of other files.
    """

    path: str
    bytes: int | None = None
    ranges: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0
    batched: bool = False


@dataclass(frozen=True)
class Files:
    """The files of a table, and those that are stored.

    Attributes:
        named: the files of the table.
        stored: the files below the root, path to size.
        again: paths that were named more than once.
    """

    named: Sequence[NamedFile] = ()
    stored: Mapping[str, int] = field(default_factory=dict)
    again: Sequence[str] = ()


@dataclass(frozen=True)
class Ledger:
    """The ledger of one pipeline.

    Attributes:
        pipeline: its name.
        epoch: the last epoch that was given out.
        positions: position and epoch of each partition.
        history: the entries; of a partition in the order of the store.
        moves: True: the entries are the changes of the positions in the order of time, as in a log.
            False: the ranges in force, and superseded ones, in any order.
        complete: no entry is missing, from the start of each partition on.
        resets: the epoch of each reset, and the position that it has set.
        stray: dead letters that are in no range in force: partition and offset.
        files: the files of the table; None if rows are not in files.
        problems: stored values that are invalid.
        unknown: reasons for which something can't be decided.
    """

    pipeline: str
    epoch: int = 0
    positions: Mapping[TopicPartition, Held] = field(default_factory=dict)
    history: Sequence[Entry] = ()
    moves: bool = False
    complete: bool = True
    resets: Mapping[TopicPartition, Mapping[int, Position]] = field(default_factory=dict)
    stray: Sequence[tuple[TopicPartition, int]] = ()
    files: Files | None = None
    problems: Sequence[str] = ()
    unknown: Sequence[str] = ()

    def of(self, tp: TopicPartition) -> list[Entry]:
        """The entries of a partition."""
        return self._by_partition.get(tp, [])

    @cached_property
    def digested(self) -> frozenset[int]:
        """The epochs whose runs have stored digests of rows."""
        counted = ((one.epoch, one.counts) for one in self.history if one.kind in COMMITS)
        return frozenset(at for at, c in counted if c and c.rows > 0 and c.digest is not None)

    @cached_property
    def _by_partition(self) -> dict[TopicPartition, list[Entry]]:
        return grouped((one.partition, one) for one in self.history)


@dataclass(frozen=True)
class Rules:
    """What follows from the settings of the pipeline.

    Attributes:
        timed: positions move on a timer, independent of the records.
        counted: the ledger's counts are those of the written records.
        mixed: a Spark transform mixes the records: rows belong to no range.
        one_row: each record that is neither rejected nor filtered has exactly one row.
    """

    timed: bool = False
    counted: bool = True
    mixed: bool = False
    one_row: bool = False
