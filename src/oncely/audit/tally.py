"""Sums by which a set of offsets, or of rows, is compared without sending it.

The digest of an offset is PostgreSQL's ``hashint8extended(1, offset)``: the server computes the
same sum over its rows. Two multisets of offsets with the same number of elements and the same sum
modulo 2^64 are the same, but for a chance of 2^-64.

Of destinations that can't sum, this process reads the rows (:class:`ScannedRows`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.audit.evidence import PRESENT, Cell, IntArray, Tally
from oncely.core.ranges import TopicPartition, grouped

MODULUS = 1 << 64
_STEP = 1 << 20  # offsets at once
_U = np.uint32


def offset_digests(offsets: IntArray) -> npt.NDArray[np.uint64]:
    """``hashint8extended(1, offset)`` of each offset."""
    seed = np.asarray(offsets, dtype=np.int64).view(np.uint64)
    a = np.full(len(seed), 0x9E3779B9 + 4 + 3923095 & 0xFFFFFFFF, dtype=_U)
    b, c = a.copy(), a.copy()
    x, y, z = a + (seed >> np.uint64(32)).astype(_U), b + seed.astype(_U), c.copy()
    _mix(x, y, z)
    nonzero = seed != 0  # a seed of zero is not mixed in
    a, b, c = (np.where(nonzero, new, old) for new, old in ((x, a), (y, b), (z, c)))
    a += _U(1)
    _final(a, b, c)
    found: npt.NDArray[np.uint64] = (b.astype(np.uint64) << np.uint64(32)) | c
    return found


def sum_of(runs: Any) -> int:
    """The sum of the digests of all offsets of these (first, end)."""
    total = 0
    for first, end in runs:
        for at in range(int(first), int(end), _STEP):
            total += added(offset_digests(np.arange(at, min(at + _STEP, int(end)))))
    return total % MODULUS


def added(digests: npt.NDArray[np.uint64]) -> int:
    """The sum modulo 2^64."""
    return int(digests.sum(dtype=np.uint64))


class Tallies:
    """Sums rows and dead letters by cell, for destinations that are read by this process.

    Args:
        cells: disjoint cells.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells
        self._bounds = by_partition(cells)
        self._sums = [[0, 0, 0, 0] for _ in cells]
        self._without_digest: set[int] = set()

    def add(
        self,
        partition: TopicPartition,
        offsets: IntArray,
        digests: npt.NDArray[np.uint64] | None = None,
        *,
        rejects: bool = False,
    ) -> None:
        """Add rows, or dead letters, of a partition by their offsets; others are ignored."""
        if partition not in self._bounds:
            return
        numbers, starts, ends = self._bounds[partition]
        place = np.searchsorted(starts, offsets, side="right") - 1
        inside = (place >= 0) & (offsets < ends[place])
        of_offsets = offset_digests(offsets)
        for at in np.unique(place[inside]):
            own, number = inside & (place == at), int(numbers[at])
            sums = self._sums[number]
            sums[1 if rejects else 0] += int(own.sum())
            sums[2] += added(of_offsets[own])
            if digests is not None:
                sums[3] += added(digests[own])
            elif not rejects:
                self._without_digest.add(number)

    def result(self) -> list[Tally]:
        """One tally for each cell; without a digest if a row was added without one."""
        return [
            Tally(
                rows, rejects, offsets % MODULUS,
                None if at in self._without_digest else digest % MODULUS,
            )
            for at, (rows, rejects, offsets, digest) in enumerate(self._sums)
        ]  # fmt: skip


def by_partition(
    cells: Sequence[Cell],
) -> Mapping[TopicPartition, tuple[IntArray, IntArray, IntArray]]:
    """By partition: the numbers of its cells in ascending order, their starts and their ends."""
    numbers = grouped((cell.span.partition, number) for number, cell in enumerate(cells))
    found = {}
    for tp, own in numbers.items():
        own.sort(key=lambda number: cells[number].span.range)
        ranges = [cells[number].span.range for number in own]
        if any(one.overlaps(other) for one, other in pairwise(ranges)):
            raise ValueError(f"{tp}: cells overlap")
        found[tp] = (
            np.array(own, dtype=np.int64),
            np.array([one.start for one in ranges], dtype=np.int64),
            np.array([one.end for one in ranges], dtype=np.int64),
        )
    return found


Word = npt.NDArray[np.uint32]


def _rotated(x: Word, by: int) -> Word:
    return (x << _U(by)) | (x >> _U(32 - by))


def _mix(a: Word, b: Word, c: Word) -> None:
    """Bob Jenkins' lookup3, as in PostgreSQL's hashfn.c; in place."""
    for by in (4, 6, 8, 16, 19, 4):
        a -= c
        a ^= _rotated(c, by)
        c += b
        a, b, c = b, c, a


def _final(a: Word, b: Word, c: Word) -> None:
    for by in (14, 11, 25, 16, 4, 14, 24):
        c ^= b
        c -= _rotated(b, by)
        a, b, c = b, c, a


class Scanned(NamedTuple):
    """Some rows of one partition.

    Attributes:
        offsets: of each row, also several times.
        digests: of each row; None if they are not known.
    """

    partition: TopicPartition
    offsets: IntArray
    digests: npt.NDArray[np.uint64] | None = None

    def only(self, which: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
        """Some of the rows in the form of :data:`PRESENT`; nothing if there is none."""
        if not which.any():
            return
        offsets, place = np.unique(self.offsets[which], return_inverse=True)
        count = len(offsets)
        digests: object = pa.nulls(count, pa.uint64())
        if self.digests is not None:
            digests = np.zeros(count, np.uint64)
            np.add.at(digests, place, self.digests[which])
        topic, number = self.partition
        columns = [[topic] * count, [number] * count, offsets, np.bincount(place), digests]
        yield pa.record_batch(columns, schema=PRESENT)


class ScannedRows:
    """The part of :class:`oncely.audit.evidence.Evidence` that one pass over all rows gives."""

    @abstractmethod
    def scan(self, recipe: str) -> Iterable[Scanned]:
        """All rows with their offsets, and with digests if the recipe permits them."""

    @abstractmethod
    def letters(self) -> Iterable[tuple[TopicPartition, int]]:
        """All dead letters that wait."""

    def tallies(self, cells: Sequence[Cell]) -> Sequence[Tally]:
        """Sums over one scan."""
        sums = Tallies(cells)
        for one in self.scan(_recipe(cells)):
            sums.add(*one)
        for tp, offset in self.letters():
            sums.add(tp, np.array([offset], dtype=np.int64), rejects=True)
        return sums.result()

    def rows(self, cells: Sequence[Cell]) -> Iterator[pa.RecordBatch]:
        """Rows by offset, from one scan."""
        ranges = grouped(cell.span for cell in cells)
        for one in self.scan(_recipe(cells)):
            for own in ranges.get(one.partition, ()):
                yield from one.only((one.offsets >= own.start) & (one.offsets < own.end))


def _recipe(cells: Sequence[Cell]) -> str:
    """The recipe of all cells that have one; empty if there are several."""
    recipes = {cell.recipe for cell in cells if cell.recipe}
    return recipes.pop() if len(recipes) == 1 else ""
