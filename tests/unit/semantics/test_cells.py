"""The verdict over what was counted."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from oncely.kinds.files.trial import NAMING
from oncely.testing.semantics.cells import POINTS_OF, SINKS, Outcome, cells, page, problems
from oncely.testing.semantics.trial import damage

AS_PROMISED = {
    "none": {"after the records": (0, 100), "after the position": (100, 0)},
    "at_most_once": {"after the position": (100, 0)},
    "at_least_once": {"after the records": (0, 100)},
}


def outcomes(sink: str = "sql") -> list[Outcome]:
    return [
        Outcome(cell, 1_200, *AS_PROMISED.get(cell.delivery, {}).get(cell.point, (0, 0)))
        for cell in cells(sink)
    ]


@pytest.mark.parametrize("sink", SINKS)
def test_as_promised(sink: str) -> None:
    found = outcomes(sink)
    assert problems(found) == []
    shown = page(found, [])
    assert "as promised" not in shown
    assert all(f"<tr><th>{point}</th>" in shown for point in POINTS_OF[sink])
    assert shown.count("<td class=") == 4 * len(POINTS_OF[sink])


def test_what_was_not_tried_is_not_shown_as_done() -> None:
    found = [one for one in outcomes("files") if one.cell.delivery != "none"]
    shown = page([one for one in found if one.cell.point == NAMING], [])
    assert shown.count("<td class=") == 4
    assert shown.count("not tried") == 1
    assert "each step commits itself" not in shown
    assert page(outcomes("files"), []).count("each step commits itself") == 3


def test_trials_share_no_name() -> None:
    names = [cell.name for sink in SINKS for cell in cells(sink)]
    assert len(set(names)) == len(names) == 17 + 17 + 29 + 23


@pytest.mark.parametrize("what", ["lost", "duplicated"])
@pytest.mark.parametrize("cell", [one for one in cells("sql") if one.delivery == "exactly_once"])
def test_exactly_once_must_be_clean_everywhere(cell, what: str) -> None:
    found = [dataclasses.replace(o, **{what: 1}) if o.cell == cell else o for o in outcomes()]
    (problem,) = problems(found)
    assert "exactly_once" in problem
    assert problem.split(": ", 1)[1] in page(found, [problem]).replace("&#x27;", "'")


@pytest.mark.parametrize(
    ("delivery", "what"), [("at_most_once", "duplicated"), ("at_least_once", "lost")]
)
def test_the_other_damage_breaks_a_promise(delivery: str, what: str) -> None:
    found = [
        dataclasses.replace(o, **{what: 1}) if o.cell.delivery == delivery else o
        for o in outcomes()
    ]
    assert any(delivery in one for one in problems(found))


@pytest.mark.parametrize("delivery", list(AS_PROMISED))
def test_a_trial_that_shows_nothing_is_none(delivery: str) -> None:
    found = [
        dataclasses.replace(o, lost=0, duplicated=0) if o.cell.delivery == delivery else o
        for o in outcomes()
    ]
    assert any("can't see" in one and delivery in one for one in problems(found))


def test_damage() -> None:
    assert damage(Counter({0: 1, 1: 3, 3: 2}), 5) == (2, 3)
