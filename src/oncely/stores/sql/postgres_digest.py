"""Digests of rows computed by PostgreSQL: the expressions of a recipe.

Used with :mod:`oncely.core.digest`, whose functions are PostgreSQL's own. An expression never
fails, whatever the table contains: a value that no value of the recipe's kind can equal, such as
``infinity``, a fourth digit after the point, has another hash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from oncely.core.digest import LONGEST, STORED, Kind, Recipe, column_constant, kind_of
from oncely.stores.sql.connection import BadData, Column, ColumnFit, Connection
from oncely.stores.sql.postgres_types import SET_TEXTS, uncut

_TYPMOD = re.compile(r"\((\d+)(?:,(-?\d+))?\)")

COMPUTES = (
    "SELECT getdatabaseencoding() = 'UTF8'"
    " AND hashtextextended('hash' COLLATE \"C\", 0) = -3183078533357396668"
    " AND hashint8extended(1::bigint, 2::bigint) = 7177384568905846752"
)
"""True if the server computes the same digests: texts are UTF-8, and it is little-endian."""


def digest_kind(column: Column, fit: ColumnFit) -> Kind | None:
    """The kind of a column's values in digests; None: they are not covered.

    The server casts, rounds or pads the values of the others.
    """
    base = _base(column.type)
    rounds = fit.rounds and base != "real"  # for real, values are rounded before they are sent
    if fit.cast is not None or rounds or base == "character":
        return None
    return kind_of(fit.arrow_type)


def stored_texts(
    connection: Connection, type_: str, texts: Sequence[str | None]
) -> list[str | None]:
    """Values as the texts of a column of this type; None for one that the server refuses.

    They are not cast to the type of a column that cuts texts off: a text of which the column holds
    a part differs from it.

    Args:
        connection: without an open transaction.
        type_: of the column.
        texts: the values as a writer sends them.
    """
    value = f"CAST(v AS {(whole := uncut(type_))})"
    if whole == "bpchar[]":  # its texts show how many spaces an element was padded with
        padded = f"CAST(v AS {type_})"
        value = f"CASE WHEN {value} = {padded} THEN {padded} ELSE {value} END"
    connection.defer("BEGIN READ ONLY")
    connection.defer(SET_TEXTS)
    try:
        rows = connection.query(
            f"SELECT ({value})::text FROM unnest(%s::text[]) WITH ORDINALITY AS t (v, n)"
            " ORDER BY n",
            (list(texts),),
            of_rows=True,
        )
        return [one for (one,) in rows]
    except BadData:
        if len(texts) == 1:
            return [None]
    finally:
        connection.rollback()
    half = len(texts) // 2
    return [
        *stored_texts(connection, type_, texts[:half]),
        *stored_texts(connection, type_, texts[half:]),
    ]


class NotComputable(Exception):
    """A column is missing, or its present type can't hold the values of the recipe."""


def row_digest(
    recipe: Recipe, types: Mapping[str, str], quote: Callable[[str], str], offset: str | None
) -> str:
    """The expression of a row's digest, a bigint.

    Their sum modulo 2^64 is the digest of a range: ``SUM`` returns a numeric, without overflow.

    Args:
        recipe: the columns.
        types: the present type of each column, as ``format_type`` names it.
        quote: quotes a column's name for a statement.
        offset: the column of the offset; used if the recipe contains it.

    Raises:
        NotComputable: naming the column.
    """
    values = []
    for name, kind in recipe.columns:
        if name not in types:
            raise NotComputable(f"column {name!r} is missing")
        given = _Given(quote(name), kind.scale, *_of_type(types[name]), _constants(name))
        if kind.name != STORED and given.base not in _TYPES.get(kind.name, ()):
            raise NotComputable(f"column {name!r} is {types[name]}, and was {kind.name}")
        values.append(f"COALESCE({_EXPRESSIONS[kind.name](given)}, 0)")
    if recipe.offset and offset is None:
        raise NotComputable("the rows have no offset")
    at = quote(offset) if recipe.offset and offset else "0"
    return f"hashint8extended({at}::bigint, {' # '.join(values) or '0::bigint'})"


class _Constants(NamedTuple):
    """A column's constant, and its lower half, as SQL."""

    whole: str
    low: str


class _Given(NamedTuple):
    """A column: its quoted name, the scale of its kind, and its present type."""

    v: str
    kept: int
    base: str
    precision: int | None
    scale: int | None
    k: _Constants


