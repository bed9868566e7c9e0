"""The one loop: what it repeats, for how long, and what it lets out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.core.batch import StagedRowsGone
from oncely.core.claim import PositionMoved
from oncely.errors import Fenced, LedgerWentBack, Unavailable


def tried(outcomes: Sequence[Exception | None], *, stages: bool = False) -> tuple[int, list[float]]:
    """How often an attempt was made that ended so each time, and the waits between."""
    waits: list[float] = []
    made = 0
    for attempt in attempts(Backoff(1, 8, 3, wait=waits.append), stages=stages):
        with attempt:
            made += 1
            if error := outcomes[made - 1]:
                raise error
    return made, waits


def test_one_that_ends_is_the_last() -> None:
    assert tried([None]) == (1, [])


def test_a_position_that_has_moved_is_decided_again_at_once() -> None:
    moved = PositionMoved("t-0")
    assert tried([moved, moved, moved, None]) == (4, [])


def test_without_an_answer_it_is_asked_again_after_a_while() -> None:
    assert tried([Unavailable("no"), PositionMoved("t-0"), Unavailable("no"), None]) == (4, [1, 2])


def test_patience_ends() -> None:
    with pytest.raises(Unavailable, match="third"):
        tried([Unavailable("first"), Unavailable("second"), Unavailable("third"), None])


@pytest.mark.parametrize("error", [Fenced("p", 1, 2), ValueError("a mistake")])
def test_other_errors_are_answers(error: Exception) -> None:
    with pytest.raises(type(error)):
        tried([error, None])


def test_a_ledger_that_went_back_is_no_missing_answer() -> None:
    for stages in (False, True):
        with pytest.raises(LedgerWentBack):
            tried([LedgerWentBack("p", "t-0"), None], stages=stages)


def test_staged_rows_that_are_gone_are_staged_again_by_those_who_can() -> None:
    gone = StagedRowsGone("gone")
    with pytest.raises(StagedRowsGone):
        tried([gone, None])
    assert tried([gone, None], stages=True) == (2, [1])


def test_an_attempt_may_be_left() -> None:
    made = 0
    for attempt in attempts(Backoff()):
        with attempt:
            made += 1
            if made:
                break
    assert made == 1
