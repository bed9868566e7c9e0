"""No value is rounded on its way into a column, unless the pipeline file allows it."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oncely.errors import TableMismatch
from oncely.kinds.sql.destination import check_table
from oncely.kinds.sql.sink import SqlSink
from oncely.stores.sql.cast import would_round
from tests.conftest import examples
from tests.sinktools import Place, Rec, at_t0, commit_all, open_sink, ready, sink_to

UTC = dt.UTC
MOMENT = dt.datetime(2024, 2, 29, 23, 59, 59, 600_000)


def sink_for(place: Place, column: str, arrow: pa.DataType, rounding: bool = False) -> SqlSink:
    place.sql(f"CREATE TABLE rows (id bigint, x {column})")
    return sink_to(place, pa.schema([("id", pa.int64()), ("x", arrow)]), may_round=rounding)


def written(place: Place, sink: SqlSink, values: list[Any]) -> tuple[list[Any], list[str]]:
    """What the column holds afterwards, and the reasons of rejects."""
    bound, fence = ready(sink)
    records = [Rec(n, ({"id": n, "x": value},)) for n, value in enumerate(values)]
    commit_all(bound, at_t0(0, records, sink.wanted.schema), fence)
    return (
        [x for (x,) in place.sql("SELECT x FROM rows ORDER BY id")],
        [x for (x,) in place.sql('SELECT reason FROM oncely_rejects ORDER BY "offset"')],
    )


LOSSY = [  # column, declared type, a value, what the column makes of it
    ("numeric(10,2)", pa.decimal128(18, 6), Decimal("1.234567"), Decimal("1.23")),
    ("numeric(10,2)", pa.decimal256(50, 6), Decimal("1.234567"), Decimal("1.23")),
    ("numeric(5,0)", pa.decimal128(5, 1), Decimal("1.6"), Decimal(2)),
    ("numeric(5,-2)", pa.int32(), 1234, Decimal(1200)),
    ("numeric(5,-2)", pa.decimal128(5, 0), Decimal(1234), Decimal(1200)),
    ("real", pa.float64(), 0.1, 0.1),
    ("timestamp(0) with time zone", pa.timestamp("us", "UTC"), MOMENT.replace(tzinfo=UTC),
     dt.datetime(2024, 3, 1, tzinfo=UTC)),
    ("timestamp(3) without time zone", pa.timestamp("us"), MOMENT, MOMENT),
    ("timestamp(3) without time zone", pa.timestamp("ns"), MOMENT, MOMENT),
    ("time(2) without time zone", pa.time32("ms"), dt.time(1, 2, 3, 456_000),
     dt.time(1, 2, 3, 460_000)),
    ("real[]", pa.list_(pa.float64()), [0.5], [0.5]),
    ("numeric(10,2)[]", pa.list_(pa.decimal128(10, 3)), [Decimal("0.125")], [Decimal("0.13")]),
    ("timestamp(0) with time zone[]", pa.list_(pa.timestamp("us", "UTC")),
     [MOMENT.replace(tzinfo=UTC)], [dt.datetime(2024, 3, 1, tzinfo=UTC)]),
]  # fmt: skip


@pytest.mark.parametrize(("column", "arrow", "value", "back"), LOSSY, ids=lambda v: str(v)[:40])
def test_a_column_that_would_round_is_refused(
    on_postgres: Place, column: str, arrow: pa.DataType, value: object, back: object
) -> None:
    sink = sink_for(on_postgres, column, arrow)
    for look in (check_table, open_sink, SqlSink.bind):
        with pytest.raises(TableMismatch, match="would be rounded") as caught:
            look(sink)
        assert f"'x' is {column}" in caught.value.message
        assert 'rounding = "allow"' in caught.value.way_out


@pytest.mark.parametrize(("column", "arrow", "value", "back"), LOSSY, ids=lambda v: str(v)[:40])
def test_rounding_that_is_allowed_is_done(
    on_postgres: Place, column: str, arrow: pa.DataType, value: object, back: object
) -> None:
    sink = sink_for(on_postgres, column, arrow, rounding=True)
    found, rejects = written(on_postgres, sink, [value])
    assert rejects == []
    assert found == [pytest.approx(back, rel=1e-7) if column == "real" else back]


EXACT = [
    ("numeric", pa.decimal128(38, 18), Decimal("0.000000000000000001")),
    ("numeric(10,2)", pa.decimal128(18, 2), Decimal("1.20")),
    ("numeric(10,2)", pa.decimal128(18, 0), Decimal(7)),
    ("numeric(10,2)", pa.int64(), -5),
    ("real", pa.float32(), 0.5),
    ("real", pa.int32(), 2**24),
    ("timestamp(3) with time zone", pa.timestamp("ms", "UTC"), MOMENT.replace(tzinfo=UTC)),
    ("timestamp(0) without time zone", pa.timestamp("s"), dt.datetime(2024, 1, 1)),
    ("timestamp(0) without time zone", pa.date32(), dt.date(2024, 1, 1)),
    ("timestamp(6) without time zone", pa.timestamp("us"), MOMENT),
    ("time(3) without time zone", pa.time32("ms"), dt.time(1, 2, 3, 456_000)),
]


@pytest.mark.parametrize(("column", "arrow", "value"), EXACT, ids=lambda v: str(v)[:40])
def test_a_column_that_holds_every_value_is_not(
    on_postgres: Place, column: str, arrow: pa.DataType, value: Any
) -> None:
    found, rejects = written(on_postgres, sink_for(on_postgres, column, arrow), [value])
    assert rejects == []
    if type(value) is dt.date:
        value = dt.datetime(value.year, value.month, value.day)
    assert found == [value]


@pytest.mark.parametrize("arrow", [pa.float64(), pa.float32()], ids=str)
def test_a_float_that_a_numeric_would_round_is_a_reject(
    on_postgres: Place, arrow: pa.DataType
) -> None:
    """Whether a double has more digits than a column is known of each value only."""
    sink = sink_for(on_postgres, "numeric(10,2)", arrow)
    values = [1.23, 1.234567, 0.1, None, -99.99, 0.005, 1e-9, 12345678.0]
    found, rejects = written(on_postgres, sink, values)
    assert found == [Decimal("1.23"), Decimal("0.10"), None, Decimal("-99.99"), Decimal(12345678)]
    assert len(rejects) == 3
    assert "'x'" in rejects[0]
    assert "1.234567 would be rounded to numeric(10,2)" in rejects[0]
    assert "sink.rounding" in rejects[0]


def test_floats_in_an_array_are_judged_too(on_postgres: Place) -> None:
    sink = sink_for(on_postgres, "numeric(10,2)[]", pa.list_(pa.float64()))
    found, rejects = written(on_postgres, sink, [[1.5, None], None, [1.5, 1.005], [], [2.25]])
    assert found == [[Decimal("1.50"), None], None, [], [Decimal("2.25")]]
    assert len(rejects) == 1


def test_floats_are_rounded_where_it_is_allowed(on_postgres: Place) -> None:
    sink = sink_for(on_postgres, "numeric(10,2)", pa.float64(), rounding=True)
    assert written(on_postgres, sink, [1.234567]) == ([Decimal("1.23")], [])


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.floats(allow_nan=False, allow_infinity=False)
        | st.integers(-(10**15), 10**15).map(lambda n: n / 100)
        | st.integers(-(10**6), 10**6).map(lambda n: n / 1000)
        | st.none()
    ),
    st.integers(-3, 8),
    st.sampled_from([pa.float64(), pa.float32()]),
)
def test_digits_are_counted_as_in_the_text_of_the_float(
    values: list[float | None], scale: int, arrow: pa.DataType
) -> None:
    column = pa.chunked_array([pa.array(values, pa.float64()).cast(arrow)])
    texts = column.cast(pa.string()).to_pylist()
    expected = [None if t is None else digits_after_the_point(t) > scale for t in texts]
    assert would_round(column, scale).to_pylist() == [e or False for e in expected]


def digits_after_the_point(text: str) -> int:
    """Of the number, without zeros at its end; less than none where it ends in zeros."""
    number = Decimal(text).normalize()
    return -(10**6) if not number or not number.is_finite() else -int(number.as_tuple().exponent)
