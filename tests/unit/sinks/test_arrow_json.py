"""The meaning of each Arrow type in JSON, and the types that have none."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pytest

from oncely.kinds.kafka import format as record_format

UTC_TIME = dt.datetime(2024, 1, 31, 23, 59, 59, 123456, dt.UTC)
PLAIN_TIME = UTC_TIME.replace(tzinfo=None)

MEANINGS = [
    (pa.array([True, False, None]), "[true,false,null]"),
    (pa.array([None, None]), "[null,null]"),
    (pa.array([2**63 - 1, -(2**63)]), "[9223372036854775807,-9223372036854775808]"),
    (pa.array([2**64 - 1], pa.uint64()), "[18446744073709551615]"),
    (
        pa.array([1.5, float("nan"), float("inf"), float("-inf"), None]),
        '[1.5,"NaN","Infinity","-Infinity",null]',
    ),
    (pa.array([0.1], pa.float32()), "[0.10000000149011612]"),
    (pa.array([Decimal("12.30"), None], pa.decimal128(10, 2)), '["12.30",null]'),
    (pa.array(['é"\\\n\x01\u2028', None]), None),
    (pa.array(["a", "b", "a"]).dictionary_encode(), '["a","b","a"]'),
    (pa.array([b"\x00\xff", None], pa.binary()), '["AP8=",null]'),
    (pa.array([b"ab"], pa.binary(2)), '["YWI="]'),
    (pa.array([dt.date(2024, 1, 31), None]), '["2024-01-31",null]'),
    (pa.array([dt.date(2024, 1, 31)], pa.date64()), '["2024-01-31"]'),
    (pa.array([86399], pa.time32("s")), '["23:59:59"]'),
    (pa.array([86399123456], pa.time64("us")), '["23:59:59.123456"]'),
    (pa.array([UTC_TIME, None], pa.timestamp("us", "UTC")), '["2024-01-31T23:59:59.123456Z",null]'),
    (
        pa.array([UTC_TIME], pa.timestamp("us", "America/New_York")),
        '["2024-01-31T23:59:59.123456Z"]',
    ),
    (pa.array([PLAIN_TIME], pa.timestamp("us")), '["2024-01-31T23:59:59.123456"]'),
    (pa.array([1], pa.timestamp("ns")), '["1970-01-01T00:00:00.000000001"]'),
    (pa.array([[1, None], [], None]), "[[1,null],[],null]"),
    (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), "[[1,2],null]"),
    (pa.array([[UTC_TIME]], pa.large_list(pa.timestamp("s", "UTC"))), '[["2024-01-31T23:59:59Z"]]'),
    (
        pa.array([{"a": 1, "b": [float("nan")]}, None, {"a": None, "b": None}]),
        '[{"a":1,"b":["NaN"]},null,{"a":null,"b":null}]',
    ),
    (
        pa.array([[("k", dt.date(2024, 1, 1))], None, []], pa.map_(pa.string(), pa.date32())),
        '[{"k":"2024-01-01"},null,{}]',
    ),
]


def encoded(rows: pa.Table) -> list[bytes]:
    """One text a row."""
    found = record_format.encoded(rows)
    found.validate(full=True)
    return found.to_pylist()


@pytest.mark.parametrize(("array", "text"), MEANINGS, ids=[str(a.type) for a, _ in MEANINGS])
def test_each_type_has_one_meaning(array: pa.Array, text: str | None) -> None:
    rows = pa.table({"v": array})
    assert not record_format.unfit(rows.schema)
    expected = json.loads(text) if text else array.to_pylist()
    for cut in (rows, pa.concat_tables([rows.slice(0, 1), rows.slice(1)]), rows.slice(1)):
        found = [json.loads(one)["v"] for one in encoded(cut)]
        assert found == expected[len(expected) - cut.num_rows :]
    if text:
        assert b",".join(encoded(rows)).replace(b'{"v":', b"").count(b" ") == 0


@pytest.mark.parametrize(
    ("number", "type_"),
    [
        (2**62, pa.timestamp("us", "UTC")),  # Arrow's text: the year 17036
        (-(2**62), pa.timestamp("us")),
        (2_932_897, pa.date32()),
        (86_400_000_000, pa.time64("us")),
    ],
)
def test_a_time_without_a_text_is_refused(number: int, type_: pa.DataType) -> None:
    column = pa.array([number], f"int{type_.bit_width}").cast(type_)
    for array in (column, pa.ListArray.from_arrays([0, 1], column)):
        with pytest.raises(ValueError, match="a time outside of the"):
            record_format.encoded(pa.table({"x": array}))


def test_an_object_has_the_columns_names_in_order() -> None:
    rows = pa.table({"b a": [1], "class": ["x"], 'ü"': [None], "f0": [2]})
    assert encoded(rows) == ['{"b a":1,"class":"x","ü\\"":null,"f0":2}'.encode()]


def test_nothing() -> None:
    assert encoded(pa.table({"v": pa.array([], pa.int8())})) == []


def test_many_rows_keep_their_order() -> None:
    numbers = list(range(45_000))
    assert encoded(pa.table({"v": numbers})) == [b'{"v":%d}' % n for n in numbers]


def test_line_feeds_of_values_are_no_ends_of_rows() -> None:
    rows = pa.table({"v": ["a\nb", "", "\n", None], "w\n": [1, 2, 3, 4]})
    assert encoded(rows) == [
        rb'{"v":"a\nb","w\n":1}', rb'{"v":"","w\n":2}', rb'{"v":"\n","w\n":3}',
        rb'{"v":null,"w\n":4}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    "type_",
    [
        pa.duration("us"),
        pa.month_day_nano_interval(),
        pa.map_(pa.int32(), pa.string()),
        pa.list_(pa.duration("s")),
        pa.struct([("a", pa.int8()), ("a", pa.int8())]),
        pa.dictionary(pa.int8(), pa.duration("s")),
        pa.dense_union([pa.field("a", pa.int8())]),
    ],
    ids=str,
)
def test_types_without_one_meaning(type_: pa.DataType) -> None:
    assert list(record_format.unfit(pa.schema([("v", type_)]))) == ["v"]


def test_two_columns_of_one_name() -> None:
    schema = pa.schema([("v", pa.int8()), ("v", pa.int8())])
    assert record_format.unfit(schema) == {"v": "two columns have this name"}


def test_decimals_are_numbers_if_asked() -> None:
    kind = pa.decimal128(10, 2)
    row = {"d": Decimal("1.50"), "s": {"d": Decimal("-0.10")}, "l": [Decimal("2.00"), None]}
    types = [("d", kind), ("s", pa.struct([("d", kind)])), ("l", pa.list_(kind))]
    rows = pa.Table.from_pylist([row], schema=pa.schema(types))
    assert record_format.encoded(rows).to_pylist() == [
        b'{"d":"1.50","s":{"d":"-0.10"},"l":["2.00",null]}'
    ]
    numbers = record_format.encoded(rows, "number").to_pylist()
    assert numbers == [b'{"d":1.50,"s":{"d":-0.10},"l":[2.00,null]}']
