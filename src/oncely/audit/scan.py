"""Evidence by offset of destinations that can't sum: this process reads their rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.audit.evidence import PRESENT, Cell, IntArray, Tally
from oncely.audit.tally import Tallies
from oncely.core.ranges import TopicPartition, grouped


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
