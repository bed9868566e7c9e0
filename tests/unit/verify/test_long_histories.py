"""The check's work grows with the number of ranges, not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from oncely.core import events
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.verify.check import check
from oncely.verify.log import Log
from oncely.verify.reading import DATA, JOINED, Entry, Held, Ledger
from tests.verifytools import Run, Simulated, log_of

T0 = TopicPartition("t", 0)


def steps(work: Callable[[], Any]) -> int:
    """The calls of functions, and the lines, that it takes."""
    count = 0

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    def traced(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.setprofile(called)
    sys.settrace(traced)
    try:
        work()
    finally:
        sys.settrace(before)
        sys.setprofile(None)
    return count


def ledger(number: int, *, amended: bool = False, undone: bool = False) -> Ledger:
    """Ranges of one record each, replayed one by one, or undone and committed again."""
    one = Counts(1, 0, 1, 0), Counts(0, 1, -1, 0)
    again = 3 if undone else 1
    entries = [Entry(T0, n, n + 1, again, counts=one[0], letters=0) for n in range(number)]
    if amended:
        entries += [Entry(T0, n, n + 1, 1, "replay", one[1]) for n in range(number)]
    if undone:
        old = Counts(1, 0, 1, 0)
        entries += [Entry(T0, n, n + 1, 1, "data", old, 2) for n in range(number)]
    return Ledger("p", again, {T0: Held(number, again)}, entries)


def commit(of: Simulated, run: Run, number: int, *, found: bool = False) -> None:
    """A batch of one record; ``found``: its attempt has told nothing, and the next one finds it."""
    one, each = OffsetRange(number, number + 1), (0 if found else 1)
    of.hear(run, events.BatchPlanned(run.batch, {T0: one}))
    of.commit(run, T0, one, Counts(1, 1, 0, 0), DATA)
    of.hear(run, events.RangeCommitted(T0, one, each, each, 0, 0, replayed=found))
    of.hear(run, events.BatchCommitted(run.batch, each, each, 0, 0.1, {T0: one.end}))
    run.batch += 1


def logged(number: int, how: str) -> tuple[Ledger, Log]:
    """A ledger of as many ranges, and its log.

    ``half untold``: each range is committed by a run of its own, and the first half of these has no
    event log; ``joined``: the ledger has joined pairs of ranges; ``found``: all ranges were found
    by the next attempt; ``altered``: the ledger has other counts.
    """
    of = Simulated(Random(1))
    of.at, of.given = {T0: 0}, {T0: 0}
    run = of.open()
    for at in range(number):
        if how == "half untold":
            run = of.open(log=2 * at > number)
        commit(of, run, at, found=how == "found")
    if how == "joined":
        of.entries = [Entry(T0, at, at + 2, run.epoch, JOINED, Counts(2, 2, 0, 0))
                      for at in range(0, number, 2)]  # fmt: skip
    if how == "altered":
        of.entries = [replace(one, counts=Counts(1, 0, 1, 0)) for one in of.entries]
    return of.ledger, log_of(of.lines)


@pytest.mark.parametrize("how", ["amended", "undone"])
def test_the_work_is_not_quadratic(how: str) -> None:
    small, large = (ledger(number, **{how: True}) for number in (150, 1200))
    assert not check(small).broken, check(small).as_json()
    assert steps(lambda: check(large)) < 2 * 8 * steps(lambda: check(small))


@pytest.mark.parametrize("how", ["half untold", "joined", "found"])
def test_the_work_is_not_quadratic_with_a_log(how: str) -> None:
    small, large = (logged(number, how) for number in (100, 800))
    assert not check(*small).broken, check(*small).as_json()
    assert steps(lambda: check(*large)) < 2 * 8 * steps(lambda: check(*small))


def test_the_work_is_not_quadratic_with_many_findings() -> None:
    """Each finding shows the lines around it, and those of its run before it."""
    small, large = (logged(number, "altered") for number in (100, 800))
    assert len(check(*small).broken) >= 100
    assert steps(lambda: check(*large)) < 10 * steps(lambda: check(*small))
