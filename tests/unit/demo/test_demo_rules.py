"""The reader's rules, one by one."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from demo.rules import row_of

GOOD = {
    "id": 1,
    "carrier": "UA",
    "flight": 1545,
    "tailnum": "N14228",
    "origin": "EWR",
    "dest": "IAH",
    "time_hour": "2013-01-01T10:00:00Z",
    "dep_delay": 2.0,
    "arr_delay": 11.0,
    "distance": 1400,
}
ROW = (
    *(1, "UA", 1545, "N14228", "EWR", "IAH", datetime(2013, 1, 1, 10, tzinfo=UTC)),
    *(2.0, 11.0, 1400, False),
)


def with_(**change: object) -> bytes:
    return json.dumps({**GOOD, **change}).encode()


def test_a_flight_is_a_row():
    assert row_of(with_()) == ROW
    assert row_of(json.dumps(GOOD, indent=3).encode()) == ROW
    assert row_of(with_(more={"a": [1]})) == ROW


@pytest.mark.parametrize(("delay", "late"), [(15, False), (15.5, True), (None, None), (-3, False)])
def test_late_is_more_than_a_quarter_of_an_hour(delay, late):
    row = row_of(with_(dep_delay=delay))
    assert row[7] == delay
    assert row[-1] is late


def test_null_and_missing_are_null():
    assert row_of(b'{"id": 7}') == (7, *[None] * 10)
    assert row_of(with_(carrier=None))[1] is None


@pytest.mark.parametrize(
    "value",
    [
        *(None, b"", b" \n\t", b"null", b"[1]", b"7", b"{", b"{} {}", b"\xff", b'{"id": NaN}'),
        *(b'{"id": 1, "carrier": "a\nb"}', b'{"id": 1, "carrier": "\\ud800"}'),
        *(b'\xef\xbb\xbf{"id": 1}', b'{"id": 1, "x": Infinity}', b"{}"),
        with_(id=None),
        *(with_(id=one) for one in ("1", 1.0, True, 2**63, -(2**63) - 1)),
        *(with_(flight=one) for one in ("1545", 1545.5, 2**31, True)),
        *(with_(carrier=one) for one in (1, False, ["UA"], "U\0A")),
        *(with_(dep_delay=one) for one in ("2", True, 10**400)),
        b'{"id": 1, "arr_delay": 1e999}',
        *(
            with_(time_hour=one)
            for one in (1357034400, "2013-02-30T10:00:00Z", "2013-01-01T10:00:00Zzz")
        ),
    ],
)
def test_anything_else_is_broken(value):
    assert row_of(value) is None
