"""The event time of rows: a column of a suitable type as microseconds since 1970 UTC.

Each value is checked separately: a row with an invalid value is rejected, even if other rows have
changed the column's type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.reference import MOST_DIGITS, Number, Whole, show
from oncely.decode.times import (
    FIRST_MICROS,
    LAST_MICROS,
    bad_timestamps,
    parse_timestamp,
    timestamps,
)

Micros: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

NO_TIME = np.iinfo(np.int64).min
"""The value for a row without an event time."""

_TYPE = pa.timestamp("us", "UTC")
_UNITS = {"s": (1_000_000, 1), "ms": (1000, 1), "us": (1, 1), "ns": (1, 1000)}
"""Factor and divisor of a unit's numbers, in microseconds."""
_DAY = 86_400_000_000


def no_event_time(arrow: pa.DataType) -> str:
    """The reason why a column of this type cannot be an event time; empty if it can."""
    is_a = pa.types
    good = (is_a.is_timestamp, is_a.is_date32, is_a.is_string, is_a.is_large_string)
    numbers = (is_a.is_signed_integer, is_a.is_float64)
    if any(test(arrow) for test in (*good, *numbers, is_a.is_null)):
        return ""
    return f"is {arrow}; {_RULE}"


def suitable(
    rows: pa.Table,
    name: str,
    problem_of: Callable[[pa.DataType], str],
    rejected: dict[int, str],
    use: str,
) -> pa.Array | None:
    """A column as one array; None if no record has it yet, or if ``problem_of`` its type refuses
    it: rows with a value are then added to ``rejected``."""
    if name not in rows.column_names:
        return None
    column = rows.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    problem = problem_of(column.type)
    if not problem:
        return column
    for row in pc.indices_nonzero(pc.is_valid(column)).to_pylist():
        rejected.setdefault(row, f"{use} {name!r} {problem}")
    return None


def instants(rows: pa.Table, name: str, rejected: dict[int, str]) -> Micros:
    """A column's instants; rows with an invalid value are added to ``rejected``, with the
    reason."""
    column = suitable(rows, name, no_event_time, rejected, "event time")
    if column is None:
        return np.full(rows.num_rows, NO_TIME)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        found = _of_texts(column, name, rejected)
        micros: Micros = pc.fill_null(found.view(pa.int64()), NO_TIME).to_numpy()
        return micros
    if pa.types.is_float64(column.type):
        column = _whole(column, name, rejected)
    return _of_numbers(column, name, rejected)


@dataclass(frozen=True)
class EventTime:
    """Checks the event time of one JSON record, as :func:`instants` checks that of its row.

    Attributes:
        column: the member.
    """

    column: str

    def __call__(self, members: Mapping[str, Any]) -> str | None:
        """The reason why a record has an invalid event time; None if it is valid or missing.

        Args:
            members: from :func:`oncely.decode.reference.parse_object`.
        """
        value, name = members.get(self.column), self.column
        if type(value) is str:
            good = parse_timestamp(value, zoned=True) is not None
            return None if good else _no_time(name, value)
        if isinstance(value, Number):
            return _judged(value, name)
        if isinstance(value, bool) or not _is_empty(value):
            return f"event time {name!r} is {show(value)}; {_RULE}"
        return None


_RULE = "an event time is a timestamp, a date, a text or whole milliseconds"
_FIRST_MILLIS, _LAST_MILLIS = -(-FIRST_MICROS // 1000), LAST_MICROS // 1000


def _judged(value: Number, name: str) -> str | None:
    if not isinstance(value, Whole):
        number = float(value)
        if not number.is_integer():
            return _no_millis(name, number)
    else:
        number = int(value) if len(value) <= MOST_DIGITS else float("inf")
    good = _FIRST_MILLIS <= number <= _LAST_MILLIS
    return None if good else _beyond(name, show(value))


def _is_empty(value: Any) -> bool:
    """True if a member has no value, so that its row has no value there."""
    if isinstance(value, dict | list):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return value is None


def _no_time(name: str, text: str) -> str:
    return f"event time {name!r}: {text[:60]!r} is no time by ISO 8601"


def _no_millis(name: str, number: float) -> str:
    return f"event time {name!r}: {number!r} is no whole number of milliseconds"


def _beyond(name: str, number: object) -> str:
    return f"event time {name!r}: {number} is beyond the calendar"


def _whole(column: pa.Array, name: str, rejected: dict[int, str]) -> pa.Array:
    """Milliseconds from floating-point numbers; numbers outside the calendar become null."""
    numbers = pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False)
    whole = np.floor(numbers) == numbers
    wrong = ~(whole & (numbers >= _FIRST_MILLIS) & (numbers <= _LAST_MILLIS))
    for row in np.flatnonzero(wrong).tolist():
        number = float(numbers[row])
        why = _beyond if number.is_integer() else _no_millis
        rejected.setdefault(row, why(name, number))
    null = wrong | pc.is_null(column).to_numpy(zero_copy_only=False)
    return pa.array(np.where(null, 0.0, numbers).astype(np.int64), mask=null)


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
            rejected.setdefault(row, _no_time(name, texts[row].as_py()))
        mask = np.zeros(len(texts), bool)
        mask[bad] = True
        texts = pc.if_else(pa.array(mask), pa.scalar(None, pa.string()), texts)


def _of_numbers(column: pa.Array, name: str, rejected: dict[int, str]) -> Micros:
    factor, divisor = 1000, 1  # a whole number is in milliseconds
    if pa.types.is_timestamp(column.type):
        factor, divisor = _UNITS[column.type.unit]
        column = column.view(pa.int64())
    elif pa.types.is_date32(column.type):
        factor, column = _DAY, column.view(pa.int32())
    filled = pc.fill_null(pc.cast(column, pa.int64()), 0).to_numpy(zero_copy_only=False)
    if divisor > 1:
        filled = filled // divisor  # Arrow's cast would cut times before 1970 to 1970
    first, last = -(-FIRST_MICROS // factor), LAST_MICROS // factor
    wrong = (filled < first) | (filled > last)
    out = np.where(wrong, 0, filled) * factor
    if column.null_count:
        out[pc.is_null(column).to_numpy(zero_copy_only=False)] = NO_TIME
    if wrong.any():
        for row in np.flatnonzero(wrong).tolist():
            rejected.setdefault(row, _beyond(name, filled[row]))
        out[wrong] = NO_TIME
    return out
