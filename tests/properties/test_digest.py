"""Digests: PostgreSQL and numpy compute the same one, for every kind of column and any value."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oncely.core.digest import LONGEST, Recipe, digest_sum, kind_of, row_digests
from oncely.stores.sql.connection import TableName
from oncely.stores.sql.dialects import dialect_for
from oncely.stores.sql.postgres_types import COMPUTES, NotComputable, row_digest

Session = psycopg.Connection[Any]
UTC = dt.UTC
ZONES = ("UTC", "America/New_York", "Asia/Kolkata", "Pacific/Apia", "Europe/Dublin")

TEXTS = [
    "", *("x" * size for size in range(1, 50)), *("ä中😀" * size for size in range(1, 40)),
    *("é" * size for size in range(110, 125)), *("z" * (LONGEST + at) for at in range(-3, 4)),
    "a\tb\nc\\d'e\"f", "%s %(name)s %%", " ", "  trailing  ", "long " * 5_000,
]  # fmt: skip
INTEGERS = [0, 1, -1, 2**31 - 1, -(2**31), 7]
BIGINTS = [*INTEGERS, 2**31, -(2**31) - 1, 2**32, -(2**32), 2**62, 2**63 - 1, -(2**63)]
ODD_NAN = float(np.frombuffer(b"\x01" + bytes(5) + b"\xf8\xff", "<f8")[0])
"""NaN with a sign and a payload."""
FLOATS = [
    ODD_NAN,
    0.0,
    -0.0,
    1.5,
    -1.5,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
    0.1,
]
REALS = [0.0, -0.0, 1.5, float(np.float32(0.1)), float(np.float32(1e-45)), math.inf, math.nan]
FAR = [
    dt.datetime(1, 1, 1), dt.datetime(1969, 12, 31, 23, 59, 59, 999_999), dt.datetime(1970, 1, 1),
    dt.datetime(1883, 11, 18, 12, 3, 57), dt.datetime(2026, 3, 29, 2, 30, 0, 1),
    dt.datetime(2000, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999_999),
]  # fmt: skip
SHORT = ["0.00", "-0.01", "1.00", "1.10", "9999999999999999.99", "-9999999999999999.99", "12.30"]
LONG = ["0E-10", "0.0000000001", "-0.0000000001", "1.5000000000", "123456789012345678.1234567890",
        "-999999999999999999.9999999999"]  # fmt: skip

COLUMNS: dict[str, tuple[pa.DataType, str, Sequence[Any]]] = {
    "small": (pa.int16(), "smallint", [0, -1, 32767, -32768]),
    "whole number": (pa.int32(), "integer", INTEGERS),
    'qu"o%ted': (pa.int64(), "bigint", BIGINTS),
    "flag": (pa.bool_(), "boolean", [True, False]),
    "naïve": (pa.float64(), "double precision", FLOATS),
    "real": (pa.float32(), "real", REALS),
    "text": (pa.string(), "text", TEXTS),
    "varchar": (pa.string(), "varchar(70)", [one for one in TEXTS if len(one) <= 70]),
    "wide varchar": (pa.string(), "varchar(1000)", [one for one in TEXTS if len(one) <= 1000]),
    "bytes": (
        pa.binary(),
        "bytea",
        [b"", b"\x00", b"\xff\x00", *(b"\x80" * n for n in range(150))],
    ),
    "day": (pa.date32(), "date", [one.date() for one in FAR]),
    "clock": (pa.time64("us"), "time", [dt.time(0), dt.time(23, 59, 59, 999_999), dt.time(12)]),
    "at": (pa.timestamp("us"), "timestamp", FAR),
    "instant": (pa.timestamp("us", "UTC"), "timestamptz", [one.replace(tzinfo=UTC) for one in FAR]),
    "short": (pa.decimal128(18, 2), "numeric(18,2)", [Decimal(one) for one in SHORT]),
    "short, wider column": (pa.decimal128(18, 2), "numeric(30,5)", [Decimal(one) for one in SHORT]),
    "short, any column": (pa.decimal128(18, 2), "numeric", [Decimal(one) for one in SHORT]),
    "no scale": (pa.decimal128(18, 0), "numeric", [Decimal(10**18 - 1), Decimal(0), Decimal(-5)]),
    "long": (pa.decimal128(28, 10), "numeric(28,10)", [Decimal(one) for one in LONG]),
    "long, any column": (pa.decimal128(28, 10), "numeric", [Decimal(one) for one in LONG]),
}
STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "boolean": st.booleans(),
    "double precision": st.floats(allow_nan=True, allow_infinity=True),
    "real": st.floats(width=32),
    "bytea": st.binary(max_size=130),
    "date": st.dates(),
    "time": st.times(),
    "timestamp": st.datetimes(),
    "timestamptz": st.datetimes(timezones=st.just(UTC)),
}
ANY_TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=70)


def values_of(name: str) -> st.SearchStrategy[Any]:
    arrow_type, column_type, hostile = COLUMNS[name]
    if pa.types.is_decimal(arrow_type):
        digits = arrow_type.precision
        free: st.SearchStrategy[Any] = st.integers(1 - 10**digits, 10**digits - 1).map(
            lambda number: Decimal(number).scaleb(-arrow_type.scale)
        )
    else:
        free = STRATEGIES.get(column_type, ANY_TEXT)
    return st.none() | st.sampled_from(list(hostile)) | free


@pytest.fixture(scope="module")
def session(shared_database: str) -> Iterator[Session]:
    with psycopg.connect(shared_database, autocommit=True) as ours:
        yield ours


def stored(session: Session, url: str, rows: pa.Table) -> None:
    """Write rows by the pipeline's COPY into a temporary table of the declared types."""
    dialect = dialect_for(url)
    quoted = ", ".join(
        f"{dialect.quote(name)} {COLUMNS[name][1]}".replace("%%", "%") for name in rows.column_names
    )
    session.execute("DROP TABLE IF EXISTS digested")
    session.execute(f"CREATE TABLE digested (n bigint, {quoted})".encode())
    connection = dialect.connect("test of digests")
    numbered = rows.append_column("n", pa.array(range(rows.num_rows), pa.int64()))
    connection.copy(TableName(None, "digested"), numbered)
    connection.close()


