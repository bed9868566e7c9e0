"""Casting of rows to the table's types; a value that does not fit is reported with its row.

NUL characters, which text columns do not accept, are detected before rows are sent. PostgreSQL
refuses a NUL in any text, and the escape ``\\u0000`` in jsonb, and names no row if the value is
cast by the server. SQLite accepts a NUL, but its functions end the text there.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import isolated
from oncely.decode.times import YEARS, require_text
from oncely.stores.sql.connection import ColumnFit, Longest


def cast_rows(rows: pa.Table, fits: Sequence[ColumnFit]) -> tuple[pa.Table, dict[int, str]]:
    """Cast every column to its fit.

    Returns:
        The table, in which a value that could not be cast is null, and the reason for each row with
            such a value. The caller rejects those rows and must not write them.
    """
    bad: dict[int, str] = {}
    columns = [_without_nul(_isolated(rows.column(fit.name), fit, bad), fit, bad) for fit in fits]
    return pa.table(columns, names=[fit.name for fit in fits]), bad


def _isolated(column: pa.ChunkedArray, fit: ColumnFit, bad: dict[int, str]) -> pa.ChunkedArray:
    """Cast a column; values for which a conversion raises are null, with the reason in ``bad``."""

    def part(start: int, stop: int) -> pa.ChunkedArray:
        own: dict[int, str] = {}
        done = _cast(column.slice(start, stop - start), fit, own)
        for row, reason in own.items():
            bad.setdefault(start + row, reason)
        return done

    parts, refused = isolated(part, len(column), (ValueError,))
    for row, error in refused.items():
        parts.append((row, pa.chunked_array([pa.nulls(1, fit.arrow_type)])))
        bad.setdefault(row, f"column {fit.name!r}: {error}")
    chunks = [chunk for _, one in sorted(parts, key=itemgetter(0)) for chunk in one.chunks]
    return pa.chunked_array(chunks, None if chunks else fit.arrow_type)


def _cast(column: pa.ChunkedArray, fit: ColumnFit, bad: dict[int, str]) -> pa.ChunkedArray:
    if fit.scale is not None:
        column = _without_rounding(column, fit, fit.scale, bad)
    if fit.longest is not None:
        column = _not_cut_off(column, fit, fit.longest, bad)
    if column.type == fit.arrow_type:
        return column
    if pa.types.is_nested(column.type) and pa.types.is_string(fit.arrow_type):
        if (fit.cast or "").endswith("[]"):
            return pa.chunked_array([_as_array(column)], pa.string())
        # SQLite's texts keep the form of which there are digests; a jsonb has none.
        exact = fit.cast is not None and _holds_decimals(column.type)
        write = _json_with_decimals if exact else _json
        return pa.chunked_array([_as_json(column, fit.name, bad, write)], pa.string())
    return cast_values(column, fit, bad)


def cast_values(column: pa.ChunkedArray, fit: ColumnFit, bad: dict[int, str]) -> pa.ChunkedArray:
    """Cast by Arrow; a value that cannot be cast is null, and its row and reason are in ``bad``.

    Raises:
        pa.ArrowNotImplementedError: the column's type cannot be cast.
    """
    if _element(fit.arrow_type) == pa.float32() and _element(column.type) == pa.float64():
        column = _without_overflow(column, fit, bad)
    try:
        return column.cast(fit.arrow_type)
    except pa.ArrowInvalid:
        return _cast_one_by_one(column, fit, bad)


def _element(arrow: pa.DataType) -> pa.DataType:
    return arrow.value_type if pa.types.is_list(arrow) else arrow


def _without_overflow(
    column: pa.ChunkedArray, fit: ColumnFit, bad: dict[int, str]
) -> pa.ChunkedArray:
    """Refuse a double outside the range of real, which Arrow would turn into infinity or zero."""
    doubles = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    real = doubles.cast(pa.float32())
    lost = pc.or_(
        pc.and_(pc.is_inf(real), pc.is_finite(doubles)),
        pc.and_(pc.equal(real, 0), pc.not_equal(doubles, 0)),
    )
    return _refused(
        column, _reasons(column, fit, [(lost, "a number is out of range for real")]), bad
    )


def _without_rounding(
    column: pa.ChunkedArray, fit: ColumnFit, scale: int, bad: dict[int, str]
) -> pa.ChunkedArray:
    """Refuse floats with more digits than the column keeps, which the server would round."""
    within = not pa.types.is_floating(column.type)
    floats = pc.list_flatten(column) if within else column
    lost = pc.indices_nonzero(would_round(floats, scale))
    if not len(lost):
        return column
    rows = pc.list_parent_indices(column).take(lost) if within else lost
    for at, row in zip(lost.to_pylist(), rows.to_pylist(), strict=True):
        bad.setdefault(
            row,
            f"column {fit.name!r}: {floats[at].cast(pa.string())} would be rounded to {fit.cast};"
            ' sink.rounding = "allow" permits it',
        )
    return _null_at(column, rows.to_numpy())


def _without_nul(column: pa.ChunkedArray, fit: ColumnFit, bad: dict[int, str]) -> pa.ChunkedArray:
    """Refuse texts with NUL, for which the database may not report the row."""
    return _refused(column, rows_with_nul(column, fit), bad)


def _not_cut_off(
    column: pa.ChunkedArray, fit: ColumnFit, longest: Longest, bad: dict[int, str]
) -> pa.ChunkedArray:
    """Refuse texts of which the database would keep a part without an error."""
    texts = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    texts = texts.cast(pa.string())
    length = pc.binary_length if longest.unit == "bytes" else pc.utf8_length
    cut = pc.greater(length(texts), longest.length)
    if longest.spaces and pc.any(cut).as_py():
        cut = pc.and_(cut, pc.less_equal(length(pc.utf8_rtrim(texts, " ")), longest.length))
    what = "spaces at the end of a text" if longest.spaces else "the rest of a text"
    reason = f"{longest.type} keeps {longest.length} {longest.unit}, and {what} would be cut off"
    return _refused(column, _reasons(column, fit, [(cut, reason)]), bad)


def _refused(
    column: pa.ChunkedArray, found: Mapping[int, str], bad: dict[int, str]
) -> pa.ChunkedArray:
    """The column without the values of some rows, whose reasons are added to ``bad``."""
    for row, reason in found.items():
        bad.setdefault(row, reason)
    return _null_at(column, np.array(list(found))) if found else column


def _null_at(column: pa.ChunkedArray, rows: np.ndarray) -> pa.ChunkedArray:
    keep = pa.array(~np.isin(np.arange(len(column)), rows))
    return pc.if_else(keep, column, pa.scalar(None, column.type))


def would_round(floats: pa.ChunkedArray, scale: int) -> pa.ChunkedArray:
    """True for floats with more than ``scale`` digits after the point, in their shortest text.

    A float that equals the float next to its own rounded value has no more. This is computed for
    all at once, and for the others the text is checked: far from zero the arithmetic of doubles is
    not exact.
    """
    wide = floats.cast(pa.float64())
    small = pc.less(pc.abs(pc.multiply(wide, 10.0 ** max(scale, 0))), _EXACT)
    rounded = pc.round(pc.if_else(small, wide, 0.0), scale)  # for larger values it overflows
    exact = pc.and_(small, pc.equal(rounded.cast(floats.type, safe=False), floats))
    unsure = pc.indices_nonzero(pc.invert(exact).fill_null(False)).to_numpy()
    found = np.zeros(len(floats), dtype=bool)
    texts = floats.take(pa.array(unsure)).cast(pa.string()).to_pylist()
    found[unsure] = [_digits(text) > scale for text in texts]
    return pa.chunked_array([pa.array(found)])


_EXACT = 2.0**49


def _digits(text: str) -> int:
    """The number of digits after the point without trailing zeros; 0 for NaN and infinity."""
    number = decimal.Decimal(text)
    if not number.is_finite() or not number:
        return -_NO_DIGITS
    return -int(number.normalize().as_tuple().exponent)


_NO_DIGITS = 1_000


def _cast_one_by_one(
    column: pa.ChunkedArray, fit: ColumnFit, bad: dict[int, str]
) -> pa.ChunkedArray:
    """The slow path, used only if a value of the chunk does not fit."""
    good = []
    for row, value in enumerate(column):
        try:
            value.cast(fit.arrow_type)
        except pa.ArrowInvalid:
            bad.setdefault(row, f"column {fit.name!r}: {_short(value)} is not {fit.arrow_type}")
            good.append(False)
        else:
            good.append(True)
    return pc.if_else(pa.array(good), column, pa.scalar(None, column.type)).cast(fit.arrow_type)


def _short(value: pa.Scalar) -> str:
    text = str(value.cast(pa.string()) if pa.types.is_temporal(value.type) else value)
    return text if len(text) <= 60 else text[:59] + "…"


def _as_array(column: pa.ChunkedArray) -> pa.Array:
    """PostgreSQL's array literals, every element between quotes."""
    texts: list[str | None] = []
    for chunk in column.chunks:
        elements = _texts(chunk.flatten())
        quoted = iter("NULL" if e is None else f'"{_ESCAPED.sub(_ESCAPE, e)}"' for e in elements)
        texts += [
            None if length is None else "{" + ",".join(islice(quoted, length)) + "}"
            for length in pc.list_value_length(chunk).to_pylist()
        ]
    return pa.array(texts, pa.string())


