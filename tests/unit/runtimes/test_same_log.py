"""A log that was cut before a position is refused; a leader that has changed in order is not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from oncely.core.ranges import Position, TopicPartition
from oncely.errors import SourceMismatch, Unavailable
from oncely.runtimes.takeover import SameLog

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class World:
    """Source and ledger: what they say, and what was asked of them."""

    def __init__(self, now: dict[TopicPartition, int]) -> None:
        self.now, self.noted = now, dict[TopicPartition, int]()
        self.cut: dict[TopicPartition, str] = {}
        self.asked: list[dict[TopicPartition, tuple[Position, int]]] = []
        self.notes = 0
        self.hidden = False
        self.log = SameLog(_Log(self), _Ledger(self))


class _Log:
    def __init__(self, world: World) -> None:
        self._world = world

    def leader_epochs(self) -> dict[TopicPartition, int]:
        return dict(self._world.now)

    def truncated(
        self, positions: Mapping[TopicPartition, tuple[Position, int]]
    ) -> dict[TopicPartition, str]:
        self._world.asked.append(dict(positions))
        return {tp: why for tp, why in self._world.cut.items() if tp in positions}


class _Ledger:
    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def leader_epochs(self) -> Mapping[TopicPartition, int]:
        return self._world.noted

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int]) -> None:
        if self._world.hidden:
            raise Unavailable("an open transaction hides the end")
        self._world.notes += 1
        self._world.noted |= epochs


def test_the_first_epochs_are_noted_and_nothing_is_asked_again() -> None:
    world = World({T0: 4, T1: 7})
    for at in (0, 10):
        world.log.check(lambda at=at: {T0: at, T1: at})
    assert world.noted == {T0: 4, T1: 7}
    assert (world.notes, [one for one in world.asked if one]) == (1, [])


def test_a_new_leader_is_compared_by_the_old_ones_epoch_and_then_noted() -> None:
    world = World({T0: 4, T1: 7})
    world.log.check(lambda: {T0: 0, T1: 0})
    world.now = {T0: 6, T1: 7}
    world.log.check(lambda: {T0: 90, T1: 50})
    assert world.asked[-1] == {T0: (90, 4)}
    assert world.noted == {T0: 6, T1: 7}


def test_a_log_that_was_cut_is_refused_again_and_again() -> None:
    world = World({T0: 4, T1: 7})
    world.log.check(lambda: {T0: 0, T1: 0})
    world.now, world.cut = {T0: 4, T1: 9}, {T1: "its epoch 7 ends at 3"}
    for _ in range(2):
        with pytest.raises(SourceMismatch, match=r"t-1: the topic has gone back.*50.*ends at 3"):
            world.log.check(lambda: {T0: 0, T1: 50})
        world.log.forget()
    assert world.noted == {T0: 4, T1: 7}
    world.noted = {T0: 4}  # a reset has forgotten it
    world.log.check(lambda: {T0: 0, T1: 2})
    assert world.noted == {T0: 4, T1: 9}


def test_a_partition_without_a_position_is_noted_when_it_has_one() -> None:
    world = World({T0: 4, T1: 7})
    world.log.check(lambda: {T0: 0})
    assert world.noted == {T0: 4}
    world.log.forget()
    world.log.check(lambda: {T0: 5, T1: 0})
    assert world.noted == {T0: 4, T1: 7}


def test_a_position_whose_records_were_deleted_is_not_compared_and_its_epoch_is_noted() -> None:
    """Behind the deleted offsets the log may begin with records of later epochs: the end of the
    noted epoch is before the position then, although nothing was cut."""
    world = World({T0: 4, T1: 7})
    world.log.check(lambda: {T0: 10, T1: 0})
    world.now = {T0: 6, T1: 7}
    world.log.forget()
    world.log.check(lambda: {T0: 10, T1: 0}, passed={T0})
    assert world.asked[-1] == {}
    assert world.noted == {T0: 6, T1: 7}
    world.now = {T0: 7, T1: 7}
    world.log.check(lambda: {T0: 90, T1: 0})
    assert world.asked[-1] == {T0: (90, 6)}


def test_a_gap_is_not_recorded_under_an_older_epoch() -> None:
    world = World({T0: 4})
    world.log.check(lambda: {T0: 10})
    world.now, world.hidden = {T0: 6}, True
    world.log.forget()
    with pytest.raises(Unavailable):
        world.log.check(lambda: {T0: 10}, passed={T0})


def test_a_first_note_that_gets_no_answer_is_made_with_a_later_batch() -> None:
    world = World({T0: 4})
    world.hidden = True
    world.log.check(lambda: {T0: 0})
    assert world.noted == {}
    world.hidden = False
    world.log.check(lambda: {T0: 5})
    assert world.noted == {T0: 4}


def test_no_position_moves_on_under_an_older_epoch() -> None:
    world = World({T0: 4})
    world.log.check(lambda: {T0: 0})
    world.now, world.hidden = {T0: 5}, True
    with pytest.raises(Unavailable):
        world.log.check(lambda: {T0: 5})
