"""The event time of rows: a column of any fitting type as microseconds since 1970 UTC."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.times import FIRST_MICROS, LAST_MICROS, bad_timestamps, timestamps

Micros: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

NO_TIME = np.iinfo(np.int64).min
"""Stands for a row without an event time."""

_TYPE = pa.timestamp("us", "UTC")
_UNITS = {"s": 1_000_000, "ms": 1000, "us": 1}
_DAY = 86_400_000_000


def no_event_time(arrow: pa.DataType) -> str:
    """Why a column of this type holds no event times; nothing if it may."""
    is_a = pa.types
    good = (is_a.is_timestamp, is_a.is_date32, is_a.is_string, is_a.is_large_string)
    if any(test(arrow) for test in (*good, is_a.is_signed_integer, is_a.is_null)):
        return ""
    return f"is {arrow}; an event time is a timestamp, a date, a text or whole milliseconds"


def instants(rows: pa.Table, name: str, rejected: dict[int, str]) -> Micros:
    """A column's instants; rows whose value is none join ``rejected``, with the reason."""
    if name not in rows.column_names:
        return np.full(rows.num_rows, NO_TIME)
    column = rows.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    problem = no_event_time(column.type)
    if problem:
        for row in pc.indices_nonzero(pc.is_valid(column)).to_pylist():
            rejected.setdefault(row, f"event time {name!r} {problem}")
        return np.full(len(column), NO_TIME)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        found = _of_texts(column, name, rejected)
        micros: Micros = pc.fill_null(found.view(pa.int64()), NO_TIME).to_numpy()
        return micros
    return _of_numbers(column, name, rejected)


def _of_texts(column: pa.Array, name: str, rejected: dict[int, str]) -> pa.Array:
    texts = pc.cast(column, pa.string())
    while True:
        try:
            return timestamps(texts, _TYPE)
        except pa.ArrowInvalid:
            bad = bad_timestamps(texts, _TYPE)
            if not bad:
                raise
        for row in bad:
            text = texts[row].as_py()[:60]
            rejected.setdefault(row, f"event time {name!r}: {text!r} is no time by ISO 8601")
        mask = np.zeros(len(texts), bool)
        mask[bad] = True
        texts = pc.if_else(pa.array(mask), pa.scalar(None, pa.string()), texts)


def _of_numbers(column: pa.Array, name: str, rejected: dict[int, str]) -> Micros:
    factor = 1000  # a whole number is milliseconds
    if pa.types.is_timestamp(column.type):
        if column.type.unit == "ns":
            column = pc.cast(column, pa.timestamp("us", column.type.tz), safe=False)
        factor = _UNITS[column.type.unit]
        column = column.view(pa.int64())
    elif pa.types.is_date32(column.type):
        factor, column = _DAY, column.view(pa.int32())
    filled = pc.fill_null(pc.cast(column, pa.int64()), 0).to_numpy(zero_copy_only=False)
    first, last = -(-FIRST_MICROS // factor), LAST_MICROS // factor
    wrong = (filled < first) | (filled > last)
    out = np.where(wrong, 0, filled) * factor
    if column.null_count:
        out[pc.is_null(column).to_numpy(zero_copy_only=False)] = NO_TIME
    if wrong.any():
        for row in np.flatnonzero(wrong).tolist():
            rejected.setdefault(row, f"event time {name!r}: {filled[row]} is beyond the calendar")
        out[wrong] = NO_TIME
    return out
