"""Seconds by phase: nested, in threads, and of tasks side by side."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest

from oncely import phases
from oncely.phases import into, longest, measured, phase, timed
from oncely.stores.topic.compare_and_set import run_concurrently


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(phases, "time", made)
    return made


def test_seconds_of_an_inner_phase_are_not_of_the_outer_one(clock: Clock) -> None:
    @phase("write")
    def write() -> None:
        clock.now += 2
        with phase("commit"):
            clock.now += 5
        clock.now += 1

    with into(found := {}):
        with phase("commit"):
            clock.now += 10
            write()
        write()
    assert found == {"write": 6, "commit": 20}


def test_without_a_mapping_nothing_is_measured() -> None:
    with phase("write"):
        longest([{"write": 1.0}])
    assert list(timed("read", [1, 2])) == [1, 2]


def test_a_failed_phase_counts(clock: Clock) -> None:
    @phase("write")
    def write() -> None:
        clock.now += 3
        raise OSError("gone")

    with into(found := {}), pytest.raises(OSError, match="gone"):
        write()
    assert found == {"write": 3}


def test_waits_for_items_are_read(clock: Clock) -> None:
    def items() -> Iterator[int]:
        for one in range(3):
            clock.now += 1
            yield one
        clock.now += 1  # the end of the input is awaited, too

    with into(found := {}):
        for _ in timed("read", items()):
            with phase("decode"):
                clock.now += 10
    assert found == {"read": 4, "decode": 30}


def test_a_thread_adds_in_a_copy_of_the_context(clock: Clock) -> None:
    def commit() -> None:
        with phase("commit"):
            clock.now += 4

    with into(found := {}), ThreadPoolExecutor(1) as threads:
        threads.submit(copy_context().run, commit).result()
    assert found == {"commit": 4}


def test_of_threads_side_by_side_the_longest_counts(clock: Clock) -> None:
    def work(seconds: int) -> int:
        with phase("commit"):
            pass
        longest([{"commit": seconds}])
        return seconds

    with into(found := {}), phase("write"):
        clock.now += 10
        answers: list[Any] = [measured(work, one) for one in (3, 7, 5)]
        longest(seconds for _, seconds in answers)
    assert found == {"write": 3, "commit": 7}
    assert [one for one, _ in answers] == [3, 7, 5]


def test_transactions_side_by_side_are_measured() -> None:
    def commit(item: int) -> int:
        with phase("commit"):
            return item

    with into(found := {}):
        assert run_concurrently(commit, [1, 2]) == [1, 2]
    assert found.keys() == {"commit"}
