"""A member that can't commit tries again, after growing waits, and ends when nothing goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.commit import backoff
from oncely.core import events
from oncely.core.claim import Fence
from oncely.core.ranges import TopicPartition
from oncely.errors import Unavailable
from oncely.kafka.inbox import PollResult
from oncely.runtimes.takeover import Taken
from oncely.runtimes.worker.member import Member
from tests.unit.runtimes.worker.test_watch import OURS, Run

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
FENCE = Fence("p", 1, "ours", frozenset({P0, P1}))
_STEP = 0.25


class Trouble:
    """Commits and looks at the ledger, by a clock of its own."""

    def __init__(self, patience: float) -> None:
        self.now, self.down, self.heard = 0.0, True, list[events.Event]()
        run = Run(OURS, {"t": "1"})
        run.take = lambda partitions: Taken(FENCE, dict.fromkeys(partitions, 5), {})  # type: ignore[method-assign]
        run.keep_house = lambda *_: None  # type: ignore[method-assign]
        group: Any = SimpleNamespace(seek=lambda *_: None, mark=lambda *_: None)
        self.member = Member(
            run, lambda _: group, listener=self.heard.append, clock=lambda: self.now,
            patience=patience,
        )  # fmt: skip
        self.member._group = group
        self.member._hand = SimpleNamespace(finish=self._finish)  # type: ignore[assignment]
        self.member.assignment.assigned([P0, P1])

    def _finish(self) -> list[Any]:
        if self.down and P0 in self.ranges:
            raise Unavailable("PostgreSQL: canceling statement due to lock timeout")
        return []

    def cycle(self, of: TopicPartition = P0, *, records: bool = True) -> None:
        """Partitions are taken over if they are not held, and a commit of one, or a look, ends."""
        one = self.member
        if self.now >= one._not_before:
            one._take_again()
        self.ranges = {of: SimpleNamespace(end=6)} if records and one.assignment.fences else {}
        fence = FENCE if one.assignment.fences else None
        one._in_hand = _in_hand(fence or FENCE, self.ranges)
        one._finish()
        self.now += _STEP

    def until(
        self, done: Callable[[], object], *, of: TopicPartition = P0, records: bool = True
    ) -> None:
        while not done():
            assert self.now < 1000
            self.cycle(of, records=records)

    def errors(self) -> list[events.BatchFailed]:
        return [one for one in self.heard if isinstance(one, events.BatchFailed)]


def _in_hand(fence: Fence, ranges: Any) -> Any:
    return (fence, ranges, 0.0, {})


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "tell", backoff.RateLimitedLog().tell)


def test_waits_grow_and_it_ends_although_the_ledger_answers_looks() -> None:
    """A locked table: takeovers and looks succeed, and no commit."""
    world = Trouble(patience=40.0)
    with pytest.raises(Unavailable, match="lock timeout"):
        world.until(lambda: False)
    assert 40 <= world.now < 80
    waits = [one.retry_in_seconds for one in world.errors()]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30][: len(waits)]
    assert len(waits) >= 6
    assert [one.attempt for one in world.errors()] == list(range(1, len(waits) + 1))


def test_a_commit_begins_the_patience_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oncely")
    world = Trouble(patience=40.0)
    for _ in range(3):
        world.down = True
        world.until(lambda: world.member._retries.backoff.spent >= 30)
        world.down = False
        world.until(lambda: not world.member._retries.attempts)
    assert world.now > 80
    assert sum("it goes on" in one for one in caplog.messages) == 3


def test_commits_of_others_do_not_begin_the_patience_of_a_partition_anew() -> None:
    """A row that each commit of one partition waits for in vain."""
    world, committed = Trouble(patience=40.0), 0

    def another_commit_ends() -> bool:
        nonlocal committed
        world.until(lambda: not world.member._retries.attempts, of=P1)
        committed += 1
        return False

    with pytest.raises(Unavailable, match="lock timeout"):
        world.until(another_commit_ends)
    assert 40 <= world.now < 80
    assert committed > 20


def test_takeovers_that_fail_count_for_their_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Trouble(patience=40.0)
    world.down = False
    world.cycle(P1)
    world.member.assignment.lost([P0], ask=False)

    def refuses(_: frozenset[TopicPartition]) -> Taken:
        raise Unavailable("a lock of its position")

    monkeypatch.setattr(world.member.run, "take", refuses)
    with pytest.raises(Unavailable, match="a lock of its position"):
        world.until(lambda: False, of=P1)
    assert 40 <= world.now < 80


@pytest.mark.parametrize("how", ["commit", "end", "revoked"])
def test_each_partition_has_its_own_patience(how: str) -> None:
    """An error that has passed is not counted with a later one."""
    world = Trouble(patience=40.0)
    for _ in range(4):
        world.down = True
        world.until(lambda: world.now - world.member._stuck.get(P0, world.now) >= 30)
        world.down = False
        if how == "end":
            world.until(lambda: P0 in world.member.assignment.positions, of=P1)
            world.member._receive(PollResult(ends={P0: 5}))
        elif how == "revoked":
            world.member.revoked(frozenset({P0}), lost=False)
            world.member.assignment.assigned([P0])
        else:
            world.until(lambda: not world.member._stuck)
        world.until(lambda: not world.member._retries.attempts, of=P1)
    assert world.now > 120


def test_a_minute_with_nothing_to_commit_begins_it_anew() -> None:
    world = Trouble(patience=40.0)
    world.until(lambda: bool(world.errors()))
    failed = world.now
    world.until(lambda: not world.member._retries.attempts, records=False)
    assert 60 <= world.now - failed < 62


def test_one_entry_for_each_cause_and_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    told = backoff.RateLimitedLog(lambda: now)
    for at in range(0, 130, 5):
        now = float(at)
        told.tell(Unavailable(f"process {at} holds a lock", way_out=f"end {at}"))
        if at in (0, 65):
            told.tell(Unavailable("no answer"))
    often = " (11 times more since the last entry)"
    assert caplog.messages == [
        "process 0 holds a lock; way out: end 0; it is tried again",
        "no answer; it is tried again",
        f"process 60 holds a lock; way out: end 60; it is tried again{often}",
        "no answer; it is tried again",
        f"process 120 holds a lock; way out: end 120; it is tried again{often}",
    ]
