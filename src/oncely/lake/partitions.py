"""Partition columns: the values that determine a row's directory.

``partition_by = ["user", "date(ts)", "hour(ts)"]``: a plain column, or the UTC date or hour of an
event time. An event time is a timestamp, a date, a text by the rule of :mod:`oncely.decode.times`,
or a whole number of milliseconds since 1970, also in a column of DOUBLE. A row without a value
belongs to the directory of no value; a row with any other event time is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.errors import ConfigError
from oncely.lake.event_time import NO_TIME, instants, no_event_time, suitable

Kind = Literal["column", "date", "hour"]
Values: TypeAlias = "tuple[str | None, ...]"
Rejected: TypeAlias = "tuple[int, str]"
Int64s: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Int32s: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"

_KEY = "sink.partition_by"
_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*")
_MOST = 8
_HOUR = 3_600_000_000  # microseconds
_EPOCH = date(1970, 1, 1)


@dataclass(frozen=True)
class PartitionColumn:
    """One level of directories.

    Attributes:
        name: the name of the level: the column's name, ``date`` or ``hour``.
        column: the column of the rows.
        kind: its plain value, or its UTC date or hour.
    """

    name: str
    column: str
    kind: Kind


_LONGEST = 4_096  # bytes of a value; a message of the manifest must not outgrow its topic


def parse_partition_by(texts: Sequence[str]) -> tuple[PartitionColumn, ...]:
    """The levels of ``sink.partition_by``, in its order.

    Raises:
        ConfigError: unknown function, no name, a level twice, two event times, or too many.
    """
    columns = tuple(_parsed(text) for text in texts)
    names = [column.name for column in columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(_KEY, f"{twice!r} would be two levels of directories")
    times = {column.column for column in columns if column.kind != "column"}
    if len(times) > 1:
        raise ConfigError(
            _KEY,
            f"date and hour look at different columns: {', '.join(sorted(times))}",
            way_out="a record has one event time",
        )
    if len(columns) > _MOST:
        raise ConfigError(
            _KEY, f"{len(columns)} levels of directories; at most {_MOST} are allowed"
        )
    return columns


_NESTED = "name a top-level column; a transform can make one of a member"


def check_types(schema: pa.Schema, columns: Sequence[PartitionColumn]) -> None:
    """Check that a schema known at plan time has the columns, with suitable types.

    Raises:
        ConfigError: it does not; the error names ``sink.partition_by``.
    """
    for one in columns:
        if one.column not in schema.names:
            raise ConfigError(
                _KEY,
                f"no column {one.column!r}; there are {', '.join(schema.names)}",
                way_out=_NESTED if "." in one.column else "",
            )
        arrow = schema.field(one.column).type
        problem = _no_value(arrow) if one.kind == "column" else no_event_time(arrow)
        if problem:
            nested = pa.types.is_nested(arrow)
            way_out = _NESTED if nested else ""
            raise ConfigError(_KEY, f"column {one.column!r} {problem}", way_out=way_out)


@dataclass(frozen=True)
class Split:
    """The group of each row of a table.

    Attributes:
        codes: int32, the group of each row, an index into ``groups``; -1: rejected.
        groups: values of the partition columns; for :class:`Splitter` all values so far.
        rejected: row and reason, ascending.
        times: int64, microseconds since 1970 UTC; ``NO_TIME`` for none. None without date and hour.
    """

    codes: Int32s
    groups: Sequence[Values]
    rejected: list[Rejected]
    times: Int64s | None


def split(rows: pa.Table, columns: Sequence[PartitionColumn]) -> Split:
    """The group of each row of one table."""
    splitter = Splitter(columns)
    found = splitter.split(rows)
    groups = [splitter.values(code) for code in range(splitter.groups)]
    return Split(found.codes, groups, found.rejected, found.times)


@dataclass
class _Known:
    """Numbers for values, in the order of first occurrence."""

    number: dict[Any, int] = field(default_factory=dict)
    value: list[Any] = field(default_factory=list)

    def numbers(self, values: list[Any]) -> Int64s:
        for value in values:
            if value not in self.number:
                self.number[value] = len(self.value)
                self.value.append(value)
        return np.fromiter((self.number[value] for value in values), np.int64, len(values))


class Splitter:
    """Splits the tables of a task; a group keeps its code across tables.

    Each plain column is one axis, and the event time is one, for any number of levels. Python
    handles each value of an axis and each combination once per table, not each row.
    """

    def __init__(self, columns: Sequence[PartitionColumn]) -> None:
        self._columns = tuple(columns)
        self._plain = [column for column in columns if column.kind == "column"]
        kinds = {column.kind for column in columns} - {"column"}
        self._time = next((c.column for c in columns if c.kind != "column"), None)
        self._by_day, self._of_day = kinds == {"date"}, kinds == {"hour"}
        axes = len(self._plain) + (self._time is not None)
        self._axes = [_Known() for _ in range(axes)]
        self._pairs = [_Known() for _ in range(max(0, axes - 1))]

    @property
    def groups(self) -> int:
        """The number of groups so far."""
        if not self._axes:
            return 1
        return len((self._pairs or self._axes)[-1].value)

    def values(self, code: int) -> Values:
        """A group's values, as texts."""
        numbers: list[int] = []
        for pairs in reversed(self._pairs):
            code, last = pairs.value[code] >> 32, pairs.value[code] & 0xFFFFFFFF
            numbers.append(last)
        numbers = [code, *reversed(numbers)] if self._axes else []
        found = {
            one.name: self._axes[axis].value[numbers[axis]] for axis, one in enumerate(self._plain)
        }
        instant = self._axes[-1].value[numbers[-1]] if self._time is not None else None
        return tuple(
            found[one.name] if one.kind == "column" else self._text(one.kind, instant)
            for one in self._columns
        )

    def split(self, rows: pa.Table) -> Split:
        """The group of each row; ``groups`` of the result is empty, see :meth:`values`."""
        rejected: dict[int, str] = {}
        numbers = [
            self._numbered(axis, _texts(rows, one.column, rejected))
            for axis, one in enumerate(self._plain)
        ]
        times = None
        if self._time is not None:
            times = instants(rows, self._time, rejected)
            numbers.append(self._numbered(-1, self._steps(times)))
        codes = numbers[0] if numbers else np.zeros(rows.num_rows, np.int64)
        for pairs, following in zip(self._pairs, numbers[1:], strict=True):
            codes = _renumbered(pairs, pa.array((codes << 32) | following))
        groups: Int32s = codes.astype(np.int32)
        if rejected:
            groups[list(rejected)] = -1
        return Split(groups, (), sorted(rejected.items()), times)

    def _numbered(self, axis: int, values: pa.Array) -> Int64s:
        return _renumbered(self._axes[axis], values)

    def _steps(self, times: Int64s) -> pa.Array:
        """Hours since 1970; only days or hours of the day if the levels need no more."""
        hours = times // _HOUR
        if self._by_day:
            hours //= 24
        elif self._of_day:
            hours %= 24
        return pa.array(hours, mask=times == NO_TIME)

    def _text(self, kind: Kind, step: int | None) -> str | None:
        if step is None:
            return None
        if kind == "hour":
            return f"{step % 24:02d}"
        return (_EPOCH + timedelta(days=step if self._by_day else step // 24)).isoformat()


def _renumbered(known: _Known, values: pa.Array) -> Int64s:
    encoded = pc.dictionary_encode(values, null_encoding="encode")
    seen = known.numbers(encoded.dictionary.to_pylist())
    if not len(encoded):
        return np.zeros(0, np.int64)
    numbered: Int64s = seen[encoded.indices.to_numpy()]
    return numbered


def _texts(rows: pa.Table, name: str, rejected: dict[int, str]) -> pa.Array:
    """A plain column as texts; a column that no record has yet has no values."""
    column = suitable(rows, name, _no_value, rejected, "partition column")
    if column is None or pa.types.is_null(column.type):
        return pa.nulls(rows.num_rows, pa.string())
    texts = pc.cast(column, pa.string())
    long = pc.fill_null(pc.greater(pc.binary_length(texts), _LONGEST), False)
    if pc.any(long).as_py():
        for row in pc.indices_nonzero(long).to_pylist():
            rejected.setdefault(
                row, f"partition column {name!r} has more than {_LONGEST:,} bytes: it is part "
                "of the manifest"
            )  # fmt: skip
        texts = pc.if_else(long, pa.scalar(None, pa.string()), texts)
    return texts


def _no_value(arrow: pa.DataType) -> str:
    """The reason why a column of this type cannot be a plain partition column; empty if it can."""
    is_a = pa.types
    good = (is_a.is_string, is_a.is_large_string, is_a.is_integer, is_a.is_boolean)
    if any(test(arrow) for test in (*good, is_a.is_date32, is_a.is_null)):
        return ""
    if is_a.is_timestamp(arrow):
        return f"is {arrow}; write date(…) or hour(…) of it"
    return f"is {arrow}; texts, whole numbers, booleans and dates can be partitioned by"


def _parsed(text: str) -> PartitionColumn:
    call = _CALL.fullmatch(text)
    if call is None:
        if not text.strip():
            raise ConfigError(_KEY, "an empty name")
        return PartitionColumn(text, text, "column")
    function, column = call[1], call[2].strip()
    if function not in ("date", "hour") or not column:
        raise ConfigError(
            _KEY, f"{text!r} is not known", way_out="write a column, date(column) or hour(column)"
        )
    return PartitionColumn(function, column, "date" if function == "date" else "hour")
