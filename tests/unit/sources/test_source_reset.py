"""Where each verb of a reset would put the positions."""

from __future__ import annotations

import pytest

from oncely.core.ranges import TopicPartition
from oncely.errors import WrongInput
from oncely.kafka.reset import Verb, parse_duration, parse_time, plan_reset

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
CURRENT, EARLIEST, END = {A: 50, B: 5}, {A: 10, B: 0}, {A: 100, B: 20}


class Times:
    """A source that knows one time."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def offsets_at(self, timestamp_ms: int) -> dict[TopicPartition, int]:
        self.asked.append(timestamp_ms)
        return {A: 33, B: 20}


@pytest.mark.parametrize(
    ("verb", "expected", "notes"),
    [
        (Verb("to-earliest", 0), {A: 10, B: 0}, 0),
        (Verb("to-latest", 0), {A: 100, B: 20}, 0),
        (Verb("to-offset", 15), {A: 15, B: 15}, 0),
        (Verb("to-offset", 5), {A: 10, B: 5}, 1),
        (Verb("to-offset", 30), {A: 30, B: 20}, 1),
        (Verb("to-offset", 1000), {A: 100, B: 20}, 2),
        (Verb("shift-by", 10), {A: 60, B: 15}, 0),
        (Verb("shift-by", -10), {A: 40, B: 0}, 1),
        (Verb("shift-by", 100), {A: 100, B: 20}, 2),
        (Verb("to-datetime", 7), {A: 33, B: 20}, 0),
        (Verb("by-duration", 1000), {A: 33, B: 20}, 0),
    ],
)
def test_verbs(verb: Verb, expected: dict[TopicPartition, int], notes: int) -> None:
    plan = plan_reset(verb, CURRENT, EARLIEST, END, Times(), now_ms=5000)
    assert plan.positions == expected
    assert len(plan.notes) == notes


def test_notes_say_what_was_moved_where() -> None:
    plan = plan_reset(Verb("to-offset", 5), CURRENT, EARLIEST, END, Times())
    assert plan.notes == ("t-0: 5 is before the first offset, 10; set to 10",)
    plan = plan_reset(Verb("to-offset", 30), CURRENT, EARLIEST, END, Times())
    assert plan.notes == ("t-1: 30 is beyond the end, 20; set to 20",)


def test_times_are_asked_of_the_source() -> None:
    times = Times()
    plan_reset(Verb("to-datetime", 7), CURRENT, EARLIEST, END, times)
    plan_reset(Verb("by-duration", 1000), CURRENT, EARLIEST, END, times, now_ms=5000)
    assert times.asked == [7, 4000]


def test_a_new_partition_gets_a_position_but_nothing_to_shift_from() -> None:
    assert plan_reset(Verb("to-latest", 0), {}, EARLIEST, END, Times()).positions == END
    with pytest.raises(WrongInput, match="t-0 has no position"):
        plan_reset(Verb("shift-by", 1), {}, EARLIEST, END, Times())


def test_a_log_that_shrinks_meanwhile_gives_its_first_offset() -> None:
    """Retention can pass the end that was read a moment before."""
    assert plan_reset(Verb("to-latest", 0), {}, {A: 120}, {A: 100}, Times()).positions == {A: 120}


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("P1D", 86_400_000),
        ("PT1H30M", 5_400_000),
        ("pt0.5s", 500),
        ("P2DT3H4M5.678S", 183_845_678),
        ("-PT1M", -60_000),
        ("PT-1M", -60_000),
        ("PT-0.5S", -500),
        ("PT1.123456789S", 1123),
        ("P0D", 0),
    ],
)
def test_durations(text: str, milliseconds: int) -> None:
    assert parse_duration(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    ["", "P", "-P", "PT", "1D", "P1M", "P1Y", "P1W", "PT5", "PT1S1M", "P1H", "5 days", "PT.5S"],
)
def test_not_durations(text: str) -> None:
    with pytest.raises(WrongInput, match="--by-duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "timestamp_ms"),
    [
        ("1970-01-01T00:00:01.5", 1500),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1970-01-02", 86_400_000),
        ("1970-01-01T00:00:00Z", 0),
        ("1969-12-31T23:59:59.999999", -1),
    ],
)
def test_times(text: str, timestamp_ms: int) -> None:
    assert parse_time(text) == timestamp_ms


@pytest.mark.parametrize("text", ["", "yesterday", "12:00", "1.2.1970"])
def test_not_times(text: str) -> None:
    with pytest.raises(WrongInput, match="--to-datetime"):
        parse_time(text)
