"""Dead letters are tried again until each transaction's outcome is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from oncely.commit.backoff import Backoff
from oncely.commit.change import replay
from oncely.core.batch import Reject, StagedRowsGone
from oncely.core.change import LockedDeadLetters, ReplayResult, Reprocessed
from oncely.core.claim import PositionMoved
from oncely.errors import InvariantViolation, Stopped, Unavailable
from tests.replaytools import judging
from tests.sinktools import T0


@dataclass
class Letters:
    """Dead letters in memory; transactions end with ``errors``, in order."""

    waiting: list[int]
    errors: list[Exception | None] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    @contextmanager
    def portion(self, limit: int) -> Iterator[LockedDeadLetters | None]:
        taken = self.waiting[:limit]
        if not taken:
            yield None
            return
        self.sizes.append(len(taken))
        yield LockedDeadLetters(
            [reject(one) for one in taken], lambda _: ReplayResult(len(taken), 0)
        )
        if self.errors and (error := self.errors.pop(0)):
            raise error
        self.waiting = self.waiting[limit:]
        self.done += taken


def reject(offset: int) -> Reject:
    return Reject(T0, offset, None, None, b"", (), "decode", "no JSON")


def tried(letters: Letters, limit: int = 2) -> tuple[ReplayResult, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    waits = Backoff(1, 8, 3, wait=lambda _: None)
    done = replay(letters, judging(), waits, limit, lambda *at: told.append(at))
    return done, told


def test_all_are_tried_a_few_in_a_transaction() -> None:
    letters = Letters([1, 2, 3, 4, 5])
    assert tried(letters) == ((5, 0), [(2, 0), (4, 0), (5, 0)])
    assert letters.sizes == [2, 2, 1]


@pytest.mark.parametrize(
    "error", [PositionMoved("taken"), Unavailable("no answer"), StagedRowsGone("schemas grew")]
)
def test_a_portion_that_did_not_take_effect_is_asked_for_again(error: Exception) -> None:
    letters = Letters([1, 2, 3], [error])
    assert tried(letters) == ((3, 0), [(2, 0), (3, 0)])
    assert letters.done == [1, 2, 3]


def test_patience_is_for_one_transaction() -> None:
    error = Unavailable("no answer")
    assert tried(Letters([1, 2, 3, 4], [error, error, None, error, error]))[0] == (4, 0)
    with pytest.raises(Unavailable):
        tried(Letters([1], [error, error, error]))


def test_other_errors_end_it() -> None:
    letters = Letters([1, 2], [Stopped("a row")])
    with pytest.raises(Stopped):
        tried(letters)
    assert letters.waiting == [1, 2]


def test_a_letter_that_the_judge_has_lost_is_noticed() -> None:
    def losing(found: Sequence[Reject]) -> Reprocessed:
        return judging()(found[1:])

    with pytest.raises(InvariantViolation, match="lost on the way"):
        replay(Letters([1, 2]), losing, Backoff())
