"""Whose record is it: the values of a few plain members, before the rest is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.decode.reference import Number, Refused, Whole, parse_object, show

Scope = tuple[str | None, ...]
"""The text of each scope column's value; None where there is none."""
Codes = npt.NDArray[np.int64]

LONGEST = 4_096
"""Characters of a value. It stands in keys and messages of Kafka, so it can't have any length."""
_LIMIT = 1 << 63
_INT64 = Annotated[int, msgspec.Meta(ge=-_LIMIT, le=_LIMIT - 1)]


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

    A text counts as it is, a whole number of 64 bits as its decimal digits, true and false as
    these words; a missing member and null are None. Anything else has no scope.
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
            longest = max(map(len, filter(None, scope)), default=0)
            if longest > LONGEST:
                of = np.flatnonzero(codes == index).tolist()
                why = f"a partition's value has {longest} characters; it may have {LONGEST}"
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


def _texts(column: list[Any]) -> pa.Array:
    if not set(map(type, column)) <= {str, type(None)}:
        column = [None if value is None else _text(value) for value in column]
    return pa.array(column, pa.large_string())


def _text(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _together(columns: list[pa.Array]) -> tuple[list[Scope], Codes]:
    """The distinct tuples of some columns' values, and which each row has."""
    scopes: list[Scope] = [()]
    codes: Codes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        texts = encoded.dictionary.to_pylist()
        codes = codes * len(texts) + encoded.indices.to_numpy().astype(np.int64)
        used, codes = np.unique(codes, return_inverse=True)
        scopes = [
            (*scopes[before], texts[own])
            for before, own in (divmod(both, len(texts)) for both in used.tolist())
        ]
    return scopes, codes
