"""The scope of a record: the values of a few plain members, read before all others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from oncely.decode.base import InvalidRecord
from oncely.decode.columns import Positions, read_each
from oncely.decode.reference import Number, Whole, parse_object, show

Scope = tuple[str | None, ...]
"""Each scope column's value in the form of :func:`scope_value`; None if there is none."""

LONGEST = 4_096
"""Maximum bytes of a value. It is part of keys and messages of Kafka, so its length is limited."""
_LIMIT = 1 << 63
_INT64 = Annotated[int, msgspec.Meta(ge=-_LIMIT, le=_LIMIT - 1)]


def scope_value(value: str | int | bool) -> str:
    """A value as part of a scope: its text, and its type unless it is a text.

    Texts are used unchanged. ``1`` and ``"1"`` are ``1::BIGINT`` and ``1::STRING``: no scope has
    the value ``1``.
    """
    if isinstance(value, bool):
        return f"{'true' if value else 'false'}::BOOLEAN"
    if isinstance(value, int):
        return f"{value}::BIGINT"
    return f"{value}::STRING" if _UNPLAIN.fullmatch(value) else value


def typed(texts: Sequence[str | None], columns: Sequence[str], schema: pa.Schema) -> Scope:
    """The scope of rows: the texts of the values in some columns, whose types are in the schema."""
    return tuple(map(partial(_typed, schema), columns, texts))


def is_untyped(scope: Scope) -> bool:
    """True if a value has no type, although :func:`scope_value` would have given it one."""
    return any(text and _UNTYPED.fullmatch(text) for text in scope)


def _typed(schema: pa.Schema, column: str, text: str | None) -> str | None:
    if text is None:
        return None
    arrow = schema.field(column).type if column in schema.names else pa.string()
    if pa.types.is_boolean(arrow):
        return scope_value(text == "true")
    return scope_value(int(text) if pa.types.is_integer(arrow) else text)


_UNTYPED = re.compile(r"-?[0-9]{1,19}|true|false")
_UNPLAIN = re.compile(_UNTYPED.pattern + r"|.*::(?:STRING|BIGINT|BOOLEAN)", re.DOTALL)


class Scoped(NamedTuple):
    """The scopes of some records.

    Attributes:
        scopes: the distinct scopes, in order of their first records.
        codes: for each record the index of its scope, -1 if it has none.
        refused: the reasons of records without a scope, by their index.
    """

    scopes: list[Scope]
    codes: Positions
    refused: dict[int, str]


@dataclass(frozen=True)
class ScopeReader:
    """Reads scopes of JSON records.

    A text, a whole number of 64 bits, true and false are values; a missing member and null are
    None. A record with any other value has no scope.
    """

    columns: tuple[str, ...]

    def read(self, values: pa.Array) -> Scoped:
        """The scopes of a slice of binary or large_binary."""
        if not self.columns:
            return Scoped([()], np.zeros(len(values), np.int64), {})
        data = values.to_pylist()
        try:
            rows, good = list(map(self._fast, data)), np.arange(len(data))
            refused: dict[int, str] = {}
        except Exception:  # for any error, each record is read alone
            rows, good, refused = read_each(data, self._one)
        scopes, of_row = _coded(rows)
        codes = np.full(len(data), -1, np.int64)
        codes[good] = of_row
        for code, scope in enumerate(scopes):
            longest = max((len(text.encode()) for text in scope if text), default=0)
            if longest > LONGEST:
                why = f"a partition's value has {longest:,} bytes; it may have {LONGEST:,} bytes"
                refused.update(dict.fromkeys(np.flatnonzero(codes == code).tolist(), why))
        codes[list(refused)] = -1
        return Scoped(scopes, codes, refused)

    @cached_property
    def _fast(self) -> Callable[[bytes | None], tuple[Any, ...]]:
        slots = [(f"f{i}", str | _INT64 | bool | None, None) for i in range(len(self.columns))]
        names = {f"f{index}": name for index, name in enumerate(self.columns)}
        # ValueError for a name with a quote, backslash or control character in it
        row = msgspec.defstruct("Scope", slots, rename=names, kw_only=True, gc=False)
        decode, values = msgspec.json.Decoder(row).decode, msgspec.structs.astuple
        return lambda record: values(decode(record))  # type: ignore[arg-type]

    def _one(self, record: bytes | None) -> tuple[Any, ...]:
        try:
            return self._fast(record)
        except Exception:  # the reference decides
            members = parse_object(record)
        return tuple(_read(name, members.get(name)) for name in self.columns)


def _read(name: str, value: Any) -> Any:
    if value is None or type(value) is str or isinstance(value, bool):
        return value
    if isinstance(value, Whole):
        number = int(value) if len(value) <= 20 else _LIMIT
        if -_LIMIT <= number < _LIMIT:
            return number
        raise InvalidRecord(f"{name}: {show(value)} is out of range of BIGINT")
    kind = "a number with a point or exponent, " if isinstance(value, Number) else ""
    raise InvalidRecord(
        f"{name}: files are partitioned by texts, whole numbers and booleans, found "
        f"{kind}{show(value)}"
    )


def _coded(rows: list[tuple[Any, ...]]) -> tuple[list[Scope], Positions]:
    """The distinct scopes of rows of values, and the index of each row's scope."""
    keys = rows
    if not set(map(type, chain.from_iterable(rows))) <= {str, type(None)}:
        keys = [(*map(type, row), *row) for row in rows]  # 1 equals True
    codes: dict[tuple[Any, ...], int] = {}
    of_row = [codes.setdefault(key, len(codes)) for key in keys]
    width = len(rows[0]) if rows else 0
    scopes = [tuple(map(_text, key[-width:])) for key in codes]
    return scopes, np.array(of_row, np.int64)


def _text(value: str | int | bool | None) -> str | None:
    return None if value is None else scope_value(value)
