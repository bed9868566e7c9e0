"""The reference implementation of JSON decoding: slow, used when the fast path is unsure.

It shares only the standard library with the fast path: Python's own JSON scanner keeps every number
as text, and each value is then checked separately.
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
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from oncely.decode.base import InvalidRecord
from oncely.decode.schema import is_json, type_name
from oncely.decode.times import (
    is_too_fine,
    parse_date,
    parse_timestamp,
)

DEEPEST = 128
"""Maximum nesting of arrays and objects, the record's own object included."""
_MOST_SHOWN = 40  # characters of a record's content in a reason
MOST_DIGITS = 400  # of a whole number; DOUBLE ends at 309
EXACT = 1 << 53
"""Every whole number up to this one, and down to its negative, equals a DOUBLE."""
_STRINGS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""A text that is a decimal number, as SQL writes them."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
"""A number of JSON."""
_BRACKETS = re.compile(r"[][{}]+")
_INTEGERS: Mapping[pa.DataType, int] = {
    pa.int8(): 8,
    pa.int16(): 16,
    pa.int32(): 32,
    pa.int64(): 64,
}


class _NotJson(Exception):
    """Input that Python's scanner accepts and the JSON grammar does not."""


class Number(str):
    """A number in its original spelling."""

    __slots__ = ()


class Whole(Number):
    """A number without point and exponent."""

    __slots__ = ()


class JsonRules(NamedTuple):
    """Options of the rules of :class:`oncely.decode.json.JsonDecoder`.

    Attributes:
        strict: a STRING takes texts only.
        rounding: a TIMESTAMP takes more digits of a second than it keeps, and cuts them off.
    """

    strict: bool = True
    rounding: bool = False


_STRICT = JsonRules()


def read_record(
    data: bytes | None, schema: pa.Schema, *, what: str = "value", rules: JsonRules = _STRICT
) -> dict[str, Any]:
    """Decode one record by the rules of :class:`oncely.decode.json.JsonDecoder`.

    Args:
        data: the record's bytes.
        schema: its columns.
        what: the name of these bytes in reasons, ``value`` or ``key``.
        rules: the options of the rules.

    Returns:
        Column name to a value that ``pyarrow.array`` accepts: dates as days, timestamps as
        microseconds since 1970, structs and maps as dicts.

    Raises:
        InvalidRecord: it is no row.
    """
    found = parse_object(data, what)
    return {field.name: _member(field, found, "", rules) for field in schema}


_BYTE_ORDER_MARK = "\ufeff"


def parse_object(data: bytes | None, what: str = "value") -> dict[str, Any]:
    """Parse strict JSON: one object, with numbers as texts.

    Raises:
        InvalidRecord: it is not.
    """
    found = parse_value(data, what)
    if not isinstance(found, dict):
        raise InvalidRecord(f"the {what} is not a JSON object but {show(found)}")
    return found


def parse_value(data: bytes | None, what: str) -> Any:
    """Parse strict JSON: one value of any kind, with numbers as texts.

    Raises:
        InvalidRecord: it is not.
    """
    if data is None:
        raise InvalidRecord(f"the {what} is null")
    text = utf8(data, what)
    if not text.strip(" \t\r\n"):
        raise InvalidRecord(f"the {what} is blank")
    if text.startswith(_BYTE_ORDER_MARK):
        raise InvalidRecord(f"the {what} begins with a byte order mark (EF BB BF)")
    if _too_deep(text):
        raise InvalidRecord(f"the {what} is nested more than {DEEPEST} deep")
    try:
        return _SCANNER.decode(text)
    except json.JSONDecodeError as error:
        problem = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        raise InvalidRecord(f"the {what} is not JSON: {problem}") from None
    except _NotJson as error:
        raise InvalidRecord(f"the {what} is not JSON: {error}") from None


