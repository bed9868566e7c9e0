"""Digests of rows: 64 bits that PostgreSQL computes from a table, and numpy from Arrow columns.

The digest of a range is the sum of its rows' digests modulo 2^64. It does not depend on their
order, and a row that is there twice changes it (under XOR it would cancel itself). It is built of
PostgreSQL's own hash functions, which are the same in every version since 11, so that a database
recomputes it where the rows are:

| what | digest |
|---|---|
| constant of a column | ``k = hashtextextended(name, 0)`` |
| value of a column | by kind, see :data:`KINDS`; 0 for NULL, as if there were no such column |
| content of a row | XOR of its values: by their constants, values of two columns differ |
| row with a stored offset | ``hashint8extended(offset, content)`` |
| row without | ``hashint8extended(0, content)`` |

A :class:`Recipe` names the columns that a digest covers, and is stored beside it.

These functions fold a bigint into 32 bits, but accept a seed of 64. So a number of 64 bits is the
seed, and the column's constant is the argument. Instants and times are arguments: the functions of
their types accept ``infinity``, and intervals between instants that fold alike are no whole number
of milliseconds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
State = tuple[UInt32, UInt32 | np.uint32, UInt32 | np.uint32]

VERSION = "1"
STORED = "stored"
"""The kind of values that the server casts, pads or rounds, of which a writer doesn't know the
server's text. Audits compute it; no ledger has such digests."""

LONGEST = 240
"""Bytes of text that are hashed as they are; longer values are replaced by the hexadecimal text of
their SHA-256. Bytes are hashed as hexadecimal text, so of these half as many."""

_BLOCK = 131_072  # values: larger blocks cost memory, smaller ones calls of numpy
_BASE = (0x9E3779B9 + 3923095) & 0xFFFFFFFF
_EPOCH_2000 = 946_684_800_000_000  # microseconds from 1970 to PostgreSQL's epoch
_SHORT_DECIMAL = 18  # digits that a bigint holds
_LONG_DECIMAL = 38  # digits of Arrow's decimal128


class Kind(NamedTuple):
    """The way in which the values of a column are hashed.

    Attributes:
        name: a key of :data:`KINDS`.
        scale: digits after the point of decimals.
    """

    name: str
    scale: int = 0

    def __str__(self) -> str:
        return f"{self.name}{self.scale}" if self.name in _SCALED else self.name

    @classmethod
    def parse(cls, text: str) -> Kind:
        """The kind of a recipe's text.

        Raises:
            ValueError: there is no such kind.
        """
        found = _KIND.fullmatch(text)
        if not found or found[1] not in KINDS or bool(found[2]) != (found[1] in _SCALED):
            raise ValueError(f"not a kind of column: {text!r}")
        return cls(found[1], int(found[2] or 0))


_SCALED = ("decimal", "numeric")
_KIND = re.compile(r"([a-z]+?)(\d+)?")


@dataclass(frozen=True)
class Recipe:
    """The columns that a digest covers; stored as text.

    Attributes:
        columns: name and kind of each, in order of name.
        offset: a row's offset is part of its digest.
    """

    columns: tuple[tuple[str, Kind], ...]
    offset: bool

    @classmethod
    def of(cls, kinds: Mapping[str, Kind | None], *, offset: bool) -> Recipe:
        """The recipe of the columns that have a kind."""
        return cls(tuple(sorted((name, one) for name, one in kinds.items() if one)), offset)

    def __str__(self) -> str:
        columns = (f"{quote(name, safe='')}={kind}" for name, kind in self.columns)
        return " ".join([VERSION, "offset" if self.offset else "row", *columns])

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """The recipe of a stored text.

        Raises:
            ValueError: it is of a later version, or no recipe.
        """
        version, form, *columns = text.split(" ") if text.count(" ") else ("", "")
        if version != VERSION or form not in ("offset", "row"):
            raise ValueError(f"not a recipe of version {VERSION}: {text!r}")
        pairs = (one.rpartition("=") for one in columns)
        return cls(
            tuple((unquote(name), Kind.parse(kind)) for name, _, kind in pairs), form == "offset"
        )