def by_postgres(
    session: Session, url: str, recipe: Recipe, types: dict[str, str], zone: str = "UTC"
) -> list[int]:
    expression = row_digest(recipe, types, dialect_for(url).quote, "n").replace("%%", "%")
    session.execute(f"SET timezone = '{zone}'; SET datestyle = 'German'".encode())
    rows = session.execute(f"SELECT {expression} FROM digested ORDER BY n".encode()).fetchall()
    return [digest % 2**64 for (digest,) in rows]


def types_there(session: Session) -> dict[str, str]:
    return dict(
        session.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = 'digested'::regclass AND attnum > 0 AND NOT attisdropped"
        ).fetchall()
    )


def table_of(columns: dict[str, list[Any]]) -> pa.Table:
    return pa.table(
        [pa.array(values, COLUMNS[name][0]) for name, values in columns.items()],
        names=list(columns),
    )


def recipe_of(rows: pa.Table, *, offset: bool) -> Recipe:
    return Recipe.of({field.name: kind_of(field.type) for field in rows.schema}, offset=offset)


@pytest.mark.parametrize("name", COLUMNS)
def test_postgres_and_numpy_compute_the_same_of_hostile_values(
    name: str, session: Session, shared_database: str
) -> None:
    rows = table_of({name: [None, *COLUMNS[name][2], None]})
    stored(session, shared_database, rows)
    types = types_there(session)
    for offset in (True, False):
        recipe = recipe_of(rows, offset=offset)
        ours = row_digests(rows, np.arange(rows.num_rows), recipe).tolist()
        for zone in ZONES:
            assert by_postgres(session, shared_database, recipe, types, zone) == ours


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_postgres_and_numpy_compute_the_same_of_whole_rows(
    data: st.DataObject, session: Session, shared_database: str
) -> None:
    count = data.draw(st.integers(1, 8))
    columns = {
        name: data.draw(st.lists(values_of(name), min_size=count, max_size=count), name)
        for name in data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, unique=True))
    }
    rows = table_of(columns)
    stored(session, shared_database, rows)
    recipe = recipe_of(rows, offset=True)
    ours = row_digests(rows, np.arange(count), recipe)
    theirs = by_postgres(
        session, shared_database, Recipe.parse(str(recipe)), types_there(session),
        data.draw(st.sampled_from(ZONES)),
    )  # fmt: skip
    assert theirs == ours.tolist()
    assert sum(theirs) % 2**64 == digest_sum(ours)


