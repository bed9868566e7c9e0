"""The ledger's decisions as a state machine, against the set of offsets that took effect."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from oncely.core.claim import Ahead, Append, Entry, FencedOff, Skip, Trim, advance, decide
from oncely.core.ranges import OffsetRange, normalize
from oncely.errors import InvariantViolation
from tests.conftest import examples

LIMIT = 40


def first_missing(taken: set[int]) -> int:
    return next(at for at in range(LIMIT + 2) if at not in taken)


@st.composite
def ranges(draw: st.DrawFn) -> OffsetRange:
    start = draw(st.integers(0, LIMIT - 1))
    return OffsetRange(start, draw(st.integers(start + 1, LIMIT)))


class Ledger(RuleBasedStateMachine):
    """Whatever is asked for, each offset takes effect at most once, and none is passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = Entry(0, 1)
        self.taken: set[int] = set()  # the model
        self.effects: list[int] = []  # every offset once for each time it took effect

    def take(self, keep: tuple[OffsetRange, ...]) -> None:
        for one in keep:
            self.effects += range(one.start, one.end)
            self.taken |= set(range(one.start, one.end))
            position = advance(self.entry, [one])
            beyond = tuple(r for r in (*self.entry.done, one) if r.end > position)
            self.entry = Entry(position, self.entry.epoch, beyond)

    @rule(wanted=ranges())
    def ask(self, wanted: OffsetRange) -> None:
        asked = set(range(wanted.start, wanted.end))
        at = first_missing(self.taken)
        match decide(self.entry, wanted, self.entry.epoch):
            case Append(range_):
                assert range_ == wanted
                assert not asked & self.taken
                self.take((range_,))
            case Trim(keep):
                left = [n for one in keep for n in range(one.start, one.end)]
                assert left == sorted(asked - self.taken)
                assert left
                assert asked & self.taken
                self.take(keep)
            case Skip():
                assert asked <= self.taken
            case Ahead(missing):
                assert missing == OffsetRange(at, wanted.start)
            case FencedOff():
                raise AssertionError("nobody has taken over")

    @rule(wanted=ranges())
    def finish_out_of_order(self, wanted: OffsetRange) -> None:
        """Somebody else's work beyond the position."""
        if wanted.start >= self.entry.position:
            self.take(wanted.minus(self.entry.done))

    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        old = self.entry.epoch
        self.entry = Entry(self.entry.position, old + 1, self.entry.done)
        wanted = data.draw(ranges())
        assert decide(self.entry, wanted, old) == FencedOff(old + 1)

    @invariant()
    def the_position_is_the_first_offset_that_is_missing(self) -> None:
        assert advance(self.entry, []) == first_missing(self.taken)

    @invariant()
    def no_offset_took_effect_twice(self) -> None:
        assert len(self.effects) == len(set(self.effects))
        assert set(self.effects) == self.taken


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=examples(100), stateful_step_count=20, deadline=None)


@given(st.integers(0, LIMIT), st.lists(ranges(), max_size=5), st.lists(ranges(), max_size=5))
def test_advance_never_goes_back_and_never_jumps(
    position: int, done: list[OffsetRange], committed: list[OffsetRange]
) -> None:
    after = advance(Entry(position, 1, tuple(done)), committed)
    taken = set(range(position)) | {
        n for one in (*done, *committed) for n in range(one.start, one.end)
    }
    assert after == first_missing(taken)


@given(st.integers(0, LIMIT), st.lists(ranges(), max_size=5), ranges())
def test_what_is_kept_is_what_was_wanted_and_not_done(
    position: int, done: list[OffsetRange], wanted: OffsetRange
) -> None:
    decision = decide(Entry(position, 1, tuple(done)), wanted, 1)
    below = OffsetRange(0, position)
    if isinstance(decision, Append | Trim):
        keep = decision.keep if isinstance(decision, Trim) else (decision.range,)
        assert keep == wanted.minus([below, *done])
        assert normalize(keep) == keep


def test_an_epoch_that_the_ledger_never_gave_out() -> None:
    with pytest.raises(InvariantViolation, match="older than ours"):
        decide(Entry(0, 1), OffsetRange(0, 1), 2)
