"""Whose record is it: the values of a few plain members, before the rest is looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.decode.reference import Number, Refused, Whole, parse_object, show

Scope = tuple[str | None, ...]
"""Each scope column's value as :func:`scope_value` writes it; None where there is none."""
Codes = npt.NDArray[np.int64]

LONGEST = 4_096
"""Bytes of a value. It stands in keys and messages of Kafka, so it can't have any length."""
_LIMIT = 1 << 63
_INT64 = Annotated[int, msgspec.Meta(ge=-_LIMIT, le=_LIMIT - 1)]


def scope_value(value: str | int | bool) -> str:
    """A value as it stands in a scope: its text, and its type unless that is plain to see.

    Texts stand as they are. ``1`` and ``"1"`` are ``1::BIGINT`` and ``1::STRING``. Earlier versions
    wrote ``1`` for both, so that no scope of today has such a value; see :func:`typed`.
    """
    if isinstance(value, bool):
        return f"{'true' if value else 'false'}::BOOLEAN"
    if isinstance(value, int):
        return f"{value}::BIGINT"
    return f"{value}::STRING" if _UNPLAIN.fullmatch(value) else value


def typed(texts: Sequence[str | None], columns: Sequence[str], schema: pa.Schema) -> Scope:
    """The scope of rows: the texts of the values in some columns, whose types the schema tells.

    Of a scope that an earlier version has written it makes the scope that its records have now.
    """
    return tuple(map(partial(_typed, schema), columns, texts))


def as_of_today(scope: Scope, columns: Sequence[str], schema: pa.Schema) -> Scope:
    """The scope that has taken the place of one that an earlier version may have written."""
    if len(scope) != len(columns):  # written with another sink.partition_by
        return scope
    told = zip(scope, typed(scope, columns, schema), strict=True)
    return tuple(now if text and _UNTYPED.fullmatch(text) else text for text, now in told)


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
        scopes: all that occur.
        codes: for each record the index of its scope, -1 when it has none.
        refused: why a record has none, by its index.
    """

    scopes: list[Scope]
    codes: Codes
    refused: dict[int, str]


@dataclass(frozen=True)
class ScopeReader:
    """Reads scopes of JSON records.

    A text, a whole number of 64 bits, true and false are values; a missing member and null are
    None. Anything else has no scope.
    """

    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        slots = [(f"f{i}", str | _INT64 | bool | None, None) for i in range(len(self.columns))]
        names = {f"f{index}": name for index, name in enumerate(self.columns)}
        try:
            row = msgspec.defstruct("Scope", slots, rename=names, kw_only=True, gc=False)
            decode = msgspec.json.Decoder(row).decode
        except ValueError:  # a name with a quote, backslash or control character in it
            decode = None
        object.__setattr__(self, "_decode", decode)

    def read(self, values: pa.Array) -> Scoped:
        """The scopes of a slice of binary or large_binary."""
        if not self.columns:
            return Scoped([()], np.zeros(len(values), np.int64), {})
        found, good, refused = self._found(values.to_pylist())
        codes = np.full(len(values), -1, np.int64)
        scopes, codes[good] = _together([_texts(column) for column in found])
        for index, scope in enumerate(scopes):
            longest = max((len(text.encode()) for text in scope if text), default=0)
            if longest > LONGEST:
                of = np.flatnonzero(codes == index).tolist()
                why = f"a partition's value has {longest:,} bytes; it may have {LONGEST:,} bytes"
                refused.update(dict.fromkeys(of, why))
        codes[list(refused)] = -1
        return Scoped(scopes, codes, refused)

    def _found(self, data: list[bytes | None]) -> tuple[list[list[Any]], Any, dict[int, str]]:
        """Each column's values, of which records, and why not of the others."""
        decode: Callable[[Any], Any] | None = vars(self)["_decode"]
        refused: dict[int, str] = {}
        rows: list[tuple[Any, ...]] = []
        try:
            assert decode is not None  # noqa: S101 - as good a reason as any to go one by one
            found = list(map(decode, data))
            return [[getattr(r, f"f{i}") for r in found] for i in range(len(self.columns))], ..., {}
        except Exception:  # whatever it is, each record is asked alone
            good = []
            for index, record in enumerate(data):
                try:
                    rows.append(self._one(decode, record))
                    good.append(index)
                except Refused as error:
                    refused[index] = str(error)
        return (
            [list(each) for each in zip(*rows, strict=True)] or [[] for _ in self.columns],
            (np.array(good, np.int64)),
            refused,
        )

    def _one(self, decode: Callable[[Any], Any] | None, record: bytes | None) -> tuple[Any, ...]:
        if decode is not None:
            try:
                return msgspec.structs.astuple(decode(record))
            except Exception:  # noqa: S110 - the reference says what is wrong, if anything is
                pass
        members = parse_object(record)
        return tuple(_read(name, members.get(name)) for name in self.columns)


def _read(name: str, value: Any) -> Any:
    if value is None or type(value) is str or isinstance(value, bool):
        return value
    if isinstance(value, Whole):
        number = int(value) if len(value) <= 20 else _LIMIT
        if -_LIMIT <= number < _LIMIT:
            return number
        raise Refused(f"{name}: {show(value)} is out of range of BIGINT")
    kind = "a number with a point or exponent, " if isinstance(value, Number) else ""
    raise Refused(
        f"{name}: files are parted by texts, whole numbers and booleans, found {kind}{show(value)}"
    )


def _texts(column: list[Any]) -> pa.DictionaryArray:
    """The values as they stand in scopes."""
    if set(map(type, column)) <= {str, type(None)}:
        encoded = pa.array(column, pa.large_string()).dictionary_encode(null_encoding="encode")
        texts = [None if text is None else scope_value(text) for text in _distinct(encoded)]
        return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(texts, pa.large_string()))
    column = [None if value is None else scope_value(value) for value in column]
    return pa.array(column, pa.large_string()).dictionary_encode(null_encoding="encode")


def _distinct(encoded: pa.DictionaryArray) -> list[str | None]:
    found: list[str | None] = encoded.dictionary.to_pylist()
    return found


def _together(columns: list[pa.DictionaryArray]) -> tuple[list[Scope], Codes]:
    """The distinct tuples of some columns' values, and which each row has."""
    scopes: list[Scope] = [()]
    codes: Codes = np.zeros(len(columns[0]), np.int64)
    for encoded in columns:
        texts = _distinct(encoded)
        codes = codes * len(texts) + encoded.indices.to_numpy().astype(np.int64)
        used, codes = np.unique(codes, return_inverse=True)
        scopes = [
            (*scopes[before], texts[own])
            for before, own in (divmod(both, len(texts)) for both in used.tolist())
        ]
    return scopes, codes