ALTERED = {
    "short, any column": ["1.001", "NaN", "Infinity", "1e30", "-Infinity", "0.005"],
    "short, wider column": ["1.00001", "NaN", "123456789012345678901"],
    "long": ["NaN"],
    "long, any column": ["1.50000000001", "NaN", "Infinity"],
    "day": ["infinity", "-infinity", "5874897-12-31", "4713-01-01 BC"],
    "at": ["infinity", "-infinity", "294276-12-31 23:59:59.999999", "4713-01-01 BC"],
    "instant": ["infinity", "-infinity", "4713-01-02 BC"],
    "clock": ["24:00:00"],
    "text": ["x" * 1_000_000],
}


@pytest.mark.parametrize("name", ALTERED)
def test_values_that_the_pipeline_never_writes_have_a_digest_of_their_own(
    name: str, session: Session, shared_database: str
) -> None:
    """The statement must not fail of them either: it sums up ranges that are damaged."""
    _, column_type, hostile = COLUMNS[name]
    rows = table_of({name: [*hostile, None]})
    stored(session, shared_database, rows)
    quoted = '"' + name + '"'
    for at, text in enumerate(ALTERED[name]):
        session.execute(
            f"INSERT INTO digested (n, {quoted}) VALUES (%s, %s::{column_type})".encode(),
            (rows.num_rows + at, text),
        )
    recipe = recipe_of(rows, offset=False)
    found = by_postgres(session, shared_database, recipe, types_there(session))
    assert len(set(found)) == len(set(hostile)) + 1 + len(ALTERED[name])


def test_trailing_zeros_do_not_matter(session: Session, shared_database: str) -> None:
    rows = table_of({"short, any column": [Decimal("1.50")], "long, any column": [Decimal("2.5")]})
    stored(session, shared_database, rows)
    session.execute('UPDATE digested SET "short, any column" = 1.5000, "long, any column" = 2.5')
    recipe = recipe_of(rows, offset=False)
    theirs = by_postgres(session, shared_database, recipe, types_there(session))
    assert theirs == row_digests(rows, None, recipe).tolist()


def test_the_server_says_that_it_computes_the_same(session: Session, shared_database: str) -> None:
    assert session.execute(COMPUTES.encode()).fetchone() == (True,)
    session.execute("DROP DATABASE IF EXISTS other_encoding")
    session.execute(
        "CREATE DATABASE other_encoding TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'"
    )
    try:
        url = psycopg.conninfo.make_conninfo(shared_database, dbname="other_encoding")
        with psycopg.connect(url, autocommit=True) as other:
            assert other.execute(COMPUTES.encode()).fetchone() == (False,)
    finally:
        session.execute("DROP DATABASE other_encoding WITH (FORCE)")


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ({}, "missing"),
        ({"amount": "text"}, "is text, and was bigint"),
        ({"amount": "jsonb"}, "jsonb"),
    ],
)
def test_a_column_of_another_type_is_named(types: dict[str, str], said: str) -> None:
    recipe = Recipe.parse("1 row amount=bigint")
    with pytest.raises(NotComputable, match=f"'amount'.*{said}"):
        row_digest(recipe, types, lambda name: f'"{name}"', None)
    with pytest.raises(NotComputable, match="no offset"):
        row_digest(Recipe.parse("1 offset"), types, lambda name: f'"{name}"', None)
