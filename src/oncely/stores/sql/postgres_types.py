"""The mapping of Arrow types to PostgreSQL types, and digests of rows computed by PostgreSQL.

Binary COPY does not cast: the sender must encode the column's own type. Types that pgpq encodes are
sent so; all others (uuid, json, enums, inet …) are sent as text through a staging table and cast by
the server.

Digests are used with :mod:`oncely.core.digest`, whose functions are PostgreSQL's own. An expression
never fails, whatever the table contains: a value that no value of the recipe's kind can equal, such
as ``infinity``, a fourth digit after the point, has another hash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.digest import LONGEST, STORED, Kind, Recipe, column_constant, kind_of
from oncely.errors import TableMismatch
from oncely.stores.sql.connection import BadData, Column, ColumnFit, Connection, Longest

_NATIVE: dict[str, pa.DataType] = {
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "boolean": pa.bool_(),
    "text": pa.string(),
    "character varying": pa.string(),
    "character": pa.string(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "time without time zone": pa.time64("us"),
    "timestamp without time zone": pa.timestamp("us"),
    "timestamp with time zone": pa.timestamp("us", "UTC"),
}
_TYPMOD = re.compile(r"\(([\d,-]+)\)")
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}

TEXT_SETTINGS = {
    "array_nulls": "on",  # of arrays: the element NULL
    "bytea_output": "hex",
    "datestyle": "ISO, MDY",
    "extra_float_digits": "1",
    "intervalstyle": "postgres",  # also of signs that are read
    "lc_monetary": "C",
    "quote_all_identifiers": "off",  # of names of types
    "standard_conforming_strings": "on",
    "timezone": "UTC",  # of times without an offset
    "timezone_abbreviations": "Default",
    "transform_null_equals": "off",
    "xmloption": "content",
}
"""Settings on which the meaning of texts depends, whatever the role, the database or the server
has: the defaults of PostgreSQL, and UTC."""

SET_TEXTS = "SELECT " + ", ".join(
    f"set_config('{a}', '{b}', true)" for a, b in TEXT_SETTINGS.items()
)
"""The statement that sets them until the end of the transaction: behind a pooler, too."""


def column_type(arrow_type: pa.DataType) -> str:
    """The PostgreSQL type that holds every value of an Arrow type.

    Raises:
        TableMismatch: there is no such type.
    """
    if pa.types.is_dictionary(arrow_type):
        return column_type(arrow_type.value_type)
    if pa.types.is_decimal(arrow_type):
        return f"numeric({arrow_type.precision},{arrow_type.scale})"
    if pa.types.is_list(arrow_type) and not pa.types.is_nested(arrow_type.value_type):
        return f"{column_type(arrow_type.value_type)}[]"
    if pa.types.is_nested(arrow_type):
        return "jsonb"
    if pa.types.is_timestamp(arrow_type):
        return "timestamptz" if arrow_type.tz else "timestamp"
    if pa.types.is_time(arrow_type):
        return "time"
    if pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type):
        return "bytea"
    if arrow_type not in _BY_ARROW:
        raise TableMismatch(
            f"there is no PostgreSQL type for {arrow_type}",
            way_out="cast it to another type in the transform",
        )
    return _BY_ARROW[arrow_type]


_BY_ARROW: dict[pa.DataType, str] = {
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.uint8(): "smallint",
    pa.uint16(): "integer",
    pa.uint32(): "bigint",
    pa.uint64(): "numeric(20,0)",
    pa.float16(): "real",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.bool_(): "boolean",
    pa.date32(): "date",
    pa.date64(): "date",
    pa.null(): "text",
    pa.string(): "text",
    pa.large_string(): "text",
}


def without_limit(type_: str) -> str:
    """The type without its length or digits; ``character`` and ``bit`` alone have length 1."""
    base = _TYPMOD.sub("", type_)
    if re.fullmatch(r"(character|bit)(\[\])?", base):
        return base.replace("character", "bpchar").replace("bit", '"bit"')
    return base


def uncut(type_: str) -> str:
    """The type with which the server keeps every text whole of which ``type_`` would keep a part;
    one that rounds, which needs a permission, is the same."""
    if _ROUNDS_TEXT.fullmatch(type_):
        return type_
    base = type_.removesuffix("[]")
    return type_.replace(base, "text") if base in _CUT_OFF else without_limit(type_)


def fit(column: Column, arrow_type: pa.DataType) -> ColumnFit | None:
    """The conversion of values of ``arrow_type`` to ``column``, or None if it would lose
    information."""
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    base = _TYPMOD.sub("", column.type)
    found = _fit(column, base, arrow_type)
    if found is None and column.domain and _is_text(arrow_type) and not base.endswith("[]"):
        found = _as_text(column)
    if found is None:
        return None
    found = _with_loss(found, column.type, base.removesuffix("[]"), arrow_type)
    of = column.type.removesuffix("[]")
    form = next((form for types, form in _FORMS if types.fullmatch(of)), "")
    return replace(
        found, longest=_longest(of), form=form if found.arrow_type == pa.string() else ""
    )


_FORMS = (
    (re.compile(r"character\(\d+\)"), "pads texts with spaces, and ignores spaces at their end"),
    (
        re.compile("interval|time(stamp)? with(out)? time zone|ts(tz)?(multi)?range"),
        "keeps microseconds, and rounds texts with more digits of a second",
    ),
    (re.compile("point|line|lseg|box|path|polygon|circle"), "keeps the nearest double of a number"),
    (re.compile("oid|xid8?|cid"), "counts a negative number from its largest value"),
    (re.compile("tsvector"), "sorts words, and keeps one of each"),
)


def _longest(type_: str) -> Longest | None:
    """PostgreSQL cuts names off, and spaces that are too many for a column of limited length."""
    if found := re.fullmatch(r"character varying\((\d+)\)", type_):
        return Longest(type_, int(found[1]), "characters", spaces=True)
    return _CUT_OFF.get(type_)


_CUT_OFF = {
    "name": Longest("name", 63, "bytes", spaces=False),
    '"char"': Longest('"char"', 1, "bytes", spaces=False),
}


def _with_loss(found: ColumnFit, column_type: str, base: str, arrow_type: pa.DataType) -> ColumnFit:
    """The fit, with the digits that PostgreSQL would round without an error."""
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        arrow_type = arrow_type.value_type
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if _is_text(arrow_type):
        return replace(found, rounds=_ROUNDS_TEXT.fullmatch(column_type) is not None)
    if base == "real":
        return replace(found, rounds=bool(pa.types.is_float64(arrow_type)))
    keeps = _TYPMOD.search(column_type)
    if keeps is None or base not in _ROUNDED:
        return found
    scale = int(keeps[1].rpartition(",")[2]) if base != "numeric" or "," in keeps[1] else 0
    if pa.types.is_floating(arrow_type):
        return replace(found, scale=scale)
    return replace(found, rounds=_digits(arrow_type) > scale)


_ROUNDS_TEXT = re.compile(
    r"(real|double precision|date|money|interval .+|(numeric|interval|time|timestamp)\(.+)(\[\])?"
)
"""Types for which the server rounds a text without an error, or leaves a part of it out."""


def _digits(arrow_type: pa.DataType) -> int:
    """The number of digits after the point, or of fractional seconds, that values may have."""
    if pa.types.is_decimal(arrow_type):
        return int(arrow_type.scale)
    if pa.types.is_timestamp(arrow_type) or pa.types.is_time(arrow_type):
        return _DIGITS[arrow_type.unit]
    return 0


_ROUNDED = {
    "numeric",
    "time without time zone",
    "timestamp without time zone",
    "timestamp with time zone",
}


def _fit(column: Column, base: str, arrow_type: pa.DataType) -> ColumnFit | None:
    if pa.types.is_null(arrow_type) and base not in _NATIVE:
        return _as_text(column)
    if base.endswith("[]"):
        return _fit_array(column, base, arrow_type)
    native = _NATIVE.get(base)
    if base == "numeric":
        return _fit_numeric(column, arrow_type)
    if native is not None:
        return ColumnFit(column.name, native) if _widens(arrow_type, native) else None
    if pa.types.is_nested(arrow_type):
        return _as_text(column) if base in ("json", "jsonb") else None
    return _as_text(column) if _is_text(arrow_type) and not _LOOKED_UP.match(base) else None


_LOOKED_UP = re.compile("reg|aclitem")
"""Types whose values are names of objects: a name that is missing is an error of the statement, not
of a row."""


def _fit_array(column: Column, base: str, arrow_type: pa.DataType) -> ColumnFit | None:
    """An array element that pgpq encodes is sent in binary form, others as an array literal."""
    if not (pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)):
        return None
    if pa.types.is_nested(arrow_type.value_type):
        return None
    of_elements = column._replace(type=base.removesuffix("[]"))
    element = fit(of_elements, arrow_type.value_type)
    if element is None:
        return None
    # pgpq encodes instants in an array as the type without time zone, and all texts as text; an
    # array names its elements' type, which a domain is not.
    other = (
        column.domain
        or element.arrow_type == _NATIVE["timestamp with time zone"]
        or (element.arrow_type == pa.string() and base != "text[]")
    )
    if element.cast is not None or other:
        return _as_text(column)
    return ColumnFit(column.name, pa.list_(element.arrow_type))


def _fit_numeric(column: Column, arrow_type: pa.DataType) -> ColumnFit | None:
    if pa.types.is_decimal128(arrow_type):
        return ColumnFit(column.name, arrow_type)
    numeric = pa.types.is_floating(arrow_type) or pa.types.is_integer(arrow_type)
    return _as_text(column) if numeric or pa.types.is_decimal(arrow_type) else None


def _as_text(column: Column) -> ColumnFit:
    # An explicit cast to a type with a length truncates; the assignment that follows refuses.
    rounded = column.type.startswith(tuple(_ROUNDED))
    cast = column.type if rounded else without_limit(column.type)
    return ColumnFit(column.name, pa.string(), cast=cast)


def _is_text(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def _widens(given: pa.DataType, native: pa.DataType) -> bool:
    """True if values of ``given`` may be stored as ``native``; single values may be out of
    range."""
    same_kind = (
        (_is_text, _is_text),
        (pa.types.is_integer, lambda t: pa.types.is_integer(t) or pa.types.is_floating(t)),
        (pa.types.is_floating, pa.types.is_floating),
        (pa.types.is_boolean, pa.types.is_boolean),
        (lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t), pa.types.is_binary),
        (pa.types.is_date, lambda t: pa.types.is_date(t) or pa.types.is_timestamp(t)),
        (
            pa.types.is_timestamp,
            lambda t: pa.types.is_timestamp(t) and bool(t.tz) == bool(given.tz),
        ),
        (pa.types.is_time, pa.types.is_time),
        (pa.types.is_null, lambda _: True),
    )
    return any(bool(one(given) and other(native)) for one, other in same_kind)


_FIRST_MICROSECOND = -210_866_803_200_000_000
_FIRST_DAY = -2_440_588
"""PostgreSQL's first instant, 4714-11-24 BC, counted from 1970."""


def refuse_too_early(rows: pa.Table) -> None:
    """Refuse times before PostgreSQL's first, which pgpq cannot encode or encodes as ``-infinity``.

    Times that are too late are refused by the server.

    Raises:
        BadData: names the row, unless it is within an array.
    """
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        within = pa.types.is_list(column.type)
        times = pc.list_flatten(column) if within else column
        if pa.types.is_timestamp(times.type):
            number, first = times.cast(pa.int64()), _FIRST_MICROSECOND
        elif pa.types.is_date32(times.type):
            number, first = times.cast(pa.int32()), _FIRST_DAY
        else:
            continue
        line = pc.index(pc.less(number, first), True).as_py()
        if line >= 0:
            reason = f"column {name!r}: a time before 4714-11-24 BC"
            raise BadData(reason, None if within else line)


_MODIFIERS = re.compile(r"\((\d+)(?:,(-?\d+))?\)")


# -- digests --------------------------------------------------------------------------------

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
    return _MODIFIERS.sub("", type_)


def _of_type(type_: str) -> tuple[str, int | None, int | None]:
    found = _MODIFIERS.search(type_)
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
