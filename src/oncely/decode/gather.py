"""Cuts a column of bytes into slices, and puts their outcomes together in record order."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.base import Decoded, Rejection, Stage

SLICE_ROWS = 32_768
SLICE_BYTES = 16 * 1024 * 1024
"""A slice's values exist a second time as Python objects; this bounds them, unless a single
record is larger."""

_LONGEST_REASON = 400  # characters

Records = npt.NDArray[np.int64]


class Slice(NamedTuple):
    """Consecutive records: the index of the first, and their bytes (binary or large_binary)."""

    first: int
    values: pa.Array


def slices(
    column: pa.ChunkedArray, *, rows: int = SLICE_ROWS, size: int = SLICE_BYTES
) -> Iterator[Slice]:
    """Cut a column of bytes into slices of at most ``rows`` records and about ``size`` bytes."""
    first = 0
    for chunk in column.chunks:
        values = chunk if _is_bytes(chunk.type) else pc.cast(chunk, pa.large_binary())
        at = 0
        while at < len(values):
            count = min(rows, len(values) - at)
            while count > 1 and values.slice(at, count).nbytes > size:
                count //= 2
            yield Slice(first + at, values.slice(at, count))
            at += count
        first += len(values)


def _is_bytes(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow))


class Gather:
    """Collects rows and rejections slice by slice; each record may be given once."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._records: list[Records] = []
        self._rejections: list[Rejection] = []

    def rows(self, pieces: Sequence[tuple[Records, pa.RecordBatch]]) -> None:
        """Take the rows of one slice, in pieces that each ascend but may lie in one another.

        Sorting here, slice by slice, keeps a copy of the whole table from being made.
        """
        pieces = [piece for piece in pieces if len(piece[0])]
        for records, batch in pieces if _ascending(pieces) else _sorted(pieces):
            self._records.append(records)
            self._batches.append(batch)

    def reject(self, record: int, reason: str, stage: Stage = "decode") -> None:
        """Note that a record is no row. To be called in the records' order."""
        self._rejections.append(Rejection(record, stage, readable(reason)))

    def decoded(self) -> Decoded:
        """Everything that was gathered."""
        return Decoded(
            rows=pa.Table.from_batches(self._batches, self.schema),
            row_record=as_arrow(self._records),
            rejections=self._rejections,
        )


def as_arrow(records: Iterable[Records]) -> pa.Int64Array:
    """Record indices as the int64 array that :class:`Decoded` holds."""
    return pa.array(np.concatenate([np.empty(0, np.int64), *records]), pa.int64())


@contextmanager
def no_gc() -> Iterator[None]:
    """Millions of short-lived objects without a cycle among them: collecting finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def readable(reason: str) -> str:
    """A reason is written to a table and to logs: short, on one line, without a NUL."""
    if len(reason) > _LONGEST_REASON:
        reason = reason[:_LONGEST_REASON] + "…"
    return reason if reason.isprintable() else repr(reason)[1:-1]


def _ascending(pieces: Sequence[tuple[Records, pa.RecordBatch]]) -> bool:
    return all(a[-1] < b[0] for (a, _), (b, _) in pairwise(pieces))


def _sorted(
    pieces: Sequence[tuple[Records, pa.RecordBatch]],
) -> list[tuple[Records, pa.RecordBatch]]:
    records = np.concatenate([piece for piece, _ in pieces])
    order = np.argsort(records)
    together = pa.Table.from_batches([batch for _, batch in pieces]).combine_chunks()
    (batch,) = together.take(pa.array(order)).combine_chunks().to_batches()
    return [(records[order], batch)]
