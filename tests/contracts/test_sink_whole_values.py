"""A text is stored as it was sent, or its record is a dead letter: for every type of PostgreSQL
that accepts texts, for domains over it and for arrays of both."""

from __future__ import annotations

import re
from contextlib import closing

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from oncely.errors import TableMismatch
from oncely.stores.sql.connection import Column
from oncely.stores.sql.postgres_types import stored_texts
from tests.conftest import examples
from tests.sinktools import (
    Place,
    Rec,
    at_t0,
    commit_all,
    gone,
    open_sink,
    postgres_place,
    ready,
    sink_to,
)

LIMITED = ["varchar(5)", "char(5)", "bit(4)", "bit varying(4)", "varchar(63)", "name", '"char"']
ROUNDED = ["numeric(5,2)", "real", "double precision", "date", "money", "timestamp(0)", 
           "interval(1)", "interval day", "time(2)", "timetz(2)"]  # fmt: skip

UNLIMITED = {"bit": '"bit"', "character": "bpchar", "name": "text", '"char"': "text"}
"""Types that keep a text whole, by those that cut it off without a number."""

NO_SHRINKING = [Phase.explicit, Phase.reuse, Phase.generate]
"""An example takes seconds."""

texts = st.one_of(
    st.text(st.sampled_from("aé😀 "), max_size=9),
    st.text(st.sampled_from("01"), max_size=6),
    st.sampled_from(["ABCDE   ", "ABCDE  F", "x" * 63, "é" * 32, "x" * 64, "12:00:00.123456",
                     "1 day 03:00:00.45", "2024-02-29 23:59:59.6", "$1.239", "1.239", "1e-50",
                     "0.12345678901234567890", "NULL", "\\x00ff", "{a,b}", "10.0.0.1", "-1", "t",
                     "6d0f0a4e-0000-4000-8000-000000000001", '{"a": 1.50}', "[1,5)"]),
)  # fmt: skip


def types(place: Place) -> list[str]:
    """Every type of the server that a column may have, some with limits, and domains over those."""
    base = place.sql(
        "SELECT format_type(oid, NULL) FROM pg_type WHERE typtype IN ('b', 'r', 'm')"
        " AND typcategory NOT IN ('A', 'P', 'Z') AND typname NOT IN ('xml', 'gtsvector')"
        " AND typnamespace = 'pg_catalog'::regnamespace"
    )
    own = []
    for number, of in enumerate([*LIMITED, *ROUNDED, "int", "varchar(5)[]", "jsonb"]):
        place.sql(f"CREATE DOMAIN d{number} AS {of}")
        place.sql(f"CREATE DOMAIN e{number} AS d{number}")
        own += [f"d{number}", f"e{number}"]
    return [*(name for (name,) in base), *LIMITED, *own]


def accepting(place: Place, names: list[str], arrow: pa.DataType) -> dict[str, Column]:
    """The columns of a new table of these types into which such values fit, nothing rounded."""
    columns = ", ".join(f"x{at} {name}" for at, name in enumerate(names))
    place.sql(f"CREATE TABLE every ({columns})")
    with closing(place.dialect.connect("test")) as connection:
        found = place.dialect.columns(connection, place.table("every"))
    fits = {column: place.dialect.fit(column, arrow) for column in found}
    place.sql("DROP TABLE every")
    return {
        name: column
        for name, (column, fit) in zip(names, fits.items(), strict=True)
        if fit is not None and not fit.rounds
    }


@settings(max_examples=examples(2), suppress_health_check=list(HealthCheck), phases=NO_SHRINKING)
@given(sent=st.lists(texts, min_size=25, max_size=25, unique=True), in_arrays=st.booleans())
def test_a_text_is_stored_whole_or_its_record_is_a_dead_letter(
    shared_database: str, sent: list[str], in_arrays: bool
) -> None:
    place = postgres_place(shared_database)
    names = [
        f"{name}[]" if in_arrays else name
        for name in types(place)
        if "[]" not in name or not in_arrays
    ]
    arrow = pa.list_(pa.string()) if in_arrays else pa.string()
    taken = accepting(place, names, arrow)
    assert len(taken) > 20
    columns = {f"x{at}": column for at, column in enumerate(taken.values())}
    place.sql(
        "CREATE TABLE rows (id bigint, "
        + ", ".join(f"x{at} {name}" for at, name in enumerate(taken)) + ")"
    )  # fmt: skip
    schema = pa.schema([("id", pa.int64()), *((name, arrow) for name in columns)])
    records = [
        Rec(at, ({"id": at, name: [text, None] if in_arrays else text},))
        for at, (name, text) in enumerate((name, text) for name in columns for text in sent)
    ]
    bound, fence = ready(sink_to(place, schema))
    commit_all(bound, at_t0(0, records, schema), fence)
    refused = {offset for (offset,) in place.sql('SELECT "offset" FROM oncely_rejects')}
    stored = {}
    for name, column in columns.items():
        plain = UNLIMITED.get(base := re.sub(r"\(.*|\[\]$", "", column.type), base)
        value = f"({name})[1]" if in_arrays else name
        for row in place.sql(f"SELECT id, {value}::text FROM rows WHERE {name} IS NOT NULL"):
            stored[row[0]] = (column.type, row[1], plain)
    assert refused.isdisjoint(stored)
    assert refused | {*stored} == {*range(len(records))}
    wrong = []
    for at, (type_, value, plain) in stored.items():
        text = sent[at % len(sent)]
        ((whole,),) = place.sql(f"SELECT CAST(CAST(? AS text) AS {plain})::text", text)
        if type_.startswith("character("):
            value, whole = value.rstrip(" "), whole.rstrip(" ")  # noqa: PLW2901
        if value != whole:
            wrong.append((type_, text, value))
    assert wrong == []


