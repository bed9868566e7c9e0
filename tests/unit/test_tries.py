"""Attempts within a limit of time."""

from __future__ import annotations

import time

import pytest

from oncely import threads as module
from oncely.threads import tries


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that sleeping alone moves."""
    now = [100.0]
    monkeypatch.setattr(module, "time", clock_of := type("Clock", (), {}))
    clock_of.monotonic = staticmethod(lambda: now[0])  # type: ignore[attr-defined]
    clock_of.sleep = staticmethod(lambda s: now.__setitem__(0, now[0] + s))  # type: ignore[attr-defined]
    return now


def test_attempts_end_with_the_limit(clock: list[float]) -> None:
    assert list(tries(1.0, 0.25)) == [1.0, 0.75, 0.5, 0.25, 0.1]
    assert clock == [101.0]


def test_an_attempt_may_last_longer_than_the_limit(clock: list[float]) -> None:
    begun = 0
    for _ in tries(1.0, 0.25):
        begun += 1
        clock[0] += 5
    assert begun == 1


def test_one_attempt_without_time() -> None:
    assert list(tries(-1.0)) == [0.1]


def test_no_pause_after_a_good_answer() -> None:
    began = time.monotonic()
    for _ in tries(60.0, 30.0):
        break
    assert time.monotonic() - began < 5
