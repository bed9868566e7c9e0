"""Cuts a column of bytes into slices, and collects their outcomes in record order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Rejection
from oncely.decode.base import Decoded, InvalidRecord
from oncely.decode.columns import Piece, Positions
from oncely.garbage import no_gc

SLICE_ROWS = 32_768
SLICE_BYTES = 16 * 1024 * 1024
"""The values of a slice exist a second time as Python objects; this bounds their size, unless a
single record is larger."""

_LONGEST_REASON = 400  # characters


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
        is_bytes = pa.types.is_binary(chunk.type) or pa.types.is_large_binary(chunk.type)
        values = chunk if is_bytes else pc.cast(chunk, pa.large_binary())
        at = 0
        while at < len(values):
            count = min(rows, len(values) - at)
            while count > 1 and values.slice(at, count).nbytes > size:
                count //= 2
            yield Slice(first + at, values.slice(at, count))
            at += count
        first += len(values)


def read_each(
    values: Iterable[Any],
    read: Callable[[Any], Any],
    refusal: type[Exception] = InvalidRecord,
) -> tuple[list[Any], Positions, dict[int, str]]:
    """Read each value separately.

    Returns:
        The decoded values, their positions, and the reasons of the others by position.
    """
    found: list[Any] = []
    good: list[int] = []
    refused: dict[int, str] = {}
    for position, value in enumerate(values):
        try:
            found.append(read(value))
            good.append(position)
        except refusal as error:
            refused[position] = str(error)
    return found, np.array(good, np.int64), refused


class RowCollector:
    """Collects rows and rejections slice by slice."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._pieces: list[Piece] = []
        self._rejections: list[Rejection] = []

    def add(self, first: int, pieces: Sequence[Piece], refused: Mapping[int, str]) -> None:
        """Add a slice whose first record is ``first``; each record is in one piece or refused.

        Pieces ascend, but may overlap. Sorting here, slice by slice, avoids a copy of the whole
        table.
        """
        pieces = [(first + records, batch) for records, batch in pieces if len(records)]
        ascending = all(a[-1] < b[0] for (a, _), (b, _) in pairwise(pieces))
        self._pieces += pieces if ascending else _sorted(pieces)
        self._rejections += (
            Rejection(first + at, "decode", shortened(refused[at])) for at in sorted(refused)
        )

    def decoded(self) -> Decoded:
        """The outcome of all slices."""
        return Decoded(
            rows=pa.Table.from_batches([batch for _, batch in self._pieces], self.schema),
            row_record=as_arrow(records for records, _ in self._pieces),
            rejections=self._rejections,
        )


def _sorted(pieces: Sequence[Piece]) -> list[Piece]:
    records = np.concatenate([piece for piece, _ in pieces])
    order = np.argsort(records)
    together = pa.Table.from_batches([batch for _, batch in pieces]).combine_chunks()
    (batch,) = together.take(pa.array(order)).combine_chunks().to_batches()
    return [(records[order], batch)]


def as_arrow(records: Iterable[Positions]) -> pa.Int64Array:
    """Record indices as the int64 array that :class:`Decoded` holds."""
    return pa.array(np.concatenate([np.empty(0, np.int64), *records]), pa.int64())


def shortened(reason: str) -> str:
    """A reason of bounded length."""
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"


@dataclass(frozen=True)
class BytesDecoder(ABC):
    """A decoder of one column of bytes; a subclass decodes a slice of it.

    Attributes:
        schema: the columns of the rows.
        column: the column of the records that is read, ``value`` or ``key``.
    """

    schema: pa.Schema
    column: str = "value"

    @property
    def needs(self) -> frozenset[str]:
        """The column that the decoder reads."""
        return frozenset({self.column})

    def decode(self, records: pa.Table) -> Decoded:
        """Decode every record: a row or a rejection."""
        rows = RowCollector(self.schema)
        with no_gc():
            for part in slices(records[self.column]):
                rows.add(part.first, *self._decode_slice(part.values))
        return rows.decoded()

    @abstractmethod
    def _decode_slice(self, values: pa.Array) -> tuple[list[Piece], dict[int, str]]:
        """Rows in pieces that each ascend, and the reasons of the other records by position."""

    def __getstate__(self) -> dict[str, Any]:
        # Compiled readers cannot be pickled; each process creates its own.
        return {field.name: getattr(self, field.name) for field in fields(self)}
