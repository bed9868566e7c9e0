"""The comparison: each kind of damage is counted as what it is, and as nothing else."""

from __future__ import annotations

import pytest

from demo.reader import Tables, Topic, compare, flights_before

FLIGHT = b'{"id": %d, "carrier": "UA", "dep_delay": 20}'


@pytest.fixture
def topic() -> Topic:
    made = Topic({0: 20, 1: 20})
    for number in range(10):
        made.add((number % 2, number), FLIGHT % number)
    made.add((0, 15), b"no json")
    made.add((1, 15), None)
    return made


@pytest.fixture
def tables(topic: Topic) -> Tables:
    return Tables(list(topic.good.values()), list(topic.broken.items()))


def counts(topic: Topic, tables: Tables) -> dict[str, int]:
    verdict = compare(topic, tables)
    names = ("lost", "duplicated", "changed", "unexpected")
    return {name: getattr(verdict, name) for name in names if getattr(verdict, name)}


def test_tables_that_agree_are_counted_and_nothing_is_wrong(topic, tables):
    verdict = compare(topic, tables)
    assert (verdict.records, verdict.good, verdict.rows, verdict.rejects) == (12, 10, 10, 2)
    assert counts(topic, tables) == {}
    assert verdict.examples == []


def test_a_missing_row_is_lost(topic, tables):
    del tables.rows[3]
    assert counts(topic, tables) == {"lost": 1}


def test_a_row_that_is_there_three_times_is_duplicated_twice(topic, tables):
    tables.rows += [tables.rows[3]] * 2
    assert counts(topic, tables) == {"duplicated": 2}


def test_a_row_with_another_value_is_changed(topic, tables):
    tables.rows[3] = (*tables.rows[3][:-1], not tables.rows[3][-1])
    assert counts(topic, tables) == {"changed": 1}


def test_a_row_that_belongs_to_no_flight_is_unexpected(topic, tables):
    tables.rows.append((-5, *[None] * 10))
    assert counts(topic, tables) == {"unexpected": 1}


def test_one_lost_and_one_twice_do_not_even_out(topic, tables):
    tables.rows[3] = tables.rows[4]
    assert counts(topic, tables) == {"lost": 1, "duplicated": 1}


def test_a_missing_reject_is_lost(topic, tables):
    del tables.rejects[0]
    assert counts(topic, tables) == {"lost": 1}


def test_a_second_reject_is_duplicated(topic, tables):
    tables.rejects.append(tables.rejects[0])
    assert counts(topic, tables) == {"duplicated": 1}


def test_a_reject_with_other_bytes_is_changed(topic, tables):
    place, value = tables.rejects[0]
    tables.rejects[0] = (place, value + b"!")
    assert counts(topic, tables) == {"changed": 1}


def test_a_reject_of_a_good_record_is_unexpected(topic, tables):
    tables.rejects.append(((0, 2), FLIGHT % 2))
    assert counts(topic, tables) == {"unexpected": 1}


def test_a_good_record_that_was_rejected_is_lost_all_the_same(topic, tables):
    tables.rows = [row for row in tables.rows if row[0] != 2]
    tables.rejects.append(((0, 2), FLIGHT % 2))
    assert counts(topic, tables) == {"lost": 1, "unexpected": 1}


def test_without_a_table_of_rejects_only_good_records_count(topic, tables):
    assert counts(topic, Tables(tables.rows, None)) == {}


def test_an_id_that_is_in_the_topic_twice_is_refused(topic):
    with pytest.raises(ValueError, match="id 3 is in the topic twice"):
        topic.add((0, 19), FLIGHT % 3)


def test_flights_before_a_position(topic):
    at = [{}, {0: 0, 1: 0}, {0: 3, 1: 1}, {0: 15, 1: 16}, {0: 20, 1: 20}]
    assert flights_before(topic, at) == [0, 0, 2, 10, 10]
