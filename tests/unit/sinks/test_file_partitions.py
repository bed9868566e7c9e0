"""Partition columns and paths: which values, which directories, what is refused."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oncely.decode.infer import InferringJson
from oncely.decode.reference import parse_object
from oncely.errors import ConfigError
from oncely.kinds.partitions import (
    NO_TIME,
    EventTime,
    FileNames,
    PartitionColumn,
    Splitter,
    check_types,
    directory,
    encoded,
    parse_partition_by,
    split,
)
from oncely.stores.objects.root import below

HIVE = "__HIVE_DEFAULT_PARTITION__"
BY_HOUR = parse_partition_by(("date(ts)", "hour(ts)"))


def test_what_partition_by_says() -> None:
    assert parse_partition_by(("user", "date(ts)", " hour( ts ) ", "a.b")) == (
        PartitionColumn("user", "user", "column"),
        PartitionColumn("date", "ts", "date"),
        PartitionColumn("hour", "ts", "hour"),
        PartitionColumn("a.b", "a.b", "column"),
    )
    assert parse_partition_by(()) == ()


@pytest.mark.parametrize(
    "texts",
    [("a", "a"), ("date(x)", "date"), ("date(a)", "hour(b)"), ("day(x)",), ("date()",), ("",),
     (" ",), tuple("abcdefghi"), ("date(x)", "date(x)")],
)  # fmt: skip
def test_what_it_may_not_say(texts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"sink\.partition_by"):
        parse_partition_by(texts)


@pytest.mark.parametrize(
    ("arrow", "plain", "time"),
    [(pa.string(), True, True), (pa.int64(), True, True), (pa.uint8(), True, False),
     (pa.bool_(), True, False), (pa.date32(), True, True), (pa.float64(), False, True),
     (pa.float32(), False, False),
     (pa.timestamp("ms"), False, True), (pa.list_(pa.int64()), False, False),
     (pa.struct({"a": pa.int64()}), False, False), (pa.binary(), False, False)],
)  # fmt: skip
def test_types_are_looked_at_before_the_start(arrow: pa.DataType, plain: bool, time: bool) -> None:
    schema = pa.schema({"c": arrow})
    for text, fine in (("c", plain), ("date(c)", time)):
        columns = parse_partition_by((text,))
        if fine:
            check_types(schema, columns)
        else:
            with pytest.raises(ConfigError, match="'c' is"):
                check_types(schema, columns)
    with pytest.raises(ConfigError, match="no column 'other'"):
        check_types(schema, parse_partition_by(("other",)))


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array(["a", "", None, "é"]), ["a", "", None, "é"]),
        (pa.array([1, -2, None], pa.int32()), ["1", "-2", None]),
        (pa.array([True, False, None]), ["true", "false", None]),
        (pa.array([date(2026, 11, 21), None]), ["2026-11-21", None]),
        (pa.nulls(2), [None, None]),
    ],
)
def test_values_as_text(column: pa.Array, texts: list[str | None]) -> None:
    found = split(pa.table({"c": column}), parse_partition_by(("c",)))
    assert [found.groups[code][0] for code in found.codes] == texts
    assert found.rejected == []


@pytest.mark.parametrize("column", [pa.array([1.5, None]), pa.array([[1], None])])
def test_values_that_are_none(column: pa.Array) -> None:
    found = split(pa.table({"c": column}), parse_partition_by(("c",)))
    assert [row for row, _ in found.rejected] == [0]
    assert found.codes[0] == -1
    assert found.groups[found.codes[1]] == (None,)


AT = datetime(2026, 11, 21, 7, 59, 59, 999999, tzinfo=UTC)
BEFORE_1970 = datetime(1969, 12, 31, 23, 30, tzinfo=UTC)


@pytest.mark.parametrize("when", [AT, BEFORE_1970])
@pytest.mark.parametrize("form", ["us", "us UTC", "s", "ns", "text", "text with zone", "ms number"])
def test_event_times_of_all_kinds(when: datetime, form: str) -> None:
    micros = int((when - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000)
    column = {
        "us": pa.array([micros, None]).cast(pa.timestamp("us")),
        "us UTC": pa.array([micros, None]).cast(pa.timestamp("us", "UTC")),
        "s": pa.array([micros // 1_000_000, None]).cast(pa.timestamp("s")),
        "ns": pa.array([micros * 1000, None]).cast(pa.timestamp("ns")),
        "text": pa.array([when.replace(tzinfo=None).isoformat(), None]),
        "text with zone": pa.array([when.isoformat(), None]),
        "ms number": pa.array([micros // 1000, None]),
    }[form]
    found = split(pa.table({"ts": column}), BY_HOUR)
    assert found.rejected == []
    assert [found.groups[code] for code in found.codes] == [
        (when.date().isoformat(), f"{when.hour:02d}"),
        (None, None),
    ]
    assert found.times is not None
    assert abs(found.times[0] - micros) < 1_000_000
    assert found.times[1] == NO_TIME


def test_nanoseconds_before_1970_are_before_it() -> None:
    column = pa.array([-1, 0, None, -(2**63)], pa.timestamp("ns"))
    found = split(pa.table({"ts": column}), BY_HOUR)
    assert found.times is not None
    assert found.times.tolist() == [-1, 0, NO_TIME, -(2**63) // 1000]
    assert [found.groups[code] for code in found.codes[:2]] == [
        ("1969-12-31", "23"),
        ("1970-01-01", "00"),
    ]


def test_event_times_that_are_none() -> None:
    texts = pa.array(["2026-11-21T07", "yesterday", None, "2026-02-30", "2026-11-21"])
    found = split(pa.table({"ts": texts}), BY_HOUR)
    assert [row for row, _ in found.rejected] == [1, 3]
    assert found.codes.tolist()[1] == found.codes.tolist()[3] == -1
    assert found.groups[found.codes[4]] == ("2026-11-21", "00")
    numbers = pa.array([2**63 - 1, -(2**63), 0])
    found = split(pa.table({"ts": numbers}), BY_HOUR)
    assert [row for row, _ in found.rejected] == [0, 1]
    found = split(pa.table({"ts": [1.5, None, 3_600_000.0, float("inf"), -1e18]}), BY_HOUR)
    assert [row for row, _ in found.rejected] == [0, 3, 4]
    assert found.groups[found.codes[1]] == (None, None)
    assert found.groups[found.codes[2]] == ("1970-01-01", "01")


TIMES = ["null", "[]", "{}", "[null]", '{"a": []}', "[0]", '{"a": 1}', "true", "false", '""',
         '"2026-11-21"', '"2026-11-21T07:00:00+01:00"', '"0001-01-01T00:00:00+01:00"', '"x"',
         "0", "-0", "-0.0", "1.5", "1e3", "1e300", "-62135596800000", "-62135596800001",
         "253402300799999", "253402300800000", "253402300799999.5", "-62135596800000.0",
         ]  # fmt: skip


@pytest.mark.parametrize("text", TIMES)
def test_a_record_is_judged_as_its_row_is(text: str) -> None:
    record = f'{{"x": 1, "ts": {text}}}'.encode()
    column = pa.chunked_array([pa.array([record], pa.binary())])
    (part,) = InferringJson().infer(column, {}).parts
    refused = [why for _, why in split(part.rows, BY_HOUR).rejected]
    why = EventTime("ts")(parse_object(record))
    assert (why is not None) == bool(refused), (why, refused)
    assert why is None or why.startswith("event time 'ts'")


def test_only_the_date_or_the_hour() -> None:
    rows = pa.table({"ts": pa.array([0, 3_600_000, 86_400_000, None])})
    by_day = split(rows, parse_partition_by(("date(ts)",)))
    assert [by_day.groups[c] for c in by_day.codes] == [
        ("1970-01-01",), ("1970-01-01",), ("1970-01-02",), (None,)
    ]  # fmt: skip
    of_day = split(rows, parse_partition_by(("hour(ts)",)))
    assert [of_day.groups[c] for c in of_day.codes] == [("00",), ("01",), ("00",), (None,)]


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([None, "", "a", "b"]), st.integers(0, 3),
                           st.integers(0, 2)), max_size=8),
        max_size=4,
    )
)  # fmt: skip
def test_a_group_keeps_its_code(tables: list[list[tuple[str | None, int, int]]]) -> None:
    columns = parse_partition_by(("u", "hour(ts)", "n", "date(ts)"))
    splitter = Splitter(columns)
    code_of: dict[tuple[str | None, ...], int] = {}
    for rows in tables:
        found = splitter.split(
            pa.table(
                {
                    "u": pa.array([u for u, _, _ in rows], pa.string()),
                    "ts": pa.array([hour * 9 * 3_600_000 for _, hour, _ in rows], pa.int64()),
                    "n": pa.array([n for _, _, n in rows], pa.int64()),
                }
            )
        )
        for (u, hour, n), code in zip(rows, found.codes.tolist(), strict=True):
            day, of_day = divmod(hour * 9, 24)
            values = (u, f"{of_day:02d}", str(n), f"1970-01-0{day + 1}")
            assert splitter.values(code) == values
            assert code_of.setdefault(values, code) == code
    assert splitter.groups == len(code_of)


# -- paths -----------------------------------------------------------------------------------

HOSTILE = [
    "",
    ".",
    "..",
    HIVE,
    "%5F_HIVE_DEFAULT_PARTITION__",
    "~empty",
    "%2E",
    "a/b",
    "a\\b",
    "\0",
]
LONG = st.text(min_size=190, max_size=400) | st.integers(0, 3).map(lambda n: "é" * 300 + str(n))
VALUES = st.none() | st.text() | st.sampled_from(HOSTILE) | LONG


@settings(deadline=None)
@given(st.lists(VALUES, min_size=2, max_size=2, unique=True), st.sampled_from([60, 87, 200]))
@example([None, HIVE], 200)
@example(["", "~empty"], 200)
def test_two_values_never_share_a_directory(values: list[str | None], longest: int) -> None:
    one, other = (encoded(value, longest) for value in values)
    assert one != other
    for value, name in zip(values, (one, other), strict=True):
        assert re.fullmatch(r"[A-Za-z0-9_.\-%~]+", name)
        assert len(name) <= longest
        assert name not in (".", "..")
        if value and "~" not in name and value != HIVE:
            assert unquote(name) == value


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1), VALUES), max_size=8), st.text(), st.text())
def test_a_path_stays_below_the_root(
    levels: list[tuple[str, str | None]], topic: str, attempt: str
) -> None:
    columns = [PartitionColumn(name, name, "column") for name, _ in levels]
    folder = directory(columns, [value for _, value in levels])
    assert all(len(level) <= 200 and "=" in level for level in folder.split("/") if folder)
    names = FileNames(2**31, 2**40, attempt)
    name = names.name((topic, 2**31, 2**63 - 1), "parquet")
    assert below(f"{folder}/{name}" if folder else name)
    assert names.name((topic, 2**31, 2**63 - 1), "parquet") != name


@pytest.mark.parametrize("levels", range(1, 9))
def test_the_longest_path_is_not_too_long(levels: int) -> None:
    columns = [PartitionColumn("0" * 200, "0", "column")] * levels
    names = FileNames(2**31, 2**40, "0" * 100)
    name = names.name(("0" * 249, 2**31, 2**63 - 1), "parquet")
    assert below(f"{directory(columns, ['0' * 4_096] * levels)}/{name}")


def test_names_are_in_order_of_offsets() -> None:
    offsets = [0, 9, 10, 99, 2**40, 2**63 - 2]
    names = [FileNames(9 - n, n, "t").name(("logs", 3, o), "avro") for n, o in enumerate(offsets)]
    assert names == sorted(names)
    assert "logs-3-" in names[0]
    assert FileNames(1, 1, "t").name(None, "avro").startswith("rows-")


def test_reasons_do_not_repeat_a_whole_value() -> None:
    found = split(pa.table({"ts": ["x" * 10_000]}), BY_HOUR)
    assert len(found.rejected[0][1]) < 200
    assert np.all(found.codes == -1)


def test_a_value_that_is_too_long_for_the_manifest_is_a_reject() -> None:
    rows = pa.table({"user": ["ann", "x" * 4_097, None, "y" * 4_096]})
    found = split(rows, parse_partition_by(["user"]))
    ((row, reason),) = found.rejected
    assert row == 1
    assert "more than 4,096 bytes" in reason
    kept = [found.groups[code] for code in found.codes[[0, 2, 3]]]
    assert kept == [("ann",), (None,), ("y" * 4_096,)]
