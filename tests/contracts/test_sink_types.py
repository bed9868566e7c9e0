"""Types: what goes in comes out, for every type that a decoder or a transform may bring."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from oncely.decode.schema import as_json
from oncely.errors import TableMismatch
from tests.sinktools import Place, Rec, at_t0, commit_all, open_sink, ready, sink_to

UTC = dt.UTC
MOMENT = dt.datetime(2024, 2, 29, 23, 59, 59, 123456)
EARLY = dt.datetime(1, 1, 1)
LATE = dt.datetime(9999, 12, 31, 23, 59, 59, 999999)

# (Arrow type, values, what PostgreSQL gives back, what SQLite gives back); None: as given
TYPES: dict[str, tuple[pa.DataType, list[Any], list[Any] | None, list[Any] | None]] = {
    "bool": (pa.bool_(), [True, False], None, [1, 0]),
    "int8": (pa.int8(), [-128, 127], None, None),
    "int16": (pa.int16(), [-(2**15), 2**15 - 1], None, None),
    "int32": (pa.int32(), [-(2**31), 2**31 - 1], None, None),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1, 0], None, None),
    "uint8": (pa.uint8(), [0, 255], None, None),
    "uint16": (pa.uint16(), [0, 2**16 - 1], None, None),
    "uint32": (pa.uint32(), [0, 2**32 - 1], None, None),
    "uint64": (pa.uint64(), [0, 2**63 - 1], [Decimal(0), Decimal(2**63 - 1)], None),
    "float16": (pa.float16(), [0.5, -2.0], None, None),
    "float32": (pa.float32(), [0.5, -(2.0**20), float("inf")], None, None),
    "float64": (pa.float64(), [0.1, 1e300, -0.0, float("-inf")], None, None),
    "string": (pa.string(), ["", "plain", 'é 😀 \\ " \n\t\r', "\\N", "x" * 100_000], None, None),
    "large_string": (pa.large_string(), ["a"], None, None),
    "binary": (pa.binary(), [b"", b"\x00\xff\\x"], None, None),
    "large_binary": (pa.large_binary(), [b"\x00"], None, None),
    "date": (
        pa.date32(),
        [MOMENT.date(), EARLY.date(), LATE.date()],
        None,
        ["2024-02-29", "0001-01-01", "9999-12-31"],
    ),
    "date64": (pa.date64(), [MOMENT.date()], None, ["2024-02-29"]),
    "timestamp": (
        pa.timestamp("us"),
        [MOMENT, EARLY, LATE, dt.datetime(1969, 12, 31, 23, 59, 59)],
        None,
        ["2024-02-29T23:59:59.123456", "0001-01-01T00:00:00.000000",
         "9999-12-31T23:59:59.999999", "1969-12-31T23:59:59.000000"],
    ),
    "instant": (
        pa.timestamp("us", "UTC"),
        [MOMENT.replace(tzinfo=UTC), EARLY.replace(tzinfo=UTC)],
        None,
        ["2024-02-29T23:59:59.123456Z", "0001-01-01T00:00:00.000000Z"],
    ),
    "zoned": (
        pa.timestamp("us", "Asia/Tokyo"),
        [MOMENT.replace(tzinfo=UTC)],
        None,
        ["2024-02-29T23:59:59.123456Z"],
    ),
    "seconds": (pa.timestamp("s"), [dt.datetime(2024, 1, 1)], None, ["2024-01-01T00:00:00.000000"]),
    "nanoseconds": (pa.timestamp("ns"), [MOMENT], None, ["2024-02-29T23:59:59.123456"]),
    "time": (pa.time64("us"), [dt.time(23, 59, 59, 5), dt.time(0)], None,
             ["23:59:59.000005", "00:00:00.000000"]),
    "decimal": (
        pa.decimal128(10, 2),
        [Decimal("0.00"), Decimal("-1.20"), Decimal("12345678.90")],
        None,
        ["0.00", "-1.20", "12345678.90"],
    ),
    "tiny decimal": (pa.decimal128(38, 10), [Decimal("1E-10")], None, ["0.0000000001"]),
    "great decimal": (pa.decimal128(38, 0), [Decimal(10**37)], None, [str(10**37)]),
    "wide decimal": (pa.decimal256(50, 2), [Decimal("1.20")], None, ["1.20"]),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"], None, None),
    "null": (pa.null(), [None], None, None),
    "ints": (pa.list_(pa.int32()), [[1, None, 3], []], None, ["[1, null, 3]", "[]"]),
    "texts": (
        pa.list_(pa.string()), [["", 'a"b\\c,{}', None, "NULL"]], None,
        [json.dumps(["", 'a"b\\c,{}', None, "NULL"])],
    ),
    "bools": (pa.list_(pa.bool_()), [[True, None]], None, ["[true, null]"]),
    "bytes": (pa.list_(pa.binary()), [[b"\x00\xff", None]], None, ['["AP8=", null]']),
    "doubles": (pa.list_(pa.float64()), [[0.1, None]], None, ["[0.1, null]"]),
    "decimals": (
        pa.list_(pa.decimal128(5, 2)), [[Decimal("-1.20"), None]], None, ['["-1.20", null]'],
    ),
    "great ints": (pa.list_(pa.uint64()), [[2**64 - 1]], [[Decimal(2**64 - 1)]], None),
    "dates": (pa.list_(pa.date32()), [[MOMENT.date()]], None, ['["2024-02-29"]']),
    "times": (pa.list_(pa.timestamp("us")), [[MOMENT]], None, ['["2024-02-29T23:59:59.123456"]']),
    "instants": (
        pa.list_(pa.timestamp("us", "UTC")), [[MOMENT.replace(tzinfo=UTC), None], []], None,
        ['["2024-02-29T23:59:59.123456+00:00", null]', "[]"],
    ),
    "lists of lists": (pa.list_(pa.list_(pa.int32())), [[[1], []]], None, ["[[1], []]"]),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.string()), ("c", pa.list_(pa.float64()))]),
        [{"a": 1, "b": "é", "c": [0.5]}, {"a": None, "b": None, "c": None}],
        None,
        ['{"a": 1, "b": "é", "c": [0.5]}', '{"a": null, "b": null, "c": null}'],
    ),
    "struct of everything": (
        pa.struct([
            ("day", pa.date32()), ("at", pa.timestamp("us", "UTC")), ("time", pa.time64("us")),
            ("cost", pa.decimal128(20, 8)), ("raw", pa.binary()), ("yes", pa.bool_()),
        ]),
        [{"day": MOMENT.date(), "at": MOMENT.replace(tzinfo=UTC), "time": dt.time(1, 2, 3),
          "cost": Decimal("0.00000001"), "raw": b"\xff", "yes": True}],
        [{"day": "2024-02-29", "at": "2024-02-29T23:59:59.123456+00:00", "time": "01:02:03",
          "cost": 1e-08, "raw": "/w==", "yes": True}],
        ['{"day": "2024-02-29", "at": "2024-02-29T23:59:59.123456+00:00", "time": "01:02:03",'
         ' "cost": "0.00000001", "raw": "/w==", "yes": true}'],
    ),
    "map": (
        pa.map_(pa.string(), pa.int32()), [[("k", 1), ("", None)], []],
        [{"k": 1, "": None}, {}], ['{"k": 1, "": null}', "{}"],
    ),
    "map of numbers": (
        pa.map_(pa.int32(), pa.string()), [[(1, "a")]], [{"1": "a"}], ['{"1": "a"}'],
    ),
    "map of days": (
        pa.map_(pa.date32(), pa.string()), [[(MOMENT.date(), "a")]],
        [{"2024-02-29": "a"}], ['{"2024-02-29": "a"}'],
    ),
}  # fmt: skip


def values_back(place: Place, column: str = "x") -> list[Any]:
    return [value for (value,) in place.sql(f"SELECT {column} FROM rows ORDER BY id")]


@pytest.mark.parametrize("name", TYPES)
def test_a_created_table_gives_back_what_it_was_given(place: Place, name: str) -> None:
    arrow, values, from_postgres, from_sqlite = TYPES[name]
    schema = pa.schema([("id", pa.int64()), ("x", arrow)])
    given = [*values, None]
    sink, fence = ready(sink_to(place, schema))
    records = [Rec(n, ({"id": n},)) for n in range(len(given))]
    what = at_t0(0, records, pa.schema([("id", pa.int64())]))
    column = pa.array(given, pa.string()).cast(arrow) if name == "dictionary" else pa.array(
        given, arrow)  # fmt: skip
    what = replace(what, rows=what.rows.append_column("x", column))
    commit_all(sink, what, fence)
    back = from_postgres if place.is_postgres else from_sqlite
    found = values_back(place)
    if name == "great ints" and not place.is_postgres:
        assert found == ["[18446744073709551615]", None]
    else:
        assert found == [*(values if back is None else back), None]
    assert place.sql("SELECT COUNT(*) FROM oncely_rejects") == [(0,)]


def test_nulls_everywhere(place: Place) -> None:
    schema = pa.schema([(name, arrow) for name, (arrow, *_) in TYPES.items()])
    sink, fence = ready(sink_to(place, schema))
    rows = pa.table({field.name: pa.nulls(3, field.type) for field in schema})
    what = at_t0(0, [Rec(n, ({},)) for n in range(3)], pa.schema([]))
    commit_all(sink, replace(what, rows=rows), fence)
    assert place.sql("SELECT * FROM rows") == [(None,) * len(TYPES)] * 3


@pytest.mark.parametrize("arrow", [pa.duration("us"), pa.month_day_nano_interval()], ids=str)
def test_a_type_that_no_table_can_hold_is_refused(place: Place, arrow: pa.DataType) -> None:
    with pytest.raises(TableMismatch, match=r"there is no .* type for") as caught:
        open_sink(sink_to(place, pa.schema([("x", arrow)])))
    assert "transform" in caught.value.way_out


# -- tables that somebody else made --------------------------------------------------------

FITS = [  # column, Arrow type, values, values back
    ("smallint", pa.int64(), [1, None], [1, None]),
    ("integer", pa.int64(), [2**31 - 1], [2**31 - 1]),
    ("bigint", pa.int8(), [1], [1]),
    ("double precision", pa.int64(), [2**53], [float(2**53)]),
    ("double precision", pa.float32(), [0.5], [0.5]),
    ("real", pa.float64(), [0.5, None], [0.5, None]),
    ("numeric", pa.float64(), [0.5, 1e300], [Decimal("0.5"), Decimal(10**300)]),
    ("numeric", pa.int64(), [-5], [Decimal(-5)]),
    ("numeric(12,3)", pa.decimal128(10, 2), [Decimal("1.25")], [Decimal("1.250")]),
    ("numeric(12,3)", pa.decimal256(50, 2), [Decimal("1.25")], [Decimal("1.250")]),
    ("character varying(5)", pa.string(), ["abcde"], ["abcde"]),
    ("character(5)", pa.string(), ["abc"], ["abc  "]),
    ("uuid", pa.string(), ["6d0f0a4e-0000-4000-8000-000000000001", None], None),
    ("jsonb", pa.string(), ['{"a": [1, 2.50]}'], [{"a": [1, 2.5]}]),
    ("json", pa.struct([("a", pa.int8())]), [{"a": 1}], [{"a": 1}]),
    ("inet", pa.string(), ["10.0.0.1"], None),
    ("interval", pa.string(), ["1 day"], [dt.timedelta(days=1)]),
    ("timestamp(0) with time zone", pa.timestamp("us", "UTC"),
     [dt.datetime(2024, 1, 1, 1, 1, 1, 600000, UTC)], [dt.datetime(2024, 1, 1, 1, 1, 2, 0, UTC)]),
    ("timestamp without time zone", pa.date32(), [MOMENT.date()], [dt.datetime(2024, 2, 29)]),
    ("mood", pa.string(), ["glad", None], ["glad", None]),
    ("mood[]", pa.list_(pa.string()), [["glad", None], []], None),
    ("uuid[]", pa.list_(pa.string()), [["6d0f0a4e-0000-4000-8000-000000000001"]], None),
    ("numeric[]", pa.list_(pa.float64()), [[0.5, None]], [[Decimal("0.5"), None]]),
    ("timestamp with time zone[]", pa.list_(pa.timestamp("us", "UTC")),
     [[MOMENT.replace(tzinfo=UTC)]], [[MOMENT.replace(tzinfo=UTC)]]),
    ("bigint[]", pa.list_(pa.int16()), [[1, None]], [[1, None]]),
    ("positive", pa.string(), ["5"], [5]),
]  # fmt: skip


@pytest.mark.parametrize(("column", "arrow", "values", "back"), FITS, ids=lambda v: str(v)[:40])
def test_columns_of_an_existing_table(
    on_postgres: Place, column: str, arrow: pa.DataType, values: list[Any], back: list[Any] | None
) -> None:
    on_postgres.sql("CREATE TYPE mood AS ENUM ('glad', 'so so')")
    on_postgres.sql("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    on_postgres.sql(f"CREATE TABLE rows (id bigint, x {column})")
    schema = pa.schema([("id", pa.int64()), ("x", arrow)])
    sink, fence = ready(sink_to(on_postgres, schema, may_round=True))
    records = [Rec(n, ({"id": n, "x": value},)) for n, value in enumerate(values)]
    commit_all(sink, at_t0(0, records, schema), fence)
    assert on_postgres.sql("SELECT COUNT(*) FROM oncely_rejects") == [(0,)]
    found = values_back(on_postgres)
    if back is None:
        found = [str(v) if not isinstance(v, list) else [e and str(e) for e in v]
                 for v in found if v is not None]  # fmt: skip
        text = values_back(on_postgres, "x::text")
        assert [v is None for v in text] == [v is None for v in values]
        if column == "mood[]":
            assert text == ["{glad,NULL}", "{}"]
        else:
            assert found == [v for v in values if v is not None]
    else:
        assert found == back


def test_a_column_of_json_has_the_type_of_nested_values(place: Place) -> None:
    nested = pa.struct([("d", pa.decimal128(10, 2))])
    json_ = as_json(pa.field("x", pa.string()))
    schema = pa.schema([("id", pa.int64()), json_, ("n", nested)])
    sink, fence = ready(sink_to(place, schema))
    values = ['{"a":[1,1.50]}', "7", None]
    records = [Rec(n, ({"id": n, "x": one, "n": {"d": Decimal("1.50")}},))
               for n, one in enumerate(values)]  # fmt: skip
    commit_all(sink, at_t0(0, records, schema), fence)
    if place.kind == "sqlite":
        assert values_back(place) == values
        return
    assert place.sql("SELECT DISTINCT pg_typeof(x)::text, pg_typeof(n)::text FROM rows") == [
        ("jsonb", "jsonb")
    ]
    assert values_back(place, "x::text") == ['{"a": [1, 1.50]}', "7", None]
    assert values_back(place, "n::text") == ['{"d": 1.50}'] * 3


@pytest.mark.parametrize(
    ("column", "arrow"),
    [
        ("integer", pa.string()),
        ("text", pa.int64()),
        ("boolean", pa.int8()),
        ("date", pa.timestamp("us")),
        ("timestamp with time zone", pa.timestamp("us")),
        ("timestamp without time zone", pa.timestamp("us", "UTC")),
        ("uuid", pa.int64()),
        ("integer", pa.float64()),
        ("integer[]", pa.int64()),
        ("integer", pa.list_(pa.int64())),
        ("integer[]", pa.list_(pa.string())),
        ("text", pa.struct([("a", pa.int8())])),
        ("numeric", pa.string()),
    ],
    ids=str,
)
def test_what_would_lose_its_meaning_is_refused(
    on_postgres: Place, column: str, arrow: pa.DataType
) -> None:
    on_postgres.sql(f"CREATE TABLE rows (x {column})")
    with pytest.raises(TableMismatch, match=f"column 'x' is {column.replace('[', '.')[:4]}"):
        open_sink(sink_to(on_postgres, pa.schema([("x", arrow)])))


@pytest.mark.parametrize(
    ("column", "arrow"),
    [
        ("INTEGER", pa.string()),
        ("INT", pa.float64()),
        ("TEXT", pa.int64()),
        ("TEXT", pa.binary()),
        ("BLOB", pa.string()),
        ("REAL", pa.string()),
        ("REAL", pa.decimal128(5, 2)),
    ],
    ids=str,
)
def test_what_would_lose_its_meaning_is_refused_by_sqlite(
    on_sqlite: Place, column: str, arrow: pa.DataType
) -> None:
    on_sqlite.sql(f"CREATE TABLE rows (x {column}) STRICT")
    with pytest.raises(TableMismatch, match=f"column 'x' is {column}"):
        open_sink(sink_to(on_sqlite, pa.schema([("x", arrow)])))


def test_columns_of_any_type_and_integers_as_reals(on_sqlite: Place) -> None:
    on_sqlite.sql("CREATE TABLE rows (id INT, any_text ANY, any_int ANY, x REAL) STRICT")
    schema = pa.schema(
        [("id", pa.int64()), ("any_text", pa.string()), ("any_int", pa.int8()), ("x", pa.int64())]
    )
    sink, fence = ready(sink_to(on_sqlite, schema))
    record = Rec(0, ({"id": 1, "any_text": "12", "any_int": 12, "x": 2**53},))
    commit_all(sink, at_t0(0, [record], schema), fence)
    assert on_sqlite.sql("SELECT *, typeof(any_text), typeof(any_int) FROM rows") == [
        (1, "12", 12, float(2**53), "text", "integer")
    ]
