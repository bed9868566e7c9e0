"""Waiting longer after each failure."""

from __future__ import annotations

import pytest

from oncely.commit.backoff import Backoff


def test_waits_double_up_to_the_longest_until_the_time_is_spent() -> None:
    backoff = Backoff(first=1, longest=5, total=20)
    assert [backoff.pause() for _ in range(7)] == [1, 2, 4, 5, 5, 5, None]


def test_reset_begins_anew() -> None:
    backoff = Backoff(first=1, longest=2, total=3)
    assert [backoff.pause() for _ in range(3)] == [1, 2, None]
    backoff.reset()
    assert backoff.pause() == 1


def wait(backoff: Backoff) -> None:
    try:
        raise ValueError("the error at hand")
    except ValueError:
        backoff.wait_or_raise()


def test_waiting_and_giving_up() -> None:
    waited: list[float] = []
    backoff = Backoff(first=1, longest=1, total=2, wait=waited.append)
    wait(backoff)
    wait(backoff)
    assert waited == [1, 1]
    with pytest.raises(ValueError, match="the error at hand"):
        wait(backoff)


def test_no_patience_at_all() -> None:
    assert Backoff(total=0).pause() is None
    with pytest.raises(TimeoutError):
        Backoff(total=0).wait_or_raise()


def test_without_a_way_to_wait_it_waits_itself() -> None:
    Backoff(first=0.001).wait_or_raise()
