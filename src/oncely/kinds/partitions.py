"""Partition columns: the values that determine a row's directory.

``partition_by = ["user", "date(ts)", "hour(ts)"]``: a plain column, or the UTC date or hour of an
event time. An event time is a timestamp, a date, a text by the rule of
:mod:`oncely.decode.reference`, or a whole number of milliseconds since 1970, also in a column of
DOUBLE. A row without a value belongs to the directory of no value; a row with any other event time
is rejected.

A directory is ``user=…/date=2026-11-21/hour=07/NAME``: Hive's style, for compatibility with other
tools:

- letters, digits, ``_``, ``.`` and ``-`` of ASCII are kept; each other byte of UTF-8 is ``%XX``;
- no value is ``__HIVE_DEFAULT_PARTITION__``; a text equal to it is encoded at its start;
- ``.`` and ``..`` are encoded; the empty text is ``~empty``;
- a value that is too long is cut: its beginning, ``~``, 32 hex digits of the SHA-256 of the whole.

``~`` has no other use, so two values never share a directory. On a case-insensitive file system,
values that differ only in case share a directory: nothing is lost, since the manifest lists the
files, but the directories no longer separate the values.

The event time of rows is a column of a suitable type as microseconds since 1970 UTC. Each value is
checked separately: a row with an invalid value is rejected, even if other rows have
changed the column's type.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import lru_cache
from typing import Any, Literal, TypeAlias

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
from oncely.errors import ConfigError

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


NO_VALUE = "__HIVE_DEFAULT_PARTITION__"

_EMPTY = "~empty"
_PLAIN = re.compile(r"[A-Za-z0-9_.\-]*")
_OTHER = re.compile(rb"[^A-Za-z0-9_.\-]")
_LONGEST_LEVEL = 200  # bytes, name and value of one directory
_ALL_LEVELS = 680  # bytes: with the longest name, 220, and a slash it is below LONGEST_PATH
_LONGEST_NAME = 64  # bytes, of a topic or of an attempt inside a file's name
_DIGEST = 32


def directory(columns: Sequence[PartitionColumn], values: Sequence[str | None]) -> str:
    """``user=…/date=…``, without a slash at the end; nothing without partition columns."""
    longest = _longest_level(len(columns))
    levels = []
    for column, value in zip(columns, values, strict=True):
        name = encoded(column.name, longest // 2 - 1)
        levels.append(f"{name}={encoded(value, longest - len(name) - 1)}")
    return "/".join(levels)


def _longest_level(columns: int) -> int:
    return min(_LONGEST_LEVEL, _ALL_LEVELS // max(1, columns) - 1)


def is_cut(columns: Sequence[str], name: str, value: str | None = None) -> bool:
    """True if the directories of partition columns cut a name, or a value of its column."""
    longest = _longest_level(len(columns))
    level = encoded(name, longest // 2 - 1)
    found = level if value is None else encoded(value, longest - len(level) - 1)
    return "~" in found.removeprefix(_EMPTY)


@lru_cache(maxsize=4096)
def encoded(value: str | None, longest: int = _LONGEST_LEVEL) -> str:
    """A value as a part of a directory's name, at most ``longest`` bytes of ASCII."""
    if value is None:
        return NO_VALUE
    if not value:
        return _EMPTY
    if value in (".", "..", NO_VALUE):
        return value.replace(".", "%2E").replace("__H", "%5F_H")
    whole, utf8 = value, value.encode("utf-8", "surrogatepass")
    if not _PLAIN.fullmatch(value):
        whole = _OTHER.sub(lambda other: f"%{other[0][0]:02X}".encode(), utf8).decode()
    if len(whole) <= longest:
        return whole
    digest = hashlib.sha256(utf8).hexdigest()[:_DIGEST]
    kept = re.sub("%.?$", "", whole[: longest - _DIGEST - 1])  # no incomplete escape
    return f"{kept}~{digest}"


@dataclass
class FileNames:
    """Unique names of files, in the order of the offsets.

    ``<topic>-<partition>-<first offset>-e<epoch>-b<batch>-<attempt>-<random>-<number>.avro``;
    ``rows-…`` replaces the first three if a transform has mixed the records. Files of a single
    topic-partition sort by offset; a file of several is named after the first.

    Attributes:
        epoch, batch: of the run.
        attempt: identifies the task, for people.
        random: 16 hex digits, which make the names unique.
    """

    epoch: int
    batch: int
    attempt: str
    random: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    _given: int = 0

    def name(self, first: tuple[str, int, int] | None, extension: str) -> str:
        """A new name.

        Args:
            first: topic, partition and offset of the file's first record.
            extension: without a point.
        """
        self._given += 1
        attempt = encoded(self.attempt, _LONGEST_NAME)
        origin = "rows"
        if first is not None:
            origin = f"{encoded(first[0], _LONGEST_NAME)}-{first[1]}-{first[2]:020d}"
        return (
            f"{origin}-e{self.epoch}-b{self.batch}-{attempt}-{self.random}-{self._given:06d}"
            f".{extension}"
        )


# -- information in file names -------------------------------------------------------------


_BY_WHOM = r"-e\d+-b-?\d+-[^/]+-[0-9a-f]{16}-\d{6,}\.(?:avro|parquet)"
_FILE = re.compile(r"(?:.*/)?[^/]+" + _BY_WHOM)
MIXED = re.compile(r"(?:.*/)?rows" + _BY_WHOM)
"""Paths of files whose records a transform has mixed."""


def is_file(path: str) -> bool:
    """True if a path below the root ends in a name that Oncely gives to files of a table."""
    return _FILE.fullmatch(path) is not None
