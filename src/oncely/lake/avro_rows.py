"""The end of each row in the bytes that polars writes for many rows.

polars encodes a row in about 100 ns, and needs 50 µs for a file of any size. So it encodes the rows
of many files at once, and the bytes are cut between rows. The length of a row follows from its
values (Avro 1.11, "Binary Encoding"); every field and every item is a union with null, whose index
is one byte.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.errors import InvariantViolation

Lengths: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_FIXED = {pa.bool_(): 1, pa.float32(): 4, pa.float64(): 8}


def row_ends(rows: pa.Table) -> Lengths:
    """The end of each row, in bytes, after a first 0: one number more than rows.

    Args:
        rows: the rows that were passed to polars, each column in one chunk.

    Raises:
        InvariantViolation: a type that files do not support.
    """
    total = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        for array in column.chunks if column.num_chunks == 1 else [column.combine_chunks()]:
            total += _lengths(array)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(total)])


def _lengths(array: pa.Array) -> Lengths:
    """Bytes of each value, with the index of its union."""
    inside = _inside(array)
    if array.null_count:
        inside = np.where(pc.is_valid(array).to_numpy(zero_copy_only=False), inside, 0)
    return inside + 1


def _inside(array: pa.Array) -> Lengths:
    arrow = array.type
    if arrow in _FIXED:
        return np.full(len(array), _FIXED[arrow])
    if pa.types.is_integer(arrow) or pa.types.is_temporal(arrow):
        return _of_longs(array)
    if pa.types.is_string(arrow) or pa.types.is_binary(arrow):
        sizes: Lengths = np.diff(_offsets(array))
        return sizes + _digits(sizes.astype(np.uint64) << np.uint64(1))
    if pa.types.is_struct(arrow):
        fields = (array.field(i) for i in range(arrow.num_fields))
        found: Lengths = np.sum([_lengths(field) for field in fields], axis=0, dtype=np.int64)
        return found
    if pa.types.is_list(arrow):
        return _of_lists(array)
    raise InvariantViolation(f"{arrow} is not a type of files")


def _of_longs(array: pa.Array) -> Lengths:
    wide = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    if wide.null_count:
        wide = pc.fill_null(wide, 0)
    numbers = wide.to_numpy(zero_copy_only=False).astype(np.int64)
    return _digits(((numbers << 1) ^ (numbers >> 63)).view(np.uint64))


def _of_lists(array: pa.ListArray) -> Lengths:
    """A block with its count and its items, unless it is empty, and the empty block at the end."""
    offsets = _offsets(array)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(_lengths(array.values))])
    counts = np.diff(offsets)
    heads = np.where(counts > 0, _digits(counts.astype(np.uint64) << np.uint64(1)), 0)
    items: Lengths = ends[offsets[1:]] - ends[offsets[:-1]]
    return items + heads + 1


def _offsets(array: pa.Array) -> Lengths:
    """The offsets of values in the array's buffers."""
    if not len(array):
        return np.zeros(1, np.int64)
    if pa.types.is_list(array.type):
        return np.asarray(array.offsets.to_numpy(), np.int64)
    found = np.frombuffer(array.buffers()[1], np.int32)[array.offset :][: len(array) + 1]
    return found.astype(np.int64)


def _digits(numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> Lengths:
    """The number of bytes of integers with seven bits per byte."""
    found = np.ones(len(numbers), np.int64)
    largest = int(numbers.max()) if len(numbers) else 0
    for bits in range(7, 64, 7):
        if largest >> bits == 0:
            break
        found += numbers >= np.uint64(1 << bits)
    return found