def _texts(values: pa.Array) -> list[str | None]:
    if pa.types.is_binary(values.type):
        return [None if one is None else f"\\x{one.hex()}" for one in values.to_pylist()]
    if pa.types.is_temporal(values.type):
        require_text(values)
    return values.cast(pa.string()).to_pylist()  # type: ignore[no-any-return]


def as_text(column: pa.ChunkedArray) -> list[str | None]:
    """Values that were cast to a fit as PostgreSQL's input of them."""
    found = _as_array(column) if pa.types.is_list(column.type) else column.cast(pa.string())
    return found.to_pylist()  # type: ignore[no-any-return]


_ESCAPED, _ESCAPE = re.compile(r'(["\\])'), r"\\\1"


def _as_json(
    column: pa.ChunkedArray, name: str, bad: dict[int, str], write: Callable[[object], str]
) -> pa.Array:
    texts: list[str | None] = []
    try:
        values = column.to_pylist(maps_as_pydicts="lossy")
    except (OverflowError, ValueError):
        raise ValueError(f"JSON has no {YEARS.removeprefix('a ')}") from None
    for row, value in enumerate(values):
        try:
            texts.append(None if value is None else write(value))
        except ValueError:
            bad.setdefault(row, f"column {name!r}: JSON has no NaN and no infinity")
            texts.append(None)
    return pa.array(texts, pa.string())


