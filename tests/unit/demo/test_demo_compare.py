"""The comparison: each kind of damage is counted as what it is, and as nothing else."""

from __future__ import annotations

from collections.abc import Callable

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


DAMAGES: dict[str, tuple[Callable[[Tables], object], dict[str, int]]] = {
    "a missing row": (lambda one: one.rows.pop(3), {"lost": 1}),
    "a row that is there three times": (
        lambda one: one.rows.extend([one.rows[3]] * 2),
        {"duplicated": 2},
    ),
    "another value": (
        lambda one: one.rows.__setitem__(3, (*one.rows[3][:-1], not one.rows[3][-1])),
        {"changed": 1},
    ),
    "a row of no flight": (lambda one: one.rows.append((-5, *[None] * 10)), {"unexpected": 1}),
    "one lost and one twice": (
        lambda one: one.rows.__setitem__(3, one.rows[4]),
        {"lost": 1, "duplicated": 1},
    ),
    "a missing reject": (lambda one: one.rejects.pop(0), {"lost": 1}),
    "a second reject": (lambda one: one.rejects.append(one.rejects[0]), {"duplicated": 1}),
    "a reject with other bytes": (
        lambda one: one.rejects.__setitem__(0, (one.rejects[0][0], b"!")),
        {"changed": 1},
    ),
    "a reject of a good record": (
        lambda one: one.rejects.append(((0, 2), FLIGHT % 2)),
        {"unexpected": 1},
    ),
    "a good record that was rejected": (
        lambda one: one.rejects.append((one.rows.pop(2) and (0, 2), FLIGHT % 2)),
        {"lost": 1, "unexpected": 1},
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_counted(topic, tables, damage):
    done, wanted = DAMAGES[damage]
    done(tables)
    assert counts(topic, tables) == wanted


def test_without_a_table_of_rejects_only_good_records_count(topic, tables):
    assert counts(topic, Tables(tables.rows, None)) == {}


def test_an_id_that_is_in_the_topic_twice_is_refused(topic):
    with pytest.raises(ValueError, match="id 3 is in the topic twice"):
        topic.add((0, 19), FLIGHT % 3)


def test_flights_before_a_position(topic):
    at = [{}, {0: 0, 1: 0}, {0: 3, 1: 1}, {0: 15, 1: 16}, {0: 20, 1: 20}]
    assert flights_before(topic, at) == [0, 0, 2, 10, 10]
