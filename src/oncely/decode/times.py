"""ISO 8601 texts to instants: single texts by the rule, and whole columns by Arrow.

Arrow writes a wrong text of an instant that has none (:func:`without_text`).

Digits beyond the sixth are cut off, or refused unless they are zeros. The rule for both::

    date       YYYY-MM-DD                              years 0001 to 9999
    timestamp  date [ (T|space) hh [ :mm [ :ss [ .f ] ] ] [ offset ] ]
    f          1 to 9 digits, of which six are kept (microseconds)
    offset     Z | +hh | +hhmm | +hh:mm | -...         up to 23:59

A TIMESTAMP without an offset is UTC, and a date alone is its midnight. A TIMESTAMP_NTZ has no
offset. Hour 24 and second 60 do not exist. The instant must also be in the years 0001 to 9999 UTC,
the range of databases and Python.
"""

from __future__ import annotations

import re
from datetime import date
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_EPOCH = date(1970, 1, 1).toordinal()
FIRST_DAY, LAST_DAY = date.min.toordinal() - _EPOCH, date.max.toordinal() - _EPOCH
"""The range of a DATE in days since 1970, both included."""
_DAY = 86_400_000_000
FIRST_MICROS, LAST_MICROS = FIRST_DAY * _DAY, (LAST_DAY + 1) * _DAY - 1
"""The range of a TIMESTAMP in microseconds since 1970, both included."""

