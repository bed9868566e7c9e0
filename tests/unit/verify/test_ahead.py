"""Finished ranges beyond a position: what they explain, and what they do not."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from oncely.core import events
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.verify.check import check
from oncely.verify.reading import AHEAD, DATA, Entry, Held, Ledger
from oncely.verify.report import Report
from tests.verifytools import Run, Simulated

T0 = TopicPartition("t", 0)


def entry(start: int, end: int, epoch: int, kind: str = DATA) -> Entry:
    return Entry(T0, start, end, epoch, kind, Counts(end - start, end - start, 0, 0))


def ledger(position: int, *entries: Entry) -> Ledger:
    return Ledger("p", 2, {T0: Held(position, 2)}, entries)


def rules(found: Report) -> list[str]:
    return [one.rule for one in found.broken]


LEGAL = (entry(0, 2, 1), entry(2, 4, 2), entry(4, 5, 1, AHEAD), entry(5, 6, 2))


def test_ranges_of_an_older_epoch_may_be_ahead_of_newer_ones() -> None:
    assert check(ledger(6, *LEGAL, entry(8, 9, 1, AHEAD))).verdict == "holds"


def test_only_they_may() -> None:
    of_older = [replace(one, kind=DATA) for one in LEGAL]
    assert rules(check(ledger(6, *of_older))) == ["epoch"]
    behind_one_ahead = (*LEGAL[:3], entry(5, 6, 1))
    assert rules(check(ledger(6, *behind_one_ahead))) == ["epoch"]
    assert "position" in rules(check(ledger(4, *LEGAL[:2], entry(8, 9, 2))))


def test_they_do_not_overlap() -> None:
    twice = (entry(8, 10, 1, AHEAD), entry(9, 11, 2, AHEAD))
    assert rules(check(ledger(6, *LEGAL, *twice))) == ["overlap"]


def test_the_position_is_at_the_end_of_contiguous_ranges() -> None:
    assert rules(check(ledger(4, *LEGAL[:3]))) == ["position"]
    assert rules(check(ledger(5, *LEGAL[:2]))) == ["missing"]


def moved_on(by: int, *, reset: bool) -> Report:
    """A thread has finished [2, 4), and the position moves from 1 on without commits."""
    of = Simulated(Random(1))
    of.at, of.given = {T0: 0}, {T0: 0}
    first = of.open()
    of.hear(first, events.BatchPlanned(0, {T0: OffsetRange(0, 4)}))
    of.commit(first, T0, OffsetRange(2, 4), Counts(2, 2, 0, 0), AHEAD)
    of.commit(first, T0, OffsetRange(0, 1), Counts(1, 1, 0, 0), DATA)
    if reset:
        of.reset(by=by)
    else:
        of.at[T0] += by
    of.open()
    return of.report()


@pytest.mark.parametrize("by", [3, 5])
def test_a_reset_may_pass_over_them(by: int) -> None:
    assert moved_on(by, reset=True).verdict == "holds"


def test_nothing_else_may() -> None:
    assert "missing" in rules(moved_on(3, reset=False))


def taken_over(*, told: bool) -> Report:
    """A thread has finished [3, 5), and another run takes the partition over at 0."""
    of = Simulated(Random(1))
    of.at, of.given = {T0: 0}, {T0: 0}
    first = of.open()
    of.hear(first, events.BatchPlanned(0, {T0: OffsetRange(0, 5)}))
    of.commit(first, T0, OffsetRange(3, 5), Counts(2, 2, 0, 0), AHEAD)
    later = Run("later")
    of.runs.append(later)
    of.tell(later, "started", {"version": 1, "cut": 0})
    if not told:
        of.beyond = {}
    of.take(later)
    return of.report()


def test_a_takeover_tells_the_ranges_that_it_has_found() -> None:
    assert taken_over(told=True).verdict == "holds"


def test_a_range_that_it_has_not_found_was_committed_by_a_fenced_run() -> None:
    assert rules(taken_over(told=False)) == ["fence"]