def kind_of(arrow_type: pa.DataType) -> Kind | None:
    """The kind of columns that hold values of an Arrow type; None: the digest can't cover them."""
    types = pa.types
    if types.is_dictionary(arrow_type):
        return kind_of(arrow_type.value_type)
    if types.is_decimal(arrow_type):
        precision, scale = int(arrow_type.precision), int(arrow_type.scale)
        if scale < 0 or precision > _LONG_DECIMAL:
            return None
        return Kind("decimal" if precision <= _SHORT_DECIMAL else "numeric", scale)
    if types.is_timestamp(arrow_type):
        if arrow_type.unit == "ns":
            return None
        return Kind("instant" if arrow_type.tz else "timestamp")
    found = next((name for name, fits in _KIND_OF if fits(arrow_type)), None)
    return Kind(found) if found else None


_KIND_OF: tuple[tuple[str, Callable[[pa.DataType], bool]], ...] = (
    ("boolean", pa.types.is_boolean),
    (
        "integer",
        lambda t: pa.types.is_integer(t) and t.bit_width <= 32 and t != pa.uint32(),
    ),
    ("bigint", lambda t: pa.types.is_integer(t) and t != pa.uint64()),
    ("float", pa.types.is_floating),
    ("text", lambda t: pa.types.is_string(t) or pa.types.is_large_string(t)),
    ("bytes", lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t)),
    ("date", pa.types.is_date32),
    ("time", lambda t: pa.types.is_time(t) and t != pa.time64("ns")),
)


# -- digests of rows -------------------------------------------------------------------------


def row_digests(
    rows: pa.Table, offsets: npt.NDArray[np.integer[Any]] | None, recipe: Recipe
) -> UInt64:
    """The digest of each row.

    Args:
        rows: the covered columns, and perhaps others, in types of their kinds.
        offsets: the offset of each row's record; required if the recipe contains it.

    Raises:
        KeyError: a covered column is missing.
        pa.ArrowInvalid, pa.ArrowNotImplementedError: it has values that its kind can't hold.
    """
    content = row_contents(rows, recipe)
    out = np.empty(len(content), np.uint64)
    at = offsets_of(offsets, recipe)
    for start in range(0, len(content), _BLOCK):
        part = slice(start, start + _BLOCK)
        a, b, c = _begin(_FOUR, content[part])
        a += _folded(at[part]) if recipe.offset else np.uint32(0)
        out[part] = _final(a, b, c)
    return out


def offsets_of(offsets: npt.NDArray[np.integer[Any]] | None, recipe: Recipe) -> Int64:
    """The offsets that a recipe contains; empty if it contains none."""
    if not recipe.offset:
        return np.zeros(0, np.int64)
    if offsets is None:
        raise ValueError("the recipe contains the offset")
    return offsets.astype(np.int64, copy=False)


class Digests(NamedTuple):
    """The digests of some rows, and their recipe."""

    of_row: UInt64
    recipe: str


def digest_sum(digests: UInt64) -> int:
    """The digest of a range with these rows."""
    return int(np.add.reduce(digests, dtype=np.uint64))


def digest_sums(digests: UInt64, group: npt.NDArray[np.integer[Any]], groups: int) -> list[int]:
    """The digests of several ranges; ``group`` is the range of each row."""
    if groups == 1:
        return [digest_sum(digests)]
    sums = np.zeros(groups, np.uint64)
    np.add.at(sums, group, digests)
    return [int(one) for one in sums]


