"""Values at the edges: what a column can not hold is a reject, and never another value."""

from __future__ import annotations

import math
from dataclasses import replace

import pyarrow as pa
import pytest

from tests.contracts.looking import ids, rejected
from tests.sinktools import T0, Place, Rec, at_t0, chunk, commit_all, ready, rec, sink_to

# -- limits that only a value can pass -----------------------------------------------------


def test_a_value_too_long_for_an_index(on_postgres: Place) -> None:
    """SQLSTATE 54000: no data exception, and yet this record alone is at fault, for ever."""
    on_postgres.sql("CREATE TABLE rows (id bigint, name text)")
    on_postgres.sql("CREATE INDEX ON rows (name)")
    sink, fence = ready(sink_to(on_postgres))
    import random

    long = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=20_000))
    commit_all(sink, at_t0(0, [rec(0, id=0), rec(1, id=1, name=long), rec(2, id=2)]), fence)
    assert ids(on_postgres) == [0, 2]
    assert [offset for offset, _ in rejected(on_postgres)] == [1]


def test_json_too_deep(on_postgres: Place) -> None:
    """SQLSTATE 54001: the server's stack limit, reached by one record's value."""
    on_postgres.sql("CREATE TABLE rows (id bigint, name json)")
    sink, fence = ready(sink_to(on_postgres))
    deep = "[" * 200_000 + "]" * 200_000
    commit_all(
        sink, at_t0(0, [rec(0, id=0, name="{}"), rec(1, id=1, name=deep), rec(2, id=2)]), fence
    )
    assert ids(on_postgres) == [0, 2]
    assert [offset for offset, _ in rejected(on_postgres)] == [1]


# -- values that no cast saves -------------------------------------------------------------


def test_an_integer_out_of_the_column_s_range(place: Place) -> None:
    schema = pa.schema([("id", pa.uint64()), ("n", pa.int64())])
    if place.is_postgres:
        place.sql("CREATE TABLE rows (id bigint, n smallint)")
    else:
        place.sql("CREATE TABLE rows (id INT, n INT, CHECK (n BETWEEN -32768 AND 32767)) STRICT")
    sink, fence = ready(sink_to(place, schema))
    records = [
        rec(0, id=0, n=32_767),
        rec(1, id=1, n=32_768),
        rec(2, id=2**63, n=0),
        rec(3, id=3, n=-32_768),
        rec(4, id=4, n=None),
        rec(5, id=2**63 + 1, n=99_999),
    ]
    commit_all(sink, at_t0(0, records, schema), fence)
    assert place.sql("SELECT id, n FROM rows ORDER BY id") == [(0, 32_767), (3, -32_768), (4, None)]
    assert [offset for offset, _ in rejected(place)] == [1, 2, 5]
    assert "9223372036854775808" in rejected(place)[1][1]


def test_a_double_that_a_real_can_t_hold(on_postgres: Place) -> None:
    """Arrow would make infinity of it without a word."""
    schema = pa.schema([("id", pa.int64()), ("x", pa.float64())])
    on_postgres.sql("CREATE TABLE rows (id bigint, x real)")
    sink, fence = ready(sink_to(on_postgres, schema, may_round=True))
    values = [1.5, 1e300, -1e39, math.inf, math.nan, None, 0.1]
    records = [rec(n, id=n, x=x) for n, x in enumerate(values)]
    commit_all(sink, at_t0(0, records, schema), fence)
    found = dict(on_postgres.sql("SELECT id, x FROM rows"))
    assert sorted(found) == [0, 3, 4, 5, 6]
    assert found[3] == math.inf
    assert math.isnan(found[4])
    assert [offset for offset, _ in rejected(on_postgres)] == [1, 2]


def test_doubles_in_an_array_that_reals_can_t_hold(on_postgres: Place) -> None:
    schema = pa.schema([("id", pa.int64()), ("x", pa.list_(pa.float64()))])
    on_postgres.sql("CREATE TABLE rows (id bigint, x real[])")
    sink, fence = ready(sink_to(on_postgres, schema, may_round=True))
    values = [[1.5, None], [0.0, 1e39], [-1e-50], None, [math.inf, 1e-45]]
    records = [rec(n, id=n, x=x) for n, x in enumerate(values)]
    commit_all(sink, at_t0(0, records, schema), fence)
    assert on_postgres.sql("SELECT id FROM rows ORDER BY id") == [(0,), (3,), (4,)]
    assert [offset for offset, _ in rejected(on_postgres)] == [1, 2]


def test_not_a_number_is_no_null(on_sqlite: Place) -> None:
    """sqlite3 would store NULL for it without a word."""
    schema = pa.schema([("id", pa.int64()), ("x", pa.float64())])
    sink, fence = ready(sink_to(on_sqlite, schema))
    values = [1.5, math.inf, -math.inf, math.nan, None]
    commit_all(sink, at_t0(0, [rec(n, id=n, x=x) for n, x in enumerate(values)], schema), fence)
    assert on_sqlite.sql("SELECT * FROM rows ORDER BY id") == [
        (0, 1.5), (1, math.inf), (2, -math.inf), (4, None)
    ]  # fmt: skip
    assert [offset for offset, _ in rejected(on_sqlite)] == [3]


