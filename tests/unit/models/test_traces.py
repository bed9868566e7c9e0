"""Values and behaviours as TLC prints them."""

from __future__ import annotations

from typing import Any

import pytest

from models.traces import Function, Step, parsed, value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-1", -1),
        ("TRUE", True),
        ("r1", "r1"),
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