def _constants(name: str) -> _Constants:
    whole = column_constant(name)
    signed = whole - (1 << 64) if whole >> 63 else whole
    return _Constants(f"'{signed}'::bigint", f"{whole & 0xFFFFFFFF}::bigint")


def _base(type_: str) -> str:
    return _TYPMOD.sub("", type_)


def _of_type(type_: str) -> tuple[str, int | None, int | None]:
    found = _TYPMOD.search(type_)
    precision = int(found[1]) if found else None
    return _base(type_), precision, int(found[2] or 0) if found else None


def _text(expression: str, k: str) -> str:
    return f'hashtextextended({expression} COLLATE "C", {k})'


def _decimal(of: _Given) -> str:
    """Out of range, NaN and more digits than the scale's: hashed as text."""
    most = f"{10**18 - 1}e-{of.kept}::numeric"
    fits = f"{of.v} BETWEEN -({most}) AND {most}"
    if of.scale is None or of.scale > of.kept:
        fits += f" AND {of.v} = trunc({of.v}, {of.kept})"
    unscaled = f"({of.v} * {10**of.kept})::bigint" if of.kept else f"{of.v}::bigint"
    hashed = f"hashint8extended({of.k.low}, {unscaled})"
    return f"CASE WHEN {fits} THEN {hashed} ELSE {_text(f'{of.v}::text', of.k.whole)} END"


def _numeric(of: _Given) -> str:
    if of.scale == of.kept:
        return _text(f"{of.v}::text", of.k.whole)
    plain = f"CASE WHEN {of.v} = trunc({of.v}, {of.kept}) THEN round({of.v}, {of.kept})"
    return _text(f"({plain} ELSE {of.v} END)::text", of.k.whole)


def _text_value(of: _Given) -> str:
    short = _text(of.v, of.k.whole)
    if of.precision is not None and of.precision * 4 <= LONGEST:
        return short
    digest = f"encode(sha256(convert_to({of.v}, 'UTF8')), 'hex')"
    long = _text(digest, of.k.whole)
    return f"CASE WHEN octet_length({of.v}) <= {LONGEST} THEN {short} ELSE {long} END"


def _bytes(of: _Given) -> str:
    bounded = (
        f"CASE WHEN octet_length({of.v}) <= {LONGEST // 2} THEN {of.v} ELSE sha256({of.v}) END"
    )
    return _text(f"encode({bounded}, 'hex')", of.k.whole)


def _date(of: _Given) -> str:
    days = f"hashint4extended({of.v} - DATE '1970-01-01', {of.k.whole})"
    other = _text(f"{of.v}::text", of.k.whole)
    return f"CASE WHEN isfinite({of.v}) THEN {days} ELSE {other} END"


_WHOLE = frozenset({"smallint", "integer", "bigint"})
_TYPES: Mapping[str, frozenset[str]] = {
    "boolean": frozenset({"boolean"}),
    "integer": _WHOLE,
    "bigint": _WHOLE,
    "decimal": frozenset({"numeric"}),
    "numeric": frozenset({"numeric"}),
    "float": frozenset({"real", "double precision"}),
    "text": frozenset({"text", "character varying"}),
    "bytes": frozenset({"bytea"}),
    "date": frozenset({"date"}),
    "time": frozenset({"time without time zone"}),
    "timestamp": frozenset({"timestamp without time zone"}),
    "instant": frozenset({"timestamp with time zone"}),
}
"""The types of columns in which values of a kind may be stored."""

_EXPRESSIONS: Mapping[str, Callable[[_Given], str]] = {
    "boolean": lambda of: f"hashint4extended({of.v}::integer, {of.k.whole})",
    "integer": lambda of: f"hashint8extended({of.v}::bigint, {of.k.whole})",
    "bigint": lambda of: f"hashint8extended({of.k.low}, {of.v}::bigint)",
    "decimal": _decimal,
    "numeric": _numeric,
    "float": lambda of: f"hashfloat8extended({of.v}::double precision, {of.k.whole})",
    "text": _text_value,
    STORED: lambda of: _text_value(of._replace(v=f"({of.v}::text)", precision=None)),
    "bytes": _bytes,
    "date": _date,
    "time": lambda of: f"time_hash_extended({of.v}, {of.k.whole})",
    "timestamp": lambda of: f"timestamp_hash_extended({of.v}, {of.k.whole})",
    "instant": lambda of: f"timestamp_hash_extended({of.v} AT TIME ZONE 'UTC', {of.k.whole})",
}
