"""A member puts records off that wait: nothing of their partition is passed over meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.core import events
from oncely.core.claim import Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kafka.inbox import PollResult
from oncely.runtimes.worker.assignment import BufferLimits, Delay, Throttle
from oncely.runtimes.worker.member import Member, Taken
from tests.jobtools import Message

P0 = TopicPartition("t", 0)
FENCE, AGAIN = Fence("p", 1, "r"), Fence("p", 2, "r")


class Group:
    """Remembers where it was to fetch again."""

    def __init__(self) -> None:
        self.sought: list[tuple[TopicPartition, int]] = []

    def seek(self, tp: TopicPartition, position: int) -> None:
        self.sought.append((tp, position))

    def joined(self) -> bool:
        return False


class Run:
    """The ledger gives the partition once more."""

    def take(self, partitions: frozenset[TopicPartition]) -> Taken:
        return Taken(AGAIN, dict.fromkeys(partitions, 1), {})


@pytest.fixture
def member() -> Member:
    """It has put off offset 1 for 50 ms; offset 0 is committed."""
    run: Any = Run()
    group: Any = Group()
    made = Member(run, lambda _: group, gates=Throttle(Delay(delay_ms=100)))
    made._group, made.clock, made.now = group, lambda: 10.0, lambda: 1_000
    made.assignment.assigned([P0])
    made.assignment.taken(FENCE, {P0: 0}, {})
    made._receive(PollResult({P0: [Message(0, 0), Message(1, 950), Message(2, 0)]}, {P0: 3}))
    work = made.assignment.work()
    assert work is not None
    assert work.ranges == {P0: OffsetRange(0, 1)}
    made.assignment.committed(FENCE, {P0: 1})
    return made


def test_it_is_paused_until_its_time_and_then_fetched_again(member: Member) -> None:
    assert member._held.keys() == {P0}
    member._release()
    assert member._held.keys() == {P0}
    member.clock, member.now = lambda: 10.05, lambda: 1_050
    member._release()
    assert sought(member) == [(P0, 1)]
    assert member._held.keys() == set()
    member._receive(PollResult({P0: [Message(1, 950), Message(2, 0)]}, {P0: 3}))
    work = member.assignment.work()
    assert work is not None
    assert work.ranges == {P0: OffsetRange(1, 3)}


def test_a_sign_of_life_tells_what_waits_and_not_what_is_to_be_committed(member: Member) -> None:
    heard: list[events.Event] = []
    member.listener = heard.append
    member._tell()
    member._tell()
    member._release()
    member.clock, member.now = lambda: 10.05, lambda: 1_050
    member._release()
    member._receive(PollResult({P0: [Message(1, 950), Message(2, 2_000)]}, {}))
    member._tell()
    own, none = frozenset({P0}), frozenset[TopicPartition]()
    assert heard == [
        events.Polled(own, own, own), events.Polled(own, none, own), events.Polled(own, own, none)
    ]  # fmt: skip


def test_the_end_of_the_log_is_not_reached_over_it(member: Member) -> None:
    """Nor by what was on its way when the partition was paused."""
    assert member.assignment.holes() is None
    member._receive(PollResult({P0: [Message(3, 0)]}, {P0: 4}))
    assert member.assignment.holes() is None
    assert member.assignment.buffered == 0


def test_a_record_that_comes_again_is_passed_over_and_counted(member: Member) -> None:
    heard: list[events.Event] = []
    member.listener = heard.append
    member.clock = lambda: 11.0
    member._release()
    member._receive(PollResult({P0: [Message(0, 0)]}))
    member._receive(PollResult({P0: [Message(0, 0), Message(1, 0), Message(1, 0), Message(4, 0)]}))
    work = member.assignment.work()
    assert work is not None
    assert work.ranges == {P0: OffsetRange(1, 5)}
    assert [one.offset() for piece in work.pieces[P0] for one in piece.payload] == [1, 4]
    assert work.pieces[P0][0].holes == (OffsetRange(2, 4),)
    member._tell()
    assert [one.repeated for one in heard if isinstance(one, events.Polled)] == [3]


def test_it_goes_with_its_partition(member: Member) -> None:
    member._in_hand = None
    member.revoked(frozenset({P0}), lost=False)
    member.clock = lambda: 11.0
    member._release()
    assert sought(member) == []


def test_a_takeover_fetches_from_the_position(member: Member) -> None:
    member.assignment.lost([P0], ask=False)
    assert member._take(frozenset({P0})) == {P0: 1}
    member.clock = lambda: 11.0
    member._release()
    assert sought(member) == []


def sought(member: Member) -> list[tuple[TopicPartition, int]]:
    group: Any = member._group
    found: list[tuple[TopicPartition, int]] = group.sought
    return found


def test_a_commit_has_no_more_records_than_it_may(member: Member) -> None:
    member.assignment.lost([P0], ask=False)
    member._take(frozenset({P0}))
    member.limits = member.assignment._limits = BufferLimits(records=2)
    member._receive(PollResult({P0: [Message(offset, 0) for offset in range(1, 6)]}))
    ranges = [work.ranges[P0] for _ in range(4) if (work := member.assignment.work())]
    assert ranges == [OffsetRange(1, 3), OffsetRange(3, 5), OffsetRange(5, 6)]
