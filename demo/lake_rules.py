"""What a record must become in the lake, written down once more for the independent reader.

Here the columns are inferred, each carrier's from its own flights, so other records are broken
than under the table's fixed schema (:mod:`demo.rules`): a fraction widens a column, a large number
is one of 64 bits, a NUL character is a character, and a member that nobody asked for is a column.
Nothing here comes from the pipeline's code or from the publisher's.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

Row = dict[str, Any]

_TEXTS = ("carrier", "tailnum", "origin", "dest", "time_hour", "note")
_NUMBERS = ("id", "flight", "dep_delay", "arr_delay", "distance")
_LONGEST = 1 << 63


class _Broken(Exception):
    """The record is no flight."""


def row_of(value: bytes | None) -> Row | None:
    """Return the members that a record's row must have, nulls left out; None if it is broken.

    A flight is one strict JSON object in UTF-8. Its numbers are numbers, whole ones of 64 bits, and
    its texts are texts: the first flight of each carrier says so, and whole. ``time_hour``
    chooses the folder, so it must be an instant.
    """
    try:
        found = json.loads((value or b"").decode("utf-8"), parse_constant=_no_constant)
        if type(found) is not dict:
            raise _Broken
        row = {name: one for name, one in found.items() if one is not None}
        for name, one in row.items():
            _check(name, one)
        folder_of(row)
    except (ValueError, _Broken):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        return None
    return row


def folder_of(row: Row) -> str:
    """The folder that a row belongs to, below the root.

    Raises:
        ValueError: ``time_hour`` is no instant.
    """
    day, hour = _day_and_hour(row["time_hour"])
    return f"carrier={row['carrier']}/date={day}/hour={hour:02d}"


def _check(name: str, one: object) -> None:
    if name in _TEXTS and type(one) is str:
        one.encode("utf-8")  # half a surrogate pair is no text
    elif name in _NUMBERS and type(one) is int:
        if not -_LONGEST <= one < _LONGEST:
            raise _Broken
    elif not (name in _NUMBERS and type(one) is float):
        raise _Broken


@cache
def _day_and_hour(text: str) -> tuple[str, int]:
    instant = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")
    return text[:10], instant.hour


def _no_constant(_: str) -> NoReturn:
    raise _Broken  # NaN and Infinity are Python's, not JSON's