_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_TIMESTAMP = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)"
    r"(?:[T ](?P<h>\d\d)(?::(?P<m>\d\d)(?::(?P<s>\d\d)(?:\.(?P<f>\d{1,9}))?)?)?"
    r"(?P<offset>Z|(?P<sign>[+-])(?P<oh>\d\d)(?::?(?P<om>\d\d))?)?)?",
    re.ASCII,
)
_LOOKS_LIKE = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([T ][0-9]{2}(:[0-9]{2}(:[0-9]{2}([.][0-9]{1,9})?)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?$"
)
_NANOS = r"(\.[0-9]{6})[0-9]{1,3}(Z|[+-][0-9:]+)?$"
_TOO_FINE = r"\.[0-9]{6}[0-9]{0,2}[1-9]"
_DATE_LENGTH = len("YYYY-MM-DD")
_HAS_OFFSET = r"[T ].*(Z|[+-][0-9:]+)$"


def parse_date(text: str) -> int | None:
    """Days since 1970, or None if the text is no DATE."""
    found = _DATE.fullmatch(text)
    if found is None:
        return None
    try:
        return date(*map(int, found.groups())).toordinal() - _EPOCH
    except ValueError:
        return None


def parse_timestamp(text: str, *, zoned: bool) -> int | None:
    """Microseconds since 1970, or None if the text is no TIMESTAMP (not ``zoned``: _NTZ)."""
    found = _TIMESTAMP.fullmatch(text)
    if found is None or (found["offset"] and not zoned):
        return None
    days = parse_date(found["date"])
    hour, minute, second, offset_hour, offset_minute = (
        int(found[name] or 0) for name in ("h", "m", "s", "oh", "om")
    )
    if days is None or max(hour, offset_hour) > 23 or max(minute, second, offset_minute) > 59:
        return None
    micros = int((found["f"] or "").ljust(6, "0")[:6])
    offset = (offset_hour * 60 + offset_minute) * (-1 if found["sign"] == "-" else 1)
    at = days * _DAY + ((hour * 60 + minute - offset) * 60 + second) * 1_000_000 + micros
    return at if FIRST_MICROS <= at <= LAST_MICROS else None


def is_too_fine(text: str) -> bool:
    """True for a TIMESTAMP with digits beyond microseconds that are not zeros."""
    return re.search(_TOO_FINE, text) is not None


def dates(texts: pa.Array) -> pa.Array:
    """A whole column of DATE texts.

    Raises:
        ArrowInvalid: at least one of them is no DATE.
    """
    return checked(pc.cast(texts, pa.date32()))


def timestamps(texts: pa.Array, arrow: pa.TimestampType, *, rounding: bool = True) -> pa.Array:
    """A whole column of TIMESTAMP or TIMESTAMP_NTZ texts; without ``rounding``, too fine ones are
    refused.

    Arrow's own parser follows the rule except for three points: a column has offsets everywhere or
    nowhere, no more digits of a second than its unit, and the years 0000 and 10000 exist. So the
    column is tried in each way that accepts its first text, and rewritten if all fail.

    Raises:
        ArrowInvalid: at least one of them is no timestamp by the rule.
    """
    first = pc.index(pc.is_valid(texts), True).as_py()
    if first < 0:
        return pa.nulls(len(texts), arrow)
    for unit, zone in product(("us", "ns"), (arrow.tz, None) if arrow.tz else (None,)):
        try:  # Arrow formats an error for each bad text of a column: try one text first
            pc.cast(texts.slice(first, 1), pa.timestamp(unit, zone))
            return checked(_micros(pc.cast(texts, pa.timestamp(unit, zone)), arrow, rounding))
        except pa.ArrowInvalid:
            pass
    if not rounding and pc.any(pc.match_substring_regex(texts, _TOO_FINE)).as_py():
        raise pa.ArrowInvalid("a timestamp has more digits than microseconds")
    texts = pc.replace_substring_regex(texts, _NANOS, r"\1\2")
    if arrow.tz:
        bare = pc.if_else(pc.equal(pc.binary_length(texts), _DATE_LENGTH), "T00Z", "Z")
        suffix = pc.if_else(pc.match_substring_regex(texts, _HAS_OFFSET), "", bare)
        texts = pc.binary_join_element_wise(texts, suffix, "")
    return checked(pc.cast(texts, arrow))


def _micros(parsed: pa.Array, arrow: pa.TimestampType, rounding: bool) -> pa.Array:
    if rounding and parsed.type.unit == "ns":
        parsed = pc.floor_temporal(parsed, unit="microsecond")
    return pc.cast(parsed, arrow)


def bad_timestamps(texts: pa.Array, arrow: pa.TimestampType, *, rounding: bool = True) -> list[int]:
    """Positions of texts that are no timestamps, ascending; called when a column has failed.

    First the texts with a wrong form, at Arrow's speed, and only if there are none, those that are
    not in the calendar.
    """
    alike = pc.match_substring_regex(texts, _LOOKS_LIKE)
    if not rounding:
        alike = pc.and_not(alike, pc.match_substring_regex(texts, _TOO_FINE))
    strange = pc.indices_nonzero(pc.invert(alike)).to_pylist()
    return strange or [
        position
        for position, text in enumerate(texts.to_pylist())
        if text is not None and parse_timestamp(text, zoned=arrow.tz is not None) is None
    ]


def checked(column: pa.Array) -> pa.Array:
    """Check the range of a column of type date32, timestamp(us) or time64(us), and return it.

    Raises:
        ArrowInvalid: a value is outside the years 0001 to 9999, or outside the day.
    """
    if pa.types.is_date32(column.type):
        numbers, first, last = column.view(pa.int32()), FIRST_DAY, LAST_DAY
    elif pa.types.is_time64(column.type):
        numbers, first, last = column.view(pa.int64()), 0, _DAY - 1
    else:
        numbers, first, last = column.view(pa.int64()), FIRST_MICROS, LAST_MICROS
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is not None and not first <= ends["min"] <= ends["max"] <= last:
        raise pa.ArrowInvalid("a date or time is out of range")
    return column


# -- instants without a text ----------------------------------------------------------------

YEARS = "a time outside of the years 1 to 9999"
OF_DAY = "a time outside of the day"

_OF_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def without_text(times: Any) -> np.ndarray:
    """True for values outside of the years 1 to 9999, or of a day.

    Arrow's own year has 16 bits: beyond the year 32,767 its texts show another one.

    Args:
        times: an array, or a chunked one, of dates, times or timestamps.
    """
    first, end = FIRST_DAY, LAST_DAY + 1
    if pa.types.is_time(times.type):
        first, end = 0, _OF_A_DAY[times.type.unit]
    elif pa.types.is_timestamp(times.type):
        first, end = (one * _OF_A_DAY[times.type.unit] for one in (first, end))
    elif pa.types.is_date64(times.type):
        first, end = (one * _OF_A_DAY["ms"] for one in (first, end))
    bits = pa.int32() if times.type.bit_width == 32 else pa.int64()
    limits = (max(first, -(1 << 63)), min(end - 1, (1 << 63) - 1))
    number = times.cast(bits).cast(pa.int64())
    other = pc.or_(pc.less(number, limits[0]), pc.greater(number, limits[1]))
    return np.asarray(other.fill_null(False).to_numpy(zero_copy_only=False), dtype=bool)


def require_text(times: Any) -> None:
    """Refuse values that :func:`without_text` finds.

    Raises:
        ValueError: there is one.
    """
    if without_text(times).any():
        raise ValueError(OF_DAY if pa.types.is_time(times.type) else YEARS)
