"""``on_rebalance``: what a rebalance does to the partitions that stay with a member."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.core import events
from oncely.core.claim import Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Unavailable
from oncely.runtimes.worker.assignment import BufferLimits, Fetched, PendingCommit
from oncely.runtimes.worker.member import Member

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
FENCE = Fence("p", 1, "r")


class Hand:
    """Commits that end at once, or never, or fail."""

    def __init__(self) -> None:
        self.ends, self.fails, self.busy = True, False, False

    def begin(self, _delivery: object, _fence: Fence, _chunk: object, _before: object) -> None:
        self.busy = True

    def ask(self, question: Callable[[], Any]) -> Callable[[], Any]:
        return question

    def wait(self, _: float) -> bool:
        return self.ends or not self.busy

    def finish(self) -> list[Any]:
        self.busy = False
        if self.fails:
            raise Unavailable("no answer")
        return []


class Group:
    """Remembers where it was to fetch again."""

    def __init__(self) -> None:
        self.sought: dict[TopicPartition, int] = {}

    def seek(self, tp: TopicPartition, position: int) -> None:
        self.sought[tp] = position

    def mark(self, positions: object) -> None:
        pass


def restarting(*, restarts: bool = True) -> tuple[Member, Hand, Group, list[events.Event]]:
    """A member with three records of each of two partitions, of which a commit takes two."""
    run: Any = SimpleNamespace(
        ledger=SimpleNamespace(context=SimpleNamespace(delivery=None)),
        chunk=lambda work: work,
        before=lambda *_: None,
        topic_ids=dict,
        keep_house=lambda *_: None,
    )
    heard: list[events.Event] = []
    limits = BufferLimits(records=2)
    group, hand = Group(), Hand()
    member = Member(run, lambda _: group, limits, restarts=restarts, listener=heard.append)
    member._group, member._hand, member.clock = group, hand, lambda: 10.0  # type: ignore[assignment]
    member.assignment.assigned([P0, P1])
    member.assignment.taken(FENCE, {P0: 0, P1: 0}, {})
    for tp in (P0, P1):
        for offset in range(3):
            member.assignment.fetched(tp, Fetched(offset, offset, 1, 1))
        member.assignment.ended(tp, 4)
    return member, hand, group, heard


def committed(heard: list[events.Event]) -> dict[TopicPartition, int]:
    found: dict[TopicPartition, int] = {}
    for one in heard:
        if isinstance(one, events.BatchCommitted):
            found |= one.positions
    return found


def test_all_of_it_is_committed_before_a_partition_goes() -> None:
    member, _, group, heard = restarting()
    member.revoked(frozenset({P1}), lost=False)
    assert committed(heard) == {P0: 3, P1: 3}
    assert isinstance(heard[-1], events.PartitionsChanged)
    assert member.assignment.positions == {P0: 3}
    assert group.sought == {}


def test_what_is_not_committed_in_time_is_dropped_and_read_again() -> None:
    member, hand, group, heard = restarting()
    assert member._begin_records()
    assert isinstance(heard[-1], events.BatchPlanned)
    (planned,) = heard[-1].ranges
    stays = {P0: P1, P1: P0}[planned]
    hand.ends = False
    member.revoked(frozenset({planned}), lost=False)
    assert member.assignment.buffered == 0
    assert group.sought == {stays: 0}
    assert member.assignment.holes() is None, "the end of the log is after what was dropped"


def test_what_was_given_out_is_not_read_again() -> None:
    """Its commit goes on."""
    member, hand, group, _ = restarting()
    assert member._begin_records()
    (given,) = member._in_hand.ranges if member._in_hand else ()
    hand.ends = False
    member.revoked(frozenset({P0, P1} - {given}), lost=False)
    assert group.sought == {given: 2}
    member._finish()
    assert member.assignment.positions == {given: 2}


def test_decoded_ahead_it_is_committed_first() -> None:
    member, _, _, heard = restarting()
    work = member.assignment.work()
    assert work is not None
    member._ready = member._decoded(work)
    (ahead,) = work.ranges
    member.revoked(frozenset({P1}), lost=False)
    first = next(one for one in heard if isinstance(one, events.BatchPlanned))
    assert first.ranges == {ahead: OffsetRange(0, 2)}
    assert committed(heard) == {P0: 3, P1: 3}


def test_after_a_failed_commit_nothing_is_left_in_memory() -> None:
    member, hand, _, heard = restarting()
    assert member._begin_records()
    hand.fails = True
    member.revoked(frozenset({P1}), lost=False)
    assert committed(heard) == {}
    assert member.assignment.buffered == 0
    assert member.assignment.fences == frozenset()


def test_an_assignment_is_a_rebalance_too(monkeypatch: pytest.MonkeyPatch) -> None:
    member, _, group, heard = restarting()
    monkeypatch.setattr(Member, "_take", lambda *_: {})
    member.assigned(frozenset({TopicPartition("t", 2)}))
    assert committed(heard) == {P0: 3, P1: 3}
    assert group.sought == {}


def test_by_default_what_stays_is_left_alone() -> None:
    member, _, group, heard = restarting(restarts=False)
    member.revoked(frozenset({P1}), lost=False)
    assert committed(heard) == {}
    assert group.sought == {}
    work = member.assignment.work()
    assert isinstance(work, PendingCommit)
    assert work.ranges == {P0: OffsetRange(0, 2)}
