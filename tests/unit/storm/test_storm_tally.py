"""A storm's counting finds every way in which a destination can differ from its topic."""

from __future__ import annotations

import pytest

from storm.tally import Tally, compare

TOPIC = {0: [0, 1, 4], 1: [0]}
RIGHT = [(0, 0, False), (1, 0, False), (0, 1, False), (0, 4, False)]


def test_everything_once_and_in_order() -> None:
    tally = compare(TOPIC, RIGHT)
    assert (tally, tally.is_clean) == (Tally(records=4), True)


@pytest.mark.parametrize(
    ("found", "tally"),
    [
        (RIGHT[:-1], Tally(4, lost=1)),
        ([*RIGHT, (0, 4, False)], Tally(4, duplicated=1)),
        ([*RIGHT, (0, 5, True)], Tally(4, aborted_reads=1)),
        ([RIGHT[2], *RIGHT[:2], RIGHT[3]], Tally(4, out_of_order=1)),
        ([*RIGHT, (0, 1, False)], Tally(4, duplicated=1, out_of_order=1)),
        ([], Tally(4, lost=4)),
    ],
)
def test_what_is_wrong(found: list[tuple[int, int, bool]], tally: Tally) -> None:
    assert compare(TOPIC, found) == tally
    assert not tally.is_clean


def test_nothing_published_proves_nothing() -> None:
    assert not compare({}, []).is_clean


def test_a_sum() -> None:
    assert Tally(1, 2, 3, 4, 5) + Tally(1, 1, 1, 1, 1) == Tally(2, 3, 4, 5, 6)