def row_contents(rows: pa.Table, recipe: Recipe) -> UInt64:
    """The content of each row: XOR of its values. Raises the errors of :func:`row_digests`."""
    content = np.zeros(rows.num_rows, np.uint64)
    if not recipe.columns:
        return content
    at, whole = 0, covered_columns(rows, recipe)
    constants = [column_constant(name) for name, _ in recipe.columns]
    kinds = [kind.name for _, kind in recipe.columns]
    size = max(1, min(_BLOCK // len(kinds), rows.num_rows))
    space = np.empty((5, len(kinds), size), np.uint32)
    for batch in whole.to_batches(max_chunksize=size):
        part = content[at : at + batch.num_rows]
        for hashed in _hash_columns(batch.columns, kinds, constants, space[..., : len(part)]):
            part ^= hashed
        at += batch.num_rows
    return content


def covered_columns(rows: pa.Table, recipe: Recipe) -> pa.Table:
    """The covered columns in the types of their kinds, named by their places in the recipe."""
    columns = []
    for name, kind in recipe.columns:
        column, wanted = rows.column(name), KINDS[kind.name].arrow(kind.scale)
        columns.append(column if column.type == wanted else column.cast(wanted))
    return pa.table(columns, names=[str(at) for at in range(len(columns))])


def _hash_columns(
    columns: Sequence[pa.Array], kinds: Sequence[str], constants: Sequence[int], space: UInt32
) -> UInt64:
    """The hash of each value, one line a column: the last step is made for all columns at once."""
    a, b, c = space[:3]
    for at, (column, kind, constant) in enumerate(zip(columns, kinds, constants, strict=True)):
        a[at], b[at], c[at] = KINDS[kind].state(column, constant)
    hashed = _final(a, b, c, space[3:])
    for at, (column, kind, constant) in enumerate(zip(columns, kinds, constants, strict=True)):
        if kind == "float":  # PostgreSQL does not hash zero, which may be negative
            hashed[at][_fixed(column, np.float64) == 0] = constant
        if column.null_count:
            hashed[at][column.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashed


# -- columns ---------------------------------------------------------------------------------


def _fixed(column: pa.Array, dtype: npt.DTypeLike, words: int = 1) -> npt.NDArray[Any]:
    """The first word of each value of fixed width, without a copy; those of nulls are undefined."""
    first, end = column.offset * words, (column.offset + len(column)) * words
    return np.frombuffer(column.buffers()[1], dtype)[first:end:words]


def _boolean(column: pa.Array, constant: int) -> State:
    return _integer(column.cast(pa.int32()), constant)


def _integer(column: pa.Array, constant: int) -> State:
    a, b, c = _state(4, constant)
    return _fixed(column, np.uint32) + a, b, c


def _bigint(column: pa.Array, constant: int) -> State:
    return _seeded_by(_fixed(column, np.uint64), constant)


def _decimal(column: pa.Array, constant: int) -> State:
    return _seeded_by(np.ascontiguousarray(_fixed(column, np.uint64, 2)), constant)


def _seeded_by(values: UInt64, constant: int) -> State:
    a, b, c = _begin(_FOUR, values)
    a += np.uint32(constant & 0xFFFFFFFF)
    return a, b, c


def _numeric(column: pa.Array, constant: int) -> State:
    """Arrow writes decimals near zero with an exponent."""
    texts = column.cast(pa.string())
    small = pc.match_substring(texts, "E").fill_null(False)
    if pc.any(small).as_py():
        plain = [format(one, "f") for one in column.filter(small).to_pylist()]
        texts = pc.replace_with_mask(texts, small, pa.array(plain, pa.string()))
    return _text(texts, constant)


def _float(column: pa.Array, constant: int) -> State:
    values = _fixed(column, np.float64)
    unknown = np.isnan(values)
    if unknown.any():
        values = np.where(unknown, np.nan, values)
    words = values.view("<u4")
    a, b, c = _state(8, constant)
    return words[::2] + a, words[1::2] + b, c


def _timestamp(column: pa.Array, constant: int) -> State:
    a, b, c = _state(4, constant)
    return _folded(_fixed(column, np.int64) - _EPOCH_2000) + a, b, c


def _time(column: pa.Array, constant: int) -> State:
    a, b, c = _state(4, constant)
    return _folded(_fixed(column, np.int64)) + a, b, c


def _text(column: pa.Array, constant: int) -> State:
    data, starts, lengths = _strings(column)
    long = np.flatnonzero(lengths > LONGEST)
    if len(long):
        data, starts, lengths = _shortened(data, starts, lengths, long, as_hex=True)
    return _texts(data, starts, lengths, constant)


def _bytes(column: pa.Array, constant: int) -> State:
    data, starts, lengths = _strings(column)
    long = np.flatnonzero(lengths > LONGEST // 2)
    if len(long):
        data, starts, lengths = _shortened(data, starts, lengths, long, as_hex=False)
    return _texts(_HEX.take(data).view(np.uint8), starts * 2, lengths * 2, constant)


_HEX = np.frombuffer("".join(f"{one:02x}" for one in range(256)).encode(), np.uint16)


def _strings(
    column: pa.Array,
) -> tuple[Bytes, Int64, Int64]:
    """The bytes of a column of texts, the start of each value in them, and the lengths."""
    _, offsets, data = column.buffers()
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    ends = np.frombuffer(offsets, width)[column.offset : column.offset + len(column) + 1]
    first, last = int(ends[0]), int(ends[-1])
    held = np.frombuffer(data, np.uint8)[first:last] if data is not None else _NO_BYTES
    starts = ends[:-1].astype(np.int64) - first
    return held, starts, np.diff(ends).astype(np.int64)


_NO_BYTES = np.zeros(0, np.uint8)


def _shortened(
    data: Bytes,
    starts: Int64,
    lengths: Int64,
    long: Int64,
    *,
    as_hex: bool,
) -> tuple[Bytes, Int64, Int64]:
    """The same with the SHA-256 of long values, appended to the bytes, in their place."""
    held = data.data
    digests = [hashlib.sha256(held[starts[row] : starts[row] + lengths[row]]) for row in long]
    found = [one.hexdigest().encode() if as_hex else one.digest() for one in digests]
    size = 64 if as_hex else 32
    starts, lengths = starts.copy(), lengths.copy()
    starts[long] = len(data) + size * np.arange(len(long))
    lengths[long] = size
    return np.concatenate([data, np.frombuffer(b"".join(found), np.uint8)]), starts, lengths


class _Column(NamedTuple):
    """A kind of columns.

    Attributes:
        arrow: the Arrow type of the values, by scale.
        state: for a column's constant ``k`` the state of each value's hash before its last step;
            a scalar if it is that of all values.
    """

    arrow: Callable[[int], pa.DataType]
    state: Callable[[pa.Array, int], State]


KINDS: Mapping[str, _Column] = {
    "boolean": _Column(lambda _: pa.bool_(), _boolean),
    "integer": _Column(lambda _: pa.int32(), _integer),
    "bigint": _Column(lambda _: pa.int64(), _bigint),
    "decimal": _Column(lambda scale: pa.decimal128(_SHORT_DECIMAL, scale), _decimal),
    "numeric": _Column(lambda scale: pa.decimal128(_LONG_DECIMAL, scale), _numeric),
    "float": _Column(lambda _: pa.float64(), _float),
    "text": _Column(lambda _: pa.string(), _text),
    "bytes": _Column(lambda _: pa.binary(), _bytes),
    "raw": _Column(lambda _: pa.large_binary(), _text),
    STORED: _Column(lambda _: pa.string(), _text),
    "date": _Column(lambda _: pa.date32(), _integer),
    "time": _Column(lambda _: pa.time64("us"), _time),
    "timestamp": _Column(lambda _: pa.timestamp("us"), _timestamp),
    "instant": _Column(lambda _: pa.timestamp("us", "UTC"), _timestamp),
}
"""The kinds of columns, and PostgreSQL's expression for a value ``v``:

| kind | hash |
|---|---|
| boolean, integer (32 bits), date (days since 1970) | ``hashint4extended(v, k)`` |
| bigint | ``hashint8extended(low half of k, v)`` |
| decimal (up to 18 digits) | the same of ``v * 10^scale`` |
| numeric (more digits) | text with all digits of the scale |
| float | ``hashfloat8extended(v, k)`` |
| text | ``hashtextextended(v COLLATE "C", k)``, see :data:`LONGEST` |
| bytes | as hexadecimal text |
| stored (every other type) | like text: the server's text of the value |
| raw (bytes of a Kafka record) | like text; not computed by PostgreSQL |
| time | ``time_hash_extended(v, k)`` |
| timestamp, instant | ``timestamp_hash_extended(v, k)``, instants in UTC |
"""


# -- PostgreSQL's hash functions ---------------------------------------------------------------


@lru_cache(4_096)
def column_constant(name: str) -> int:
    """``hashtextextended(name, 0)``."""
    data = np.frombuffer(name.encode(), np.uint8)
    return int(_final(*_texts(data, np.zeros(1, np.int64), np.array([len(data)]), 0))[0])


def _halves(values: npt.NDArray[Any]) -> tuple[UInt32, UInt32]:
    """The lower and the higher 32 bits of numbers of 64 bits, without a copy."""
    words = values.astype(values.dtype.newbyteorder("<"), copy=False).view("<u4")
    return words[0::2], words[1::2]


def _folded(values: Int64) -> UInt32:
    """The 32 bits that the hash function of bigint is given: an integer's own, if it fits."""
    low, high = _halves(values)
    folded = (high.view("<i4") >> np.int32(31)).view(np.uint32)
    folded ^= high
    folded ^= low
    return folded


def _rotate(x: UInt32, by: int, to: UInt32, rest: UInt32) -> None:
    np.left_shift(x, np.uint32(by), out=to)
    np.right_shift(x, np.uint32(32 - by), out=rest)
    np.bitwise_or(to, rest, out=to)


def _mix(a: UInt32, b: UInt32, c: UInt32) -> None:
    turned, rest = np.empty((2, *a.shape), np.uint32)
    for by in (4, 6, 8, 16, 19, 4):
        _rotate(c, by, turned, rest)
        a -= c
        a ^= turned
        c += b
        a, b, c = b, c, a


def _final(a: UInt32, b: UInt32, c: UInt32, space: UInt32 | None = None) -> UInt64:
    """The hash; ``space`` is two arrays of this shape, so that blocks need not allocate them."""
    turned, rest = np.empty((2, *a.shape), np.uint32) if space is None else space
    for by in (14, 11, 25, 16, 4, 14, 24):
        _rotate(b, by, turned, rest)
        c ^= b
        c -= turned
        a, b, c = b, c, a
    whole = a.astype(np.uint64)
    whole <<= np.uint64(32)
    whole |= b
    return whole


def _begin(length: npt.NDArray[Any], seed: UInt64) -> tuple[UInt32, UInt32, UInt32]:
    """The state for keys of these lengths in bytes; the shorter of both is repeated."""
    base = length.astype(np.uint32) + np.uint32(_BASE)
    low, high = _halves(seed)
    a, b = base + high, base + low
    c = np.empty_like(a)
    c[:] = base
    _mix(a, b, c)
    unseeded = seed == 0
    if unseeded.any():  # PostgreSQL does not mix then
        for one in (a, b, c):
            np.copyto(one, base, where=unseeded)
    return a, b, c


_FOUR = np.array([4])


@lru_cache(4_096)
def _state(length: int, seed: int) -> tuple[np.uint32, np.uint32, np.uint32]:
    a, b, c = _begin(np.array([length]), np.array([seed], np.uint64))
    return a[0], b[0], c[0]


@lru_cache(1_024)
def _states(seed: int) -> tuple[UInt32, UInt32, UInt32]:
    """The state for each length of a text."""
    return _begin(np.arange(LONGEST + 1), np.array([seed], np.uint64))


def _masks(word: int) -> UInt32:
    kept = np.clip(np.arange(13) - 4 * word, 0, 4)
    return np.array([(1 << 8 * int(one)) - 1 for one in kept], np.uint32)


_MASKS = [_masks(word) for word in range(3)]
"""By the number of bytes that are left, the bits of each word that belong to the text."""


def _texts(data: Bytes, starts: Int64, lengths: Int64, seed: int) -> tuple[UInt32, UInt32, UInt32]:
    """The state of ``hash_bytes_extended`` for texts of up to ``LONGEST`` bytes."""
    longest = int(lengths.max(initial=0))
    words = _words(data, dense=len(data) < 16 * len(lengths))
    a, b, c = state = tuple(one.take(lengths) for one in _states(seed))
    at, left = starts, lengths
    if longest >= 12:
        at, left = starts.copy(), lengths.copy()
        longer = np.flatnonzero(left >= 12)
        while len(longer):
            begin = at.take(longer)
            part = [one.take(longer) + words(begin + 4 * i) for i, one in enumerate(state)]
            _mix(*part)
            for one, mixed in zip(state, part, strict=True):
                one[longer] = mixed
            at[longer] += 12
            left[longer] -= 12
            longer = longer[left.take(longer) >= 12]
    for i, (one, mask) in enumerate(zip(state, _MASKS, strict=True)):
        if longest > 4 * i:
            word = words(at + 4 * i)
            word &= mask.take(left)
            np.add(one, word << np.uint32(8) if i == 2 else word, out=one)
    return a, b, c


def _words(data: Bytes, *, dense: bool) -> Callable[[Int64], UInt32]:
    """Reads the four bytes that begin at each of some places; beyond the end they are 0.

    If the places are ``dense``, all words are copied first: this is faster than reading unaligned
    ones.
    """
    padded = np.zeros(len(data) + 16, np.uint8)
    padded[: len(data)] = data
    words = np.ndarray((len(padded) - 3,), "<u4", padded.data, strides=(1,))
    return np.ascontiguousarray(words).take if dense else words.__getitem__
