"""What a record of the demo must become, written down once more for the independent reader.

Nothing here comes from the pipeline's code or from the publisher's.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from functools import cache
from typing import Any, NoReturn

COLUMNS = (
    *("id", "carrier", "flight", "tailnum", "origin", "dest", "time_hour"),
    *("dep_delay", "arr_delay", "distance", "late"),
)
"""Of both tables, in this order; ``late`` is what the pipeline computes."""

_LATE = 15.0  # minutes
_SECOND = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)

Values = tuple[Any, ...]


class _Broken(Exception):
    """The record is no flight."""


def row_of(value: bytes | None) -> Values | None:
    """Return the row that a record must become, in the order of COLUMNS, or None if it is broken.

    A flight is one strict JSON object in UTF-8. ``id`` is a whole number of 64 bits, ``flight``
    and ``distance`` are of 32, the delays finite numbers, ``time_hour`` an instant to the second,
    the rest are texts without a NUL character, which PostgreSQL can't store. All but ``id`` may
    be null or missing.
    """
    try:
        found = json.loads((value or b"").decode("utf-8"), parse_constant=_no_constant)
        if type(found) is not dict or found.get("id") is None:
            raise _Broken
        delay = _double(found.get("dep_delay"))
        return (
            _whole(found.get("id"), 64),
            _text(found.get("carrier")),
            _whole(found.get("flight"), 32),
            _text(found.get("tailnum")),
            _text(found.get("origin")),
            _text(found.get("dest")),
            _instant(found.get("time_hour")),
            delay,
            _double(found.get("arr_delay")),
            _whole(found.get("distance"), 32),
            None if delay is None else delay > _LATE,
        )
    except (ValueError, _Broken):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        return None


def _no_constant(_: str) -> NoReturn:
    raise _Broken  # NaN and Infinity are Python's, not JSON's


def _whole(value: object, bits: int) -> int | None:
    if value is None:
        return None
    limit = 1 << (bits - 1)
    if type(value) is not int or not -limit <= value < limit:
        raise _Broken
    return value


def _double(value: object) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or abs(value) > sys.float_info.max:  # type: ignore[arg-type]
        raise _Broken
    return float(value)  # type: ignore[arg-type]


def _text(value: object) -> str | None:
    if value is None:
        return None
    if type(value) is not str or "\0" in value:
        raise _Broken
    value.encode("utf-8")  # half a surrogate pair is no text
    return value


@cache
def _second(text: str) -> datetime:
    if not _SECOND.fullmatch(text):
        raise _Broken
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def _instant(value: object) -> datetime | None:
    if value is None:
        return None
    if type(value) is not str:
        raise _Broken
    return _second(value)
