"""What is published, judged by the reader's own rules."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from demo import records
from demo.rules import row_of

MANY = 20_000


@pytest.fixture(scope="module")
def published() -> list[tuple[bool, records.Record]]:
    return list(records.records(islice(records.flights(), MANY)))


def test_there_are_as_many_flights_as_the_table_is_known_for():
    ids = [flight["id"] for flight in records.flights()]
    assert ids == list(range(1, 336_777))


def test_what_is_missing_in_the_table_is_null_and_never_a_word():
    found = list(islice(records.flights(), MANY))
    assert any(flight["dep_delay"] is None for flight in found)
    assert any(flight["tailnum"] is None for flight in found)
    assert not any("NA" in flight.values() for flight in found)


def test_good_ones_are_rows_and_broken_ones_are_none(published):
    for is_good, (_, value) in published:
        assert (row_of(value) is not None) == is_good, value


@pytest.mark.parametrize("kind", records.BROKEN)
def test_each_kind_of_broken_record_is_broken_by_that_alone(kind):
    flight = next(records.flights())
    assert row_of(records._dumps(flight)) is not None
    assert row_of(records.BROKEN[kind](flight)) is None


def test_every_kind_is_there_and_they_are_few(published):
    broken = [value for is_good, (_, value) in published if not is_good]
    assert len(broken) >= 2 * len(records.BROKEN)
    assert len(broken) < 0.01 * len(published)


def test_ids_tell_records_apart(published):
    ids = [row_of(value)[0] for is_good, (_, value) in published if is_good]
    assert len(set(ids)) == len(ids) == MANY


def test_odd_records_hold_line_breaks_and_are_good(published):
    odd = [value for is_good, (_, value) in published if is_good and b"\n" in value]
    assert len(odd) == MANY // 1_000
    assert all(json.loads(value)["note"].startswith("line\nbreak") for value in odd)


def test_aborted_records_would_be_recognised(published):
    contents = [record for _, record in published[:600]]
    for _, value in records._never_to_be_seen(iter(contents)):
        row = row_of(value)
        assert row is None or (row[0] < 0 and row[3] == "ABORTED")
