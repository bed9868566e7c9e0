"""One JSON record and the columns that are known: what they become, and the record's row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from oncely.decode.merging import CannotMerge, Caps, Conflict, wider_number
from oncely.decode.reference import (
    MOST_DIGITS,
    Number,
    Refused,
    Whole,
    parse_object,
    read_value,
    show,
)
from oncely.decode.shapes import (
    BIGINT,
    BOOLEAN,
    DOUBLE,
    EXACT,
    FLOAT,
    INT,
    LARGE,
    NOTHING,
    STRING,
    Leaf,
    ListOf,
    Shape,
    Struct,
    settled,
    step,
)

_NATURAL: Mapping[type, Leaf] = {str: STRING, bool: BOOLEAN, Number: DOUBLE}
_INFERRED = (STRING, BOOLEAN, BIGINT, LARGE, DOUBLE)
_SHORT = 15  # digits; so many are below 2^53


class Grown(NamedTuple):
    """What a record leaves behind.

    Attributes:
        columns: what is known now; the same object when the record brought nothing new.
        row: name to what ``pyarrow.array`` takes; what is not known yet is left out.
        members: the record itself, numbers still texts.
    """

    columns: Struct
    row: dict[str, Any]
    members: dict[str, Any]


def grow(known: Struct, data: bytes | None, caps: Caps) -> Grown:
    """Read one record by the rules of :class:`oncely.decode.infer.InferringJson`.

    Raises:
        Refused: it is no row; then nothing has been learned from it.
    """
    members = parse_object(data)
    try:
        grown = settled(_members(known, members, ""), known)
        columns = grown.columns
        if columns is not known:
            caps.check(grown, known)
    except CannotMerge as error:
        raise Refused(str(error)) from None
    if not columns.fields:
        raise Refused("no member has a value to make a column of, and no column is known yet")
    return Grown(columns, _row(columns, members, ""), members)


def _members(known: Struct, members: Mapping[str, Any], path: str) -> Struct:
    changed: dict[str, Shape] = {}
    for name, value in members.items():
        if value is None:
            continue
        before = known.fields.get(name)
        after = _grow(before, value, step(path, name))
        if after is not before:
            changed[name] = after
    return Struct({**known.fields, **changed}, (known, changed)) if changed else known


def _grow(known: Shape | None, value: Any, path: str) -> Shape:
    kind = type(value)
    if kind is dict:
        if known is None or isinstance(known, Struct):
            return _members(known or NOTHING, value, path)
        raise Conflict(path, str(known), str(NOTHING))
    if kind is list:
        if known is None or isinstance(known, ListOf):
            return _items(known, value, path)
        raise Conflict(path, str(known), "ARRAY")
    natural = _whole(value) if kind is Whole else _NATURAL[kind]
    if known is None or known is natural:
        return natural
    if isinstance(known, Leaf):
        return _scalar(known, natural, value, path)
    raise Conflict(path, str(known), str(natural))


def _items(known: ListOf | None, values: list[Any], path: str) -> ListOf:
    before = item = known.item if known else None
    for index, value in enumerate(values):
        if value is not None:
            item = _grow(item, value, f"{path}[{index}]")
    return known if known and item is before else ListOf(item)


def _scalar(known: Leaf, natural: Leaf, value: Any, path: str) -> Leaf:
    if natural in (BIGINT, LARGE, DOUBLE):
        wider = known if _fits(known, natural, value) else wider_number(known, natural)
        if wider is not None:
            return wider
        if known is DOUBLE:
            raise Refused(f"{path}: {show(value)} does not fit DOUBLE exactly")
    if known not in _INFERRED:
        # A type of a schema that somebody wrote, before columns were inferred.
        read_value(known.arrow, value, path)
        return known
    raise Conflict(path, str(known), str(natural))


def _whole(value: Whole) -> Leaf:
    if len(value) <= _SHORT:
        return BIGINT
    number = int(value) if len(value) <= MOST_DIGITS else None
    return BIGINT if number is not None and abs(number) <= EXACT else LARGE


def _fits(known: Leaf, natural: Leaf, value: Number) -> bool:
    """Whether a number keeps its value in a column of a known type of numbers."""
    if natural is DOUBLE:
        return known in (FLOAT, DOUBLE)
    number = int(value) if len(value) <= MOST_DIGITS else None
    if known is INT:
        return number is not None and -(1 << 31) <= number < 1 << 31
    if known not in (FLOAT, DOUBLE) or number is None:
        return False
    try:
        return int(np.float32(number) if known is FLOAT else float(number)) == number
    except OverflowError:
        return False


def _row(columns: Struct, members: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The members that have a place, in order of the record: it may have few of many columns."""
    fields = columns.fields
    return {
        name: _value(fields[name], value, step(path, name))
        for name, value in members.items()
        if value is not None and name in fields
    }


def _value(shape: Shape | None, value: Any, path: str) -> Any:
    if value is None:
        return None
    if isinstance(shape, Struct):
        return _row(shape, value, path)
    if isinstance(shape, ListOf):
        return [_value(shape.item, item, f"{path}[{i}]") for i, item in enumerate(value)]
    return None if shape is None else read_value(shape.arrow, value, path)
