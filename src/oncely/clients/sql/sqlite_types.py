"""The mapping of Arrow types to types of a STRICT SQLite table, and the values to bind.

SQLite has five types and stores values unchanged. Types that it does not have are stored as text of
a canonical form, so that equal values are equal texts and times sort: decimals in plain digits with
their scale, dates and times as ISO 8601 with six digits after the second (``Z`` for instants),
nested values as JSON.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from oncely.clients.sql.connection import BadData, Column, ColumnFit
from oncely.core.times import OF_DAY, without_text
from oncely.errors import TableMismatch

_FAMILY = {"INT": "INTEGER"}


def column_type(arrow_type: pa.DataType) -> str:
    """The type of a STRICT table that holds values of an Arrow type.

    Raises:
        TableMismatch: there is no such type.
    """
    types = pa.types
    if types.is_dictionary(arrow_type):
        return column_type(arrow_type.value_type)
    if types.is_boolean(arrow_type) or types.is_integer(arrow_type):
        return "INTEGER"
    if types.is_floating(arrow_type):
        return "REAL"
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type):
        return "BLOB"
    if types.is_null(arrow_type) or _sent_as_text(arrow_type) is not None:
        return "TEXT"
    raise TableMismatch(
        f"there is no SQLite type for {arrow_type}",
        way_out="cast it to another type in the transform",
    )


def fit(column: Column, arrow_type: pa.DataType) -> ColumnFit | None:
    """The conversion of values of ``arrow_type`` to ``column``, or None if it would lose
    information."""
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    kind = column.type.upper()
    family = column_type(arrow_type) if kind == "ANY" else _FAMILY.get(kind, kind)
    if pa.types.is_null(arrow_type):
        return ColumnFit(column.name, _EMPTY.get(family, pa.string()))
    sent = _sent(family, arrow_type)
    return None if sent is None else ColumnFit(column.name, sent)


_EMPTY = {"INTEGER": pa.int64(), "REAL": pa.float64(), "BLOB": pa.binary()}


def _sent(family: str, arrow_type: pa.DataType) -> pa.DataType | None:
    """The Arrow type to which ``arrow_type`` is cast before :func:`values` converts it."""
    own = column_type(arrow_type)
    if family == "REAL" and (own == "REAL" or pa.types.is_integer(arrow_type)):
        return pa.float64()
    if family != own:
        return None
    return _EMPTY.get(family) or _sent_as_text(arrow_type)


def _sent_as_text(arrow_type: pa.DataType) -> pa.DataType | None:
    types = pa.types
    if types.is_timestamp(arrow_type):
        return pa.timestamp("us", "UTC" if arrow_type.tz else None)
    if types.is_date(arrow_type):
        return pa.date32()
    if types.is_time(arrow_type):
        return pa.time64("us")
    if types.is_decimal(arrow_type):
        return arrow_type
    text = types.is_string(arrow_type) or types.is_large_string(arrow_type)
    return pa.string() if text or types.is_nested(arrow_type) else None


def keeps_order(arrow_type: pa.DataType) -> bool:
    """True if the stored form sorts in the order of the values; decimals as text do not ('9' >
    '10')."""
    return not (pa.types.is_decimal(arrow_type) or pa.types.is_nested(arrow_type))


def values(column: pa.Array, name: str) -> list[object]:
    """The values to bind.

    Raises:
        BadData: SQLite would accept a value, and return a different one.
    """
    for kind, encode in _ENCODERS:
        if kind(column.type):
            return encode(column, name)
    return list(column.to_pylist())


def _float(column: pa.Array, name: str) -> list[object]:
    """Refuse NaN, which SQLite binds as NULL without an error."""
    _refuse(pc.is_nan(column), name, "SQLite has no NaN")
    return list(column.to_pylist())


def _timestamp(column: pa.Array, name: str) -> list[object]:
    zone = "Z" if column.type.tz else ""
    # Without the zone it is the same instant, and no time zone database is needed.
    return _iso(column.cast(pa.timestamp("us")), "%Y-%m-%dT%H:%M:%S", zone, name)


def _date(column: pa.Array, name: str) -> list[object]:
    return _iso(column, "%Y-%m-%d", "", name)


def _iso(column: pa.Array, form: str, zone: str, name: str) -> list[object]:
    _refuse(
        pa.array(without_text(column)),
        name,
        "as ISO 8601 text a year outside 0001 to 9999 does not sort",
    )
    found: list[str | None] = pc.strftime(column, format=form).to_pylist()
    return [None if one is None else one + zone for one in found]


def _decimal(column: pa.Array, _name: str) -> list[object]:
    found: list[decimal.Decimal | None] = column.to_pylist()
    return [None if one is None else format(one, "f") for one in found]


def _time(column: pa.Array, name: str) -> list[object]:
    _refuse(pa.array(without_text(column)), name, OF_DAY)
    return list(column.cast(pa.string()).to_pylist())


_ENCODERS: tuple[
    tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, str], list[object]]], ...
] = (
    (pa.types.is_floating, _float),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_date, _date),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_time, _time),
)


def _refuse(bad: pa.BooleanArray, name: str, reason: str) -> None:
    line = pc.index(bad, True).as_py()
    if line >= 0:
        raise BadData(f"column {name!r}: {reason}", line)
