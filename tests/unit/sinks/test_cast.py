"""Nested values as JSON texts for a column."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from oncely.stores.sql.cast import cast_rows
from oncely.stores.sql.connection import ColumnFit

DECIMAL = pa.decimal128(10, 2)
DEEP = pa.struct(
    [("d", DECIMAL), ("l", pa.list_(DECIMAL)), ("m", pa.map_(DECIMAL, DECIMAL)), ("t", pa.string())]
)
ONE, NONE = Decimal("1.50"), None
VALUE = {"d": ONE, "l": [ONE, NONE], "m": [(ONE, ONE)], "t": 'a"é'}


def texts(value: Any, arrow: pa.DataType, cast: str | None) -> list[str | None]:
    rows = pa.table({"x": pa.array([value, None], arrow)})
    made, bad = cast_rows(rows, [ColumnFit("x", pa.string(), cast=cast)])
    assert not bad
    found: list[str | None] = made["x"].to_pylist()
    return found


@pytest.mark.parametrize("cast", ["json", "jsonb"])
def test_decimals_are_numbers_with_all_digits(cast: str) -> None:
    text = '{"d": 1.50, "l": [1.50, null], "m": {"1.50": 1.50}, "t": "a\\"é"}'
    assert texts(VALUE, DEEP, cast) == [text, None]
    assert json.loads(text, parse_float=Decimal)["d"] == ONE
    assert texts([[ONE]], pa.list_(pa.list_(DECIMAL)), cast) == ["[[1.50]]", None]


def test_texts_of_sqlite_keep_the_form_of_which_there_are_digests() -> None:
    text = '{"d": "1.50", "l": ["1.50", null], "m": {"1.50": "1.50"}, "t": "a\\"é"}'
    assert texts(VALUE, DEEP, None) == [text, None]


def test_infinity_beside_a_decimal_is_refused() -> None:
    arrow = pa.struct([("d", DECIMAL), ("f", pa.float64())])
    rows = pa.table({"x": pa.array([{"d": ONE, "f": float("inf")}], arrow)})
    _, bad = cast_rows(rows, [ColumnFit("x", pa.string(), cast="jsonb")])
    assert bad == {0: "column 'x': JSON has no NaN and no infinity"}
