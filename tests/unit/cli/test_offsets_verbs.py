"""Exactly one verb, and each becomes what it says."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.cli.repair import chosen_verb
from oncely.cli.verbs import ResetTo
from oncely.errors import WrongInput
from oncely.kafka.reset import Verb
from oncely.wording import printable


@pytest.mark.parametrize(
    ("given", "verb"),
    [
        ({"to_earliest": True}, Verb("to-earliest", 0)),
        ({"to_latest": True}, Verb("to-latest", 0)),
        ({"to_offset": 0}, Verb("to-offset", 0)),
        ({"to_datetime": "1970-01-01T00:00:01Z"}, Verb("to-datetime", 1000)),
        ({"shift_by": 0}, Verb("shift-by", 0)),
        ({"shift_by": -5}, Verb("shift-by", -5)),
        ({"by_duration": "PT1M"}, Verb("by-duration", 60_000)),
    ],
)
def test_each_verb(given: dict[str, Any], verb: object) -> None:
    assert chosen_verb(ResetTo(**given)) == verb


@pytest.mark.parametrize("given", [{}, {"to_earliest": True, "to_offset": 0}])
def test_none_or_several(given: dict[str, Any]) -> None:
    with pytest.raises(WrongInput, match="needs one verb"):
        chosen_verb(ResetTo(**given))


def test_a_value_can_not_steer_the_terminal() -> None:
    assert printable("a\x1b[31mred\x07\nb\u202ec", 200) == "a\\x1b[31mred\\x07\\nb\\u202ec"
    assert printable("täglich 日本 🙂\u2028\ud800") == "täglich 日本 🙂\\u2028\\ud800"
    assert printable("x" * 600, 200) == "x" * 199 + "…"