def _json(value: object) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _json_with_decimals(value: object) -> str:
    """As :func:`_json`, with decimals as numbers of all their digits, which json.dumps can't
    write."""
    match value:
        case dict():
            members = (f"{_json(_key(k))}: {_json_with_decimals(v)}" for k, v in value.items())
            return "{" + ", ".join(members) + "}"
        case list():
            return "[" + ", ".join(map(_json_with_decimals, value)) + "]"
        case decimal.Decimal():
            return format(value, "f")
    return _json(value)


def _holds_decimals(arrow: pa.DataType) -> bool:
    if pa.types.is_nested(arrow):
        fields = (arrow.field(at) for at in range(arrow.num_fields))
        return any(_holds_decimals(field.type) for field in fields)
    return bool(pa.types.is_decimal(arrow))


def _plain(value: object) -> object:
    """The value in JSON's types; map keys, which are texts in JSON, too."""
    if isinstance(value, dict):
        return {k if isinstance(k, str) else _key(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _key(key: object) -> str:
    plain = _plain(key)
    return plain if isinstance(plain, str) else _json(plain)


# -- nUL characters ------------------------------------------------------------------------


_NUL = "\x00"
# An even number of backslashes before it: an escaped backslash and the text u0000 is no NUL.
_ESCAPED_NUL = r"(?:^|[^\\])(?:\\\\)*\\u0000"


def rows_with_nul(column: pa.ChunkedArray, fit: ColumnFit) -> dict[int, str]:
    """The rows whose value contains a NUL, and the reason for each; empty for columns of other
    types.

    Args:
        column: cast to the fit's type already.
        fit: shows if the server casts the text to jsonb.
    """
    texts = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    if not pa.types.is_string(texts.type):
        return {}
    found = []
    if any(_has_zero_byte(chunk) for chunk in texts.chunks):
        found.append((pc.match_substring(texts, _NUL), "a text contains a NUL (0x00)"))
    if fit.cast == "jsonb":
        escaped = pc.match_substring_regex(texts, _ESCAPED_NUL)
        reason = r"jsonb accepts no NUL (0x00), and the JSON contains the escape \u0000"
        found.append((escaped, reason))
    return _reasons(column, fit, found)


def _reasons(
    column: pa.ChunkedArray, fit: ColumnFit, found: Sequence[tuple[pa.ChunkedArray, str]]
) -> dict[int, str]:
    """A reason for each row of the column in which a value matches."""
    reasons: dict[int, str] = {}
    for matches, reason in found:
        rows = pc.indices_nonzero(matches.fill_null(False))
        rows = pc.list_parent_indices(column).take(rows) if pa.types.is_list(column.type) else rows
        for row in rows.to_pylist():
            reasons.setdefault(row, f"column {fit.name!r}: {reason}")
    return reasons


def _has_zero_byte(texts: pa.StringArray) -> bool:
    """Search the bytes of all texts at once: a tenth of the time of matching each text."""
    _, offsets, data = texts.buffers()
    if not len(texts) or data is None:
        return False
    ends = np.frombuffer(offsets, np.int32)
    first, last = ends[texts.offset], ends[texts.offset + len(texts)]
    return not np.frombuffer(data, np.uint8)[first:last].all()
