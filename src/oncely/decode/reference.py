"""The per-record truth of JSON decoding: slow, plain, and asked whenever the fast path is unsure.

It shares nothing with the fast path but the standard library: Python's own JSON scanner keeps
every number as the text it was, and each value is then checked by hand.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

import pyarrow as pa

from oncely.decode.base import Refused
from oncely.decode.schema import type_name
from oncely.decode.times import parse_date, parse_timestamp

DEEPEST = 128
"""How many arrays and objects may lie in one another, the record's own object included."""
_MOST_SHOWN = 40  # characters of a record's content in a reason
MOST_DIGITS = 400  # of a whole number; DOUBLE ends at 309
EXACT = 1 << 53
"""Every whole number up to this one, and down to its negative, equals a DOUBLE."""
_STRINGS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""A text that is a decimal number, as SQL writes them."""
_BRACKETS = re.compile(r"[][{}]+")
_INTEGERS: Mapping[pa.DataType, int] = {
    pa.int8(): 8,
    pa.int16(): 16,
    pa.int32(): 32,
    pa.int64(): 64,
}


class _NotJson(Exception):
    """What Python's scanner takes, but the grammar doesn't."""


class Number(str):
    """A number as it was written."""

    __slots__ = ()


class Whole(Number):
    """A number without point and exponent."""

    __slots__ = ()


def read_record(data: bytes | None, schema: pa.Schema, *, what: str = "value") -> dict[str, Any]:
    """Decode one record by the rules that :class:`oncely.decode.json.JsonDecoder` states.

    Args:
        data: the record's bytes.
        schema: its columns.
        what: the name of these bytes in reasons, ``value`` or ``key``.

    Returns:
        Column name to what ``pyarrow.array`` takes for it: dates as days, timestamps as
        microseconds since 1970, structs and maps as dicts.

    Raises:
        Refused: it is no row.
    """
    found = parse_object(data, what)
    return {field.name: _member(field, found, "") for field in schema}


def parse_object(data: bytes | None, what: str = "value") -> dict[str, Any]:
    """Read strict JSON: one object, numbers still texts.

    Raises:
        Refused: it is none.
    """
    if data is None:
        raise Refused(f"the {what} is null")
    text = utf8(data, what)
    if not text.strip(" \t\r\n"):
        raise Refused(f"the {what} is blank")
    if _too_deep(text):
        raise Refused(f"the {what} is nested more than {DEEPEST} deep")
    try:
        found = _SCANNER.decode(text)
    except json.JSONDecodeError as error:
        problem = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise Refused(f"the {what} is not JSON: {problem}") from None
    except _NotJson as error:
        raise Refused(f"the {what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(f"the {what} is not a JSON object but {show(found)}")
    return found


def utf8(data: bytes, what: str) -> str:
    """The text of some bytes.

    Raises:
        Refused: it is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise Refused(f"the {what} is not UTF-8: byte 0x{byte:02x} at {error.start}") from None


def nesting(text: str) -> int:
    """How deep the brackets of a text lie in one another, those inside strings left out."""
    depth = deepest = 0
    for brackets in _BRACKETS.findall(_STRINGS.sub("", text)):
        for bracket in brackets:
            depth += 1 if bracket in "[{" else -1
            deepest = max(deepest, depth)
    return deepest


def _too_deep(text: str) -> bool:
    # The scanner recurses, and its limit depends on who calls: so the limit is our own.
    return text.count("[") + text.count("{") > DEEPEST and nesting(text) > DEEPEST


def _no_constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, value in pairs:
        _check_text(name)
        _check_text(value)
    return dict(pairs)  # of a key that is there twice, the last wins


def _check_text(value: Any) -> None:
    """Refuse half a surrogate pair, which no UTF-8 text can hold. Objects have been looked at."""
    if isinstance(value, list):
        for item in value:
            _check_text(item)
    elif type(value) is str and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            half = ord(value[error.start])
            raise _NotJson(f"\\u{half:04x} is half a surrogate pair") from None


_SCANNER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_float=Number,
    parse_int=Whole,
    parse_constant=_no_constant,
)


def _member(field: pa.Field, members: Mapping[str, Any], at: str) -> Any:
    path = f"{at}.{field.name}" if at else field.name
    value = members.get(field.name)
    if value is not None:
        return _READERS[field.type.id](field.type, value, path)
    if not field.nullable:
        found = "null" if field.name in members else "nothing"
        raise Refused(f"{path}: found {found}, but it is NOT NULL")
    return None


def _nested(arrow: pa.DataType, value: Any, path: str) -> Any:
    return None if value is None else _READERS[arrow.id](arrow, value, path)


def _wrong(arrow: pa.DataType, value: Any, path: str) -> NoReturn:
    raise Refused(f"{path}: expected {type_name(arrow)}, found {show(value)}")


def _boolean(arrow: pa.DataType, value: Any, path: str) -> bool:
    return value if isinstance(value, bool) else _wrong(arrow, value, path)


def _string(arrow: pa.DataType, value: Any, path: str) -> str:
    return value if type(value) is str else _wrong(arrow, value, path)