def utf8(data: bytes, what: str) -> str:
    """Decode UTF-8.

    Raises:
        InvalidRecord: it is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise InvalidRecord(
            f"the {what} is not UTF-8: byte 0x{byte:02x} at {error.start}"
        ) from None


def nesting(text: str) -> int:
    """The nesting of the brackets of a text, ignoring those inside strings."""
    depth = deepest = 0
    for brackets in _BRACKETS.findall(_STRINGS.sub("", text)):
        for bracket in brackets:
            depth += 1 if bracket in "[{" else -1
            deepest = max(deepest, depth)
    return deepest


def _too_deep(text: str) -> bool:
    # The scanner is recursive, and its own limit depends on the caller's stack.
    return text.count("[") + text.count("{") > DEEPEST and nesting(text) > DEEPEST


def _no_constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, value in pairs:
        _check_text(name)
        _check_text(value)
    return dict(pairs)  # of a repeated key, the last wins


def _check_text(value: Any) -> None:
    """Refuse half a surrogate pair, which UTF-8 cannot encode. Objects were checked before."""
    if isinstance(value, list):
        for item in value:
            _check_text(item)
    elif type(value) is str and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            half = ord(value[error.start])
            raise _NotJson(f"\\u{half:04x} is half a surrogate pair") from None


_SCALARS = (bool, Number, Whole)
_SCANNER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_float=Number,
    parse_int=Whole,
    parse_constant=_no_constant,
)


def _member(field: pa.Field, members: Mapping[str, Any], at: str, rules: JsonRules) -> Any:
    path = f"{at}.{field.name}" if at else field.name
    value = members.get(field.name)
    if value is None and not field.nullable:
        found = "null" if field.name in members else "nothing"
        raise InvalidRecord(f"{path}: found {found}, but it is NOT NULL")
    if value is not None and is_json(field):
        return json_text(value)
    return read_value(field.type, value, path, rules)


def parse_json(data: bytes) -> Any:
    """Parse any JSON value that is UTF-8 and not nested too deeply, as :func:`parse_object` does.

    Raises:
        ValueError: it is not JSON by these rules.
    """
    try:
        found = _SCANNER.decode(data.decode())
        _check_text(found)
    except _NotJson as error:
        raise ValueError(str(error)) from None
    return found


def scalar(text: str) -> Any:
    """A text as the JSON scalar that it spells, or the text itself: ``"7"`` is a number."""
    if text in ("true", "false"):
        return text == "true"
    if _NUMBER.fullmatch(text):
        return Number(text) if set(text) & set(".eE") else Whole(text)
    return text


def json_text(value: Any) -> str:
    """A value of :func:`parse_object` as JSON without spaces; numbers keep their spelling."""
    match value:
        case None | bool():
            return json.dumps(value)
        case Number():
            return value
        case dict():
            members = (f"{json_text(name)}:{json_text(one)}" for name, one in value.items())
            return "{" + ",".join(members) + "}"
        case list():
            return "[" + ",".join(map(json_text, value)) + "]"
    return _quoted(value)


_quoted = json.JSONEncoder(ensure_ascii=False).encode


def read_value(arrow: pa.DataType, value: Any, path: str, rules: JsonRules = _STRICT) -> Any:
    """Convert a value from :func:`parse_object` for a column of a type; None stays None.

    Raises:
        InvalidRecord: it has another type; the reason begins with ``path``.
    """
    if value is None:
        return None
    if not rules.strict and pa.types.is_string(arrow) and type(value) in _SCALARS:
        return json_text(value)
    kinds, read = _READERS[arrow.id]
    found = None
    if type(value) in kinds:
        found = read(arrow, value, path, rules)
    if found is None:
        raise InvalidRecord(f"{path}: expected {type_name(arrow)}, found {show(value)}")
    return found


def _same(_: pa.DataType, value: Any, *__: object) -> Any:
    return value


def _integer(arrow: pa.DataType, value: Whole, path: str, _: JsonRules) -> int:
    number = int(value) if len(value) <= MOST_DIGITS else None
    limit = 1 << _INTEGERS[arrow] - 1
    if number is None or not -limit <= number < limit:
        raise InvalidRecord(f"{path}: {show(value)} is out of range of {type_name(arrow)}")
    return number


def _floating(arrow: pa.DataType, value: str, path: str, _: JsonRules) -> float | None:
    if type(value) is str:  # as a Kafka sink writes them
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
    try:
        # A whole number is treated as an integer first: -0 is 0, while -0.0 keeps its sign.
        whole = isinstance(value, Whole) and len(value) <= MOST_DIGITS
        number = float(int(value)) if whole else float(value)
        form = "<f" if pa.types.is_float32(arrow) else "<d"
        if math.isfinite(number):
            zero = struct.unpack(form, struct.pack(form, number))[0] == 0
            if not zero or not _DIGIT.search(value.lower().partition("e")[0]):
                return number
    except OverflowError:
        pass
    raise InvalidRecord(f"{path}: {show(value)} is out of range of {type_name(arrow)}")


_DIGIT = re.compile("[1-9]")


def _decimal(arrow: pa.DataType, value: str, path: str, _: JsonRules) -> Decimal | None:
    if type(value) is str and not _DECIMAL.fullmatch(value):
        return None
    try:
        sign, digits, exponent = Decimal(value).as_tuple()
    except InvalidOperation:  # an exponent beyond a machine word
        sign, digits, exponent = 0, (1,), MOST_DIGITS
    assert isinstance(exponent, int)  # noqa: S101 - JSON has no NaN
    significant = "".join(map(str, digits)).rstrip("0")
    exponent += len(digits) - len(significant) if significant else -exponent
    significant = significant.lstrip("0")
    if -exponent > arrow.scale or len(significant) + exponent > arrow.precision - arrow.scale:
        raise InvalidRecord(f"{path}: {show(value)} does not fit {type_name(arrow)} exactly")
    # Use the column's own scale, so that Arrow need not change it again.
    return Decimal(
        (sign, tuple(map(int, significant + "0" * (exponent + arrow.scale))), -arrow.scale)
    )


def _date(_: pa.DataType, value: str, *__: object) -> int | None:
    return parse_date(value)


def _timestamp(arrow: pa.DataType, value: str, path: str, rules: JsonRules) -> int | None:
    found = parse_timestamp(value, zoned=arrow.tz is not None)
    if found is not None and not rules.rounding and is_too_fine(value):
        raise InvalidRecord(
            f"{path}: {show(value)} has more digits than microseconds, which {type_name(arrow)}"
            ' keeps; sink.rounding = "allow" cuts them off'
        )
    return found


def _binary(_: pa.DataType, value: str, *__: object) -> bytes | None:
    try:
        return from_base64(value)
    except ValueError:
        return None


def from_base64(text: str) -> bytes:
    """Bytes of a BINARY text: RFC 4648 section 4, with padding, and only characters of its
    alphabet.

    Raises:
        ValueError: it is invalid.
    """
    data = binascii.a2b_base64(text, strict_mode=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("not canonical base64")
    return data


def _list(arrow: pa.DataType, value: list[Any], path: str, rules: JsonRules) -> list[Any]:
    inner = arrow.value_type
    return [read_value(inner, item, f"{path}[{index}]", rules) for index, item in enumerate(value)]


def _struct(
    arrow: pa.DataType, value: dict[str, Any], path: str, rules: JsonRules
) -> dict[str, Any]:
    return {field.name: _member(field, value, path, rules) for field in arrow}


def _map(arrow: pa.DataType, value: dict[str, Any], path: str, rules: JsonRules) -> dict[str, Any]:
    inner = arrow.item_type
    return {
        name: read_value(inner, item, f"{path}[{quote(name)}]", rules)
        for name, item in value.items()
    }


_READERS: Mapping[int, tuple[tuple[type, ...], Callable[..., Any]]] = {
    pa.string().id: ((str,), _same),
    pa.bool_().id: ((bool,), _same),
    **{arrow.id: ((Whole,), _integer) for arrow in _INTEGERS},
    pa.float32().id: ((Number, Whole, str), _floating),
    pa.float64().id: ((Number, Whole, str), _floating),
    pa.decimal128(1).id: ((Number, Whole, str), _decimal),
    pa.date32().id: ((str,), _date),
    pa.timestamp("us").id: ((str,), _timestamp),
    pa.binary().id: ((str,), _binary),
    pa.list_(pa.null()).id: ((list,), _list),
    pa.struct([]).id: ((dict,), _struct),
    pa.map_(pa.string(), pa.null()).id: ((dict,), _map),
}
"""By Arrow type id: the accepted types of JSON values, and a reader; the reader returns None for a
value that is not of the type."""


def show(value: Any) -> str:
    """A value as shown in a reason: short, ASCII, without control characters."""
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
    """A text as JSON writes it in ASCII, so that a NUL in it cannot damage the reject's own row."""
    more = len(text) - _MOST_SHOWN
    return json.dumps(text[:_MOST_SHOWN]) + (f" and {more} characters more" if more > 0 else "")
