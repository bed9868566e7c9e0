"""Values and behaviours as TLC prints them, and walks to a step."""

from __future__ import annotations

from typing import Any

import pytest

from models.catalogue import SQL_LEDGER
from models.traces import INITIAL, Function, Recipe, Step, parsed, printed, traces_to, value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-1", -1),
        ("TRUE", True),
        (r'"\\\\"', "\\\\"),
        ("r1", "r1"),
        ('"TRUE"', "TRUE"),
        ('"1"', "1"),
        (r'"a \"b\" \\ c"', 'a "b" \\ c'),
        ("{}", frozenset()),
        ("<<>>", ()),
        ("1 .. 3", frozenset({1, 2, 3})),
        ('<<"p1", {<<1, FALSE>>, <<>>}>>', ("p1", frozenset({(1, False), ()}))),
        ("[a |-> 1,\n b |-> [c |-> <<2>>]]", {"a": 1, "b": {"c": (2,)}}),
        ('("p" :> 1 @@ <<2>> :> {3})', {"p": 1, (2,): frozenset({3})}),
        ("{[a |-> {1}], [a |-> {}]}", {Function(a=frozenset({1})), Function(a=frozenset())}),
    ],
)
def test_a_value(text: str, expected: Any) -> None:
    assert value(text) == expected
    again = value(printed(value(text)))
    assert again == expected
    assert type(again) is type(value(text))


@pytest.mark.parametrize("text", ["", "{1", "<<1", "[a 1]", '("p" :> 1', "1 2", "a # b", '"open'])
def test_no_value(text: str) -> None:
    with pytest.raises(ValueError, match=r"value|stands|follows|left|early"):
        value(text)


def test_behaviours() -> None:
    output = """
Error: The behavior up to this point is:
State 1: <Initial predicate>
/\\ x = 1
/\\ y = [a |-> 1,
  b |-> 2]

State 2: <Next line 3, col 9 to line 4, col 12 of module M>
/\\ x = 2
/\\ y = [a |-> 1, b |-> 3]

Error: The behavior up to this point is:
State 1: <Initial predicate>
/\\ x = 5
/\\ y = <<>>

2 states checked.
"""
    assert list(parsed(output)) == [
        [
            Step("Init", {"x": 1, "y": {"a": 1, "b": 2}}),
            Step("Next", {"x": 2, "y": {"a": 1, "b": 3}}),
        ],
        [Step("Init", {"x": 5, "y": ()})],
    ]


def test_a_module_with_one_variable() -> None:
    assert list(parsed("State 1: <Initial predicate>\nx = 1\n\n")) == [[Step("Init", {"x": 1})]]


def test_walks_end_with_the_steps_that_are_asked_for() -> None:
    goals = {
        "fenced": '\\E r \\in Processes : proc[r].pc = "idle" /\\ proc\'[r].pc = "fenced"',
        "moved": "\\E p \\in Partitions : db'.positions[p].at > db.positions[p].at",
    }
    found = traces_to(Recipe("two", SQL_LEDGER, {}, number=2, depth=40, seed=1, goals=goals))
    for trace in found["fenced"]:
        assert "fenced" in {one["pc"] for one in trace[-1].state["proc"].values()}
        assert "fenced" not in {one["pc"] for one in trace[-2].state["proc"].values()}
    for trace in found["moved"]:
        assert [step.state["db"]["positions"]["p1"]["at"] > 0 for step in trace[-2:]] == [
            False,
            True,
        ]
    assert [len(some) for some in found.values()] == [2, 2]
    assert found["moved"][0] != found["moved"][1]
    assert all(trace[0].action == INITIAL for some in found.values() for trace in some)


def test_steps_that_are_not_reached_are_told() -> None:
    never = Recipe("never", SQL_LEDGER, {}, 1, depth=5, seed=1, goals={"never": "FALSE"}, tries=3)
    with pytest.raises(RuntimeError, match="'never': 0"):
        traces_to(never)