def _integer(arrow: pa.DataType, value: Any, path: str) -> int:
    if not isinstance(value, Whole):
        _wrong(arrow, value, path)
    number = int(value) if len(value) <= MOST_DIGITS else None
    limit = 1 << _INTEGERS[arrow] - 1
    if number is None or not -limit <= number < limit:
        raise Refused(f"{path}: {show(value)} is out of range of {type_name(arrow)}")
    return number


def _floating(arrow: pa.DataType, value: Any, path: str) -> float:
    if not isinstance(value, Number):
        _wrong(arrow, value, path)
    try:
        # A whole number is a whole number first: -0 is 0, while -0.0 keeps its sign.
        number = float(int(value)) if _is_short_whole(value) else float(value)
        if math.isfinite(number):
            struct.pack("<f" if pa.types.is_float32(arrow) else "<d", number)
            return number
    except OverflowError:
        pass
    raise Refused(f"{path}: {show(value)} is out of range of {type_name(arrow)}")


def _is_short_whole(value: Number) -> bool:
    return isinstance(value, Whole) and len(value) <= MOST_DIGITS


def _decimal(arrow: pa.DataType, value: Any, path: str) -> Decimal:
    if not isinstance(value, Number) and not (type(value) is str and _DECIMAL.fullmatch(value)):
        _wrong(arrow, value, path)
    try:
        sign, digits, exponent = Decimal(value).as_tuple()
    except InvalidOperation:  # an exponent that is longer than a machine word
        sign, digits, exponent = 0, (1,), MOST_DIGITS
    assert isinstance(exponent, int)  # noqa: S101 - JSON has no NaN
    significant = "".join(map(str, digits)).rstrip("0")
    exponent += len(digits) - len(significant) if significant else -exponent
    significant = significant.lstrip("0")
    if -exponent > arrow.scale or len(significant) + exponent > arrow.precision - arrow.scale:
        raise Refused(f"{path}: {show(value)} does not fit {type_name(arrow)} exactly")
    # With the column's own scale, so that nobody has to change it again.
    return Decimal(
        (sign, tuple(map(int, significant + "0" * (exponent + arrow.scale))), -arrow.scale)
    )


def _date(arrow: pa.DataType, value: Any, path: str) -> int:
    days = parse_date(value) if type(value) is str else None
    return _wrong(arrow, value, path) if days is None else days


def _timestamp(arrow: pa.DataType, value: Any, path: str) -> int:
    zoned = arrow.tz is not None
    micros = parse_timestamp(value, zoned=zoned) if type(value) is str else None
    return _wrong(arrow, value, path) if micros is None else micros


def _binary(arrow: pa.DataType, value: Any, path: str) -> bytes:
    if type(value) is str:
        try:
            return from_base64(value)
        except ValueError:
            pass
    _wrong(arrow, value, path)


def from_base64(text: str) -> bytes:
    """Bytes of a BINARY text: RFC 4648 section 4, padded, nothing but its alphabet.

    Raises:
        ValueError: it is something else.
    """
    data = binascii.a2b_base64(text, strict_mode=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("base64 that no encoder writes")
    return data


def _list(arrow: pa.DataType, value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        _wrong(arrow, value, path)
    inner = arrow.value_type
    return [_nested(inner, item, f"{path}[{index}]") for index, item in enumerate(value)]


def _struct(arrow: pa.DataType, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _wrong(arrow, value, path)
    return {field.name: _member(field, value, path) for field in arrow}


def _map(arrow: pa.DataType, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _wrong(arrow, value, path)
    inner = arrow.item_type
    return {name: _nested(inner, item, f"{path}[{quote(name)}]") for name, item in value.items()}


_READERS: Mapping[int, Callable[[pa.DataType, Any, str], Any]] = {
    pa.string().id: _string,
    pa.bool_().id: _boolean,
    **{arrow.id: _integer for arrow in _INTEGERS},
    pa.float32().id: _floating,
    pa.float64().id: _floating,
    pa.decimal128(1).id: _decimal,
    pa.date32().id: _date,
    pa.timestamp("us").id: _timestamp,
    pa.binary().id: _binary,
    pa.list_(pa.null()).id: _list,
    pa.struct([]).id: _struct,
    pa.map_(pa.string(), pa.null()).id: _map,
}


def read_value(arrow: pa.DataType, value: Any, path: str) -> Any:
    """One value that is not null, as :func:`parse_object` left it, for a column of a type.

    Raises:
        Refused: it is none of that type; the reason begins with ``path``.
    """
    return _READERS[arrow.id](arrow, value, path)


def show(value: Any) -> str:
    """What was found, in a few words: ASCII, without control characters, never long."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Number):
        return value if len(value) <= _MOST_SHOWN else f"a number of {len(value)} characters"
    if isinstance(value, str):
        return f"the text {quote(value)}"
    count = len(value)
    kind = "an array" if isinstance(value, list) else "an object"
    return f"{kind} of {count}"


def quote(text: str) -> str:
    """A text as JSON writes it in ASCII, so a NUL in it can't spoil the reject's own row."""
    more = len(text) - _MOST_SHOWN
    return json.dumps(text[:_MOST_SHOWN]) + (f" and {more} characters more" if more > 0 else "")