@pytest.mark.parametrize("of", ROUNDED)
def test_a_domain_over_a_type_that_rounds_texts_is_refused(on_postgres: Place, of: str) -> None:
    on_postgres.sql(f"CREATE DOMAIN d AS {of}")
    on_postgres.sql("CREATE TABLE rows (x d)")
    with pytest.raises(TableMismatch, match="would be rounded"):
        open_sink(sink_to(on_postgres, pa.schema([("x", pa.string())])))


@pytest.mark.parametrize("of", ["varchar(5)", "name", "bit varying(5)"])
def test_keys_that_differ_stay_different_rows(on_postgres: Place, of: str) -> None:
    place = on_postgres
    place.sql(f"CREATE DOMAIN code AS {of}")
    place.sql("CREATE TABLE rows (id code PRIMARY KEY, v bigint)")
    schema = pa.schema([("id", pa.string()), ("v", pa.int64())])
    long, short = ("1" * 64, "11") if of == "name" else ("111111", "11")
    records = [
        Rec(0, ({"id": f"{long}0", "v": 0},)),
        Rec(1, ({"id": f"{long}1", "v": 1},)),
        Rec(2, ({"id": long[:5], "v": 2},)),
        Rec(3, ({"id": short, "v": 3},)),
        gone(4, id=f"{long}0"),
    ]
    bound, fence = ready(sink_to(place, schema, keys=["id"]))
    commit_all(bound, at_t0(0, records, schema, keys=["id"]), fence)
    assert place.sql("SELECT id::text, v FROM rows ORDER BY v") == [(long[:5], 2), (short, 3)]
    rejects = [offset for (offset,) in place.sql('SELECT "offset" FROM oncely_rejects ORDER BY 1')]
    assert rejects in ([0, 1], [0, 1, 4])


def test_numbers_fit_into_domains_over_numbers(on_postgres: Place) -> None:
    place = on_postgres
    place.sql("CREATE DOMAIN small AS smallint CHECK (VALUE > 0)")
    place.sql("CREATE TABLE rows (id bigint, x small, y small[])")
    schema = pa.schema([("id", pa.int64()), ("x", pa.int32()), ("y", pa.list_(pa.int64()))])
    records = [
        Rec(at, ({"id": at, "x": x, "y": y},))
        for at, (x, y) in enumerate(
            [(1, [2, None]), (70_000, [1]), (0, []), (1, [1, -1]), (None, None)]
        )
    ]
    bound, fence = ready(sink_to(place, schema))
    commit_all(bound, at_t0(0, records, schema), fence)
    assert place.sql("SELECT id, x, y::int[] FROM rows ORDER BY id") == [
        (0, 1, [2, None]),
        (4, None, None),
    ]
    assert place.sql('SELECT "offset" FROM oncely_rejects ORDER BY 1') == [(1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("of", "sent", "compared"),
    [
        ("bit varying(4)", "11111", "11111"),
        ("bit(4)", "11111", "11111"),
        ("name", "x" * 64, "x" * 64),
        ('"char"[]', "{ab}", "{ab}"),
        ("character varying(2)[]", "{abc}", "{abc}"),
        ("character(2)[]", "{abc}", "{abc}"),
        ("character(2)[]", "{a}", '{"a "}'),
        ("character(2)", "a  ", "a"),
        ("numeric(3,1)", "1.25", "1.3"),
        ("uuid", "x", None),
    ],
)
def test_an_audit_compares_the_text_that_was_sent(
    on_postgres: Place, of: str, sent: str, compared: str | None
) -> None:
    """Not what a cast to the column's type, as that of a writer, makes of it."""
    with closing(on_postgres.dialect.connect("test")) as connection:
        assert stored_texts(connection, of, [sent]) == [compared]


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ("char(5)", "pads"), ("char(5)[]", "pads"), ("interval", "microseconds"),
        ("timetz", "microseconds"), ("timestamp", "microseconds"),
        ("tstzrange", "microseconds"), ("point", "nearest double"),
        ("oid", "negative"), ("tsvector", "sorts"), ("uuid", ""), ("text", ""), ("jsonb", ""),
    ],
)  # fmt: skip
def test_a_plan_tells_of_types_that_give_texts_another_form(
    on_postgres: Place, of: str, said: str
) -> None:
    on_postgres.sql(f"CREATE DOMAIN d AS {of}")
    on_postgres.sql("CREATE TABLE rows (x d)")
    arrow = pa.list_(pa.string()) if of.endswith("[]") else pa.string()
    target = sink_to(on_postgres, pa.schema([("x", arrow)])).bind().target
    assert target is not None
    assert [said in one and "'x'" in one for one in target.notes] == ([True] if said else [])