def test_text_that_the_server_must_cast(on_postgres: Place) -> None:
    on_postgres.sql("CREATE TABLE rows (id bigint, name uuid)")
    sink, fence = ready(sink_to(on_postgres))
    uuids = ["6d0f0a4e-0000-4000-8000-000000000001", "no uuid", None]
    commit_all(sink, at_t0(0, [rec(n, id=n, name=one) for n, one in enumerate(uuids)]), fence)
    assert ids(on_postgres) == [0, 2]
    assert [offset for offset, _ in rejected(on_postgres)] == [1]
    assert "no uuid" in rejected(on_postgres)[0][1]


# -- values at the edges -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrow", "number", "good", "bad"),
    [
        (pa.timestamp("us"), pa.int64(),
         [-210_866_803_200_000_000],
         [-210_866_803_200_000_001, -(2**63), -(2**63) + 946_684_800_000_000]),
        (pa.timestamp("us", "UTC"), pa.int64(),
         [2**63 - 1 - 946_684_800_000_000 - 86_400_000_000_000],
         [-(2**63) + 1]),
        (pa.date32(), pa.int32(), [-2_440_588],
         [-2_440_589, -(2**31), -(2**31) + 10_957, 2**31 - 1]),
    ],
    ids=str,
)  # fmt: skip
def test_times_that_postgres_can_t_hold(
    on_postgres: Place, arrow: pa.DataType, number: pa.DataType, good: list[int], bad: list[int]
) -> None:
    """pgpq raises on some and makes '-infinity' of others: neither may reach the table."""
    schema = pa.schema([("id", pa.int64()), ("x", arrow)])
    sink, fence = ready(sink_to(on_postgres, schema))
    values = pa.array([*good, *bad], number).cast(arrow)
    what = at_t0(
        0, [Rec(n, ({"id": n},)) for n in range(len(values))], pa.schema([("id", pa.int64())])
    )
    commit_all(sink, replace(what, rows=what.rows.append_column("x", values)), fence)
    assert [n for (n,) in on_postgres.sql("SELECT id FROM rows ORDER BY id")] == list(
        range(len(good))
    )
    assert on_postgres.sql("SELECT COUNT(*) FROM rows WHERE NOT isfinite(x)") == [(0,)]
    rejected = [n for (n,) in on_postgres.sql('SELECT "offset" FROM oncely_rejects ORDER BY 1')]
    assert rejected == list(range(len(good), len(values)))


def test_a_time_too_early_within_an_array(on_postgres: Place) -> None:
    schema = pa.schema([("x", pa.list_(pa.timestamp("us")))])
    sink, fence = ready(sink_to(on_postgres, schema))
    days = pa.array([[0, None], [0, -(2**63)], None], pa.list_(pa.int64())).cast(
        schema.field(0).type
    )
    what = chunk({T0: (0, [Rec(n, ({},)) for n in range(3)])}, pa.schema([]))
    commit_all(sink, replace(what, rows=pa.table({"x": days})), fence)
    assert on_postgres.sql("SELECT x::text FROM rows") == [
        ('{"1970-01-01 00:00:00",NULL}',),
        (None,),
    ]
    assert on_postgres.sql('SELECT "offset" FROM oncely_rejects') == [(1,)]


def test_years_that_do_not_sort_as_text(on_sqlite: Place) -> None:
    schema = pa.schema([("id", pa.int64()), ("x", pa.timestamp("us", "UTC"))])
    sink, fence = ready(sink_to(on_sqlite, schema))
    values = pa.array([0, 2**60, -(2**60), None], pa.int64()).cast(schema.field(1).type)
    what = at_t0(0, [Rec(n, ({"id": n},)) for n in range(4)], pa.schema([("id", pa.int64())]))
    commit_all(sink, replace(what, rows=what.rows.append_column("x", values)), fence)
    assert on_sqlite.sql("SELECT id, x FROM rows ORDER BY id") == [
        (0, "1970-01-01T00:00:00.000000Z"), (3, None)
    ]  # fmt: skip
    assert on_sqlite.sql('SELECT "offset" FROM oncely_rejects ORDER BY 1') == [(1,), (2,)]


def test_json_has_no_nan(place: Place) -> None:
    schema = pa.schema([("id", pa.int64()), ("x", pa.struct([("a", pa.float64())]))])
    sink, fence = ready(sink_to(place, schema))
    numbers = [0.5, float("nan"), float("inf"), None]
    records = [Rec(n, ({"id": n, "x": {"a": a}},)) for n, a in enumerate(numbers)]
    commit_all(sink, at_t0(0, records, schema), fence)
    assert [n for (n,) in place.sql("SELECT id FROM rows ORDER BY id")] == [0, 3]
    assert place.sql('SELECT "offset" FROM oncely_rejects ORDER BY 1') == [(1,), (2,)]


def test_a_nul_inside_json(on_postgres: Place) -> None:
    """jsonb has no NUL; json keeps it as an escape."""
    schema = pa.schema([("id", pa.int64()), ("x", pa.struct([("a", pa.string())]))])
    sink, fence = ready(sink_to(on_postgres, schema))
    records = [Rec(n, ({"id": n, "x": {"a": a}},)) for n, a in enumerate(["fine", "a\x00b"])]
    commit_all(sink, at_t0(0, records, schema), fence)
    assert [n for (n,) in on_postgres.sql("SELECT id FROM rows")] == [0]
    assert on_postgres.sql('SELECT "offset" FROM oncely_rejects') == [(1,)]
