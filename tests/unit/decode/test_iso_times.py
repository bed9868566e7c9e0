from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from oncely.decode.times import (
    bad_timestamps,
    dates,
    is_too_fine,
    parse_date,
    parse_timestamp,
    timestamps,
)

ZONED, LOCAL = pa.timestamp("us", "UTC"), pa.timestamp("us")


def micros(*parts: int) -> int:
    return round(
        (datetime(*parts, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1e6
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2013-01-01T05:06:07Z", micros(2013, 1, 1, 5, 6, 7)),
        ("2013-01-01 05:06:07", micros(2013, 1, 1, 5, 6, 7)),
        ("2013-01-01T05:06", micros(2013, 1, 1, 5, 6)),
        ("2013-01-01T05", micros(2013, 1, 1, 5)),
        ("2013-01-01", micros(2013, 1, 1)),
        ("2013-01-01T05:06:07+05:06", micros(2013, 1, 1, 0, 0, 7)),
        ("2013-01-01T05:06:07-0130", micros(2013, 1, 1, 6, 36, 7)),
        ("2013-01-01T05:06:07+01", micros(2013, 1, 1, 4, 6, 7)),
        ("2013-01-01T05:06:07.5Z", micros(2013, 1, 1, 5, 6, 7, 500_000)),
        ("2013-01-01T05:06:07.1234569Z", micros(2013, 1, 1, 5, 6, 7, 123_456)),
        ("1969-12-31T23:59:59.999999999Z", -1),
        ("0001-01-01T00:00:00Z", -62_135_596_800_000_000),
        ("9999-12-31T23:59:59.999999Z", 253_402_300_799_999_999),
    ],
)
def test_iso_texts_are_instants_and_without_an_offset_they_are_utc(text: str, at: int) -> None:
    assert parse_timestamp(text, zoned=True) == at
    for others in ([], ["2013-01-01T05:06:07Z"], ["2013-01-01T05:06:07"], ["2013-01-01"]):
        for texts in ([text, *others], [None, *others, None, text]):
            column = timestamps(pa.array(texts, pa.string()), ZONED)
            assert column.type == ZONED
            assert column.view(pa.int64())[texts.index(text)].as_py() == at


@pytest.mark.parametrize(
    "text",
    [
        "", "now", "2013", "2013-13-01", "2013-02-29T00:00:00Z", "2013-01-01T24:00:00Z",
        "2013-01-01T23:59:60Z", "0000-01-01T00:00:00Z", "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01", "10000-01-01T00:00:00Z", "2013-01-01T00:00:00.1234567890Z",
        "2013-01-01T00:00:00+24:00", "2013-01-01T00:00:00 Z", "2013-01-01Z", "2013-01-01T00:00:00z",
        "2013-01-01t00:00:00Z", "2013-1-1T0:0:0Z", "20130101T000000Z", " 2013-01-01", "1357000000",
    ],
)  # fmt: skip
def test_what_is_no_instant_is_refused_alone_and_in_a_column(text: str) -> None:
    assert parse_timestamp(text, zoned=True) is None
    good = ["2013-01-01T05:06:07Z", "2013-01-01", None]
    for texts in ([text], [text, *good], [*good, text]):
        column = pa.array(texts, pa.string())
        with pytest.raises(pa.ArrowInvalid):
            timestamps(column, ZONED)
        assert bad_timestamps(column, ZONED) == [texts.index(text)]


def test_a_timestamp_without_time_zone_takes_no_offset() -> None:
    assert parse_timestamp("2013-01-01T05:06:07", zoned=False) == micros(2013, 1, 1, 5, 6, 7)
    assert parse_timestamp("2013-01-01T05:06:07Z", zoned=False) is None
    texts = pa.array(["2013-01-01T05:06:07.123456789", "2013-01-01"])
    assert timestamps(texts, LOCAL).to_pylist() == [
        datetime(2013, 1, 1, 5, 6, 7, 123_456),
        datetime(2013, 1, 1),
    ]
    with pytest.raises(pa.ArrowInvalid):
        timestamps(pa.array(["2013-01-01T05:06:07", "2013-01-01T05:06:07+01:00"]), LOCAL)


def test_dates_are_days_and_nothing_else() -> None:
    assert parse_date("1970-01-02") == 1
    assert dates(pa.array(["1970-01-02", None])).cast(pa.int32()).to_pylist() == [1, None]
    for text in ("0000-12-31", "2013-02-29", "2013-01-01T00:00:00Z", "2013-1-1", "", "２013-01-01"):
        assert parse_date(text) is None
        with pytest.raises(pa.ArrowInvalid):
            dates(pa.array(["2013-01-01", text]))


def test_empty_and_null_columns() -> None:
    assert timestamps(pa.array([], pa.string()), ZONED).type == ZONED
    assert timestamps(pa.array([None, None], pa.string()), ZONED).to_pylist() == [None, None]
    assert bad_timestamps(pa.array([None], pa.string()), ZONED) == []
    assert dates(pa.array([], pa.string())).to_pylist() == []


FINE = {
    "2013-01-01T05:06:07.1234567Z": True,
    "2013-01-01T05:06:07.000000001": True,
    "1500-01-01T05:06:07.123456789+01:00": True,  # beyond Arrow's nanoseconds
    "2013-01-01T05:06:07.123456Z": False,
    "2013-01-01T05:06:07.123456000Z": False,
    "2013-01-01T05:06:07.1234560+01": False,
}


@pytest.mark.parametrize("text", FINE)
def test_digits_beyond_microseconds_are_refused_alone_and_in_a_column(text: str) -> None:
    for others in ([], ["2013-01-01"], ["2013-01-01T05:06:07.5Z", None]):
        texts = [*others, text, *others]
        column = pa.array(texts, pa.string())
        cut = timestamps(column, ZONED)
        assert cut[len(others)].value == parse_timestamp(text, zoned=True)
        assert is_too_fine(text) is FINE[text]
        if FINE[text]:
            with pytest.raises(pa.ArrowInvalid):
                timestamps(column, ZONED, rounding=False)
        else:
            assert timestamps(column, ZONED, rounding=False) == cut
        bad = bad_timestamps(column, ZONED, rounding=False)
        assert bad == ([len(others)] if FINE[text] else [])
