"""A reset that is killed has moved every position or none; `open` finishes what it has begun."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from oncely.commit.path import commit
from oncely.core.claim import Opened, Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import Stopped, Unavailable
from oncely.stores.topic.cluster import Cluster
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import (
    Topics,
    lose_all,
    lose_position,
    lose_record_and_position,
    make_topics,
    open_sink,
)
from tests.replaytools import judging, left, replayed
from tests.scenarios import kafka_jobs as jobs
from tests.scenarios.kafka_jobs import BAD, LAST, START
from tests.scenarios.zygote import Ended, Zygote
from tests.sinktools import SOURCE, T0, T1, chunk, commit_all, impatient, numbered, together

BEFORE = {T0: LAST, T1: 105}
TO = {T0: 5, T1: 102}
DECIDING = 5
"""The commit of a reset that decides on it, counted from 1."""
WHOLE = sorted([n for n in range(LAST) if n != BAD] + list(range(100, 105)))


def written(broker: Broker) -> Topics:
    """Two partitions are read to their ends, with a reject."""
    topics = make_topics(broker)
    fence = open_sink(topics.sink(), START).fence
    list(commit(together(topics.sink()), jobs.what(both=True), fence, None, impatient()))
    assert topics.ids() == WHOLE
    return topics


def where_it_begins(topics: Topics) -> dict[object, int]:
    """As `status` and `offsets show` tell it."""
    with closing(Cluster(topics.sink().pipeline_topics)) as cluster:
        return dict(cluster.look().begins)


def go_on(topics: Topics, *, was_reset: bool) -> None:
    """A run opens and reads on; positions, records and letters tell the same story."""
    shown = where_it_begins(topics)
    opened = open_sink(topics.sink(), START)
    at = dict(opened.positions)
    assert at == shown == (TO if was_reset else BEFORE)
    assert topics.committed() == at
    assert where_it_begins(topics) == at
    assert left(topics) == ([] if was_reset else [BAD])
    ends = {T0: LAST + 2, T1: 107}
    parts = {tp: (start, numbered(start, ends[tp])) for tp, start in at.items()}
    commit_all(topics.sink(), chunk(parts), opened.fence)
    again = [n for tp, start in at.items() for n in range(start, ends[tp])]
    assert topics.ids() == sorted([*WHOLE, *again])
    assert replayed(topics.sink(), judging()) == (0 if was_reset else 1, 0)
    seen = topics.ids()
    assert seen.count(BAD) == 1
    assert dict(open_sink(topics.sink(), START).positions) == ends, "a reset is finished once"


def killed(
    zygote: Zygote, broker: Broker, at: int, when: str, only: str = ""
) -> tuple[Ended, bool]:
    """Killed at a call, and gone on; whether the reset took effect."""
    topics = written(broker)
    ended = zygote.run(jobs.reset_and_die, topics, TO, at, when, only)
    assert not ended.error, ended.error
    assert ended.signal in (0, signal.SIGKILL)
    done = where_it_begins(topics) == TO
    assert done or ended.signal
    go_on(topics, was_reset=done)
    return ended, done


@pytest.mark.parametrize(("at", "done"), [(1, False), (DECIDING - 1, False), (DECIDING, True)])
def test_killed_after_a_commit_of_a_reset(
    zygote: Zygote, broker: Broker, at: int, done: bool
) -> None:
    """The first one, the one that decides, and the one before."""
    ended, was_reset = killed(zygote, broker, at, "after", "commit_transaction")
    assert ended.signal
    assert was_reset == done


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_at_every_producer_call_of_a_reset(zygote: Zygote, broker: Broker) -> None:
    """After each call, which is before the next one."""
    effects: list[bool] = []
    for at in itertools.count(1):
        ended, was_reset = killed(zygote, broker, at, "after")
        if not ended.signal:
            break
        effects.append(was_reset)
    assert effects == sorted(effects), "once it has taken effect it stays"
    assert effects[-1]
    assert not effects[0]


@pytest.mark.timeout(200)
def test_a_reset_that_died_half_way_is_finished_by_the_next_one(
    zygote: Zygote, broker: Broker
) -> None:
    """Partitions that the next one leaves alone go where the first one put them."""
    topics = written(broker)
    ended = zygote.run(jobs.reset_and_die, topics, TO, DECIDING, "after", "commit_transaction")
    assert ended.signal == signal.SIGKILL
    assert where_it_begins(topics) == TO
    done = zygote.run(jobs.reset_and_die, topics, {T0: 7}, 0, "after", "")
    assert not done.error, done.error
    assert dict(open_sink(topics.sink(), START).positions) == {**TO, T0: 7}


def take_some(topics: Topics, *partitions: TopicPartition) -> Opened:
    """A worker takes partitions over, when it is assigned them.

    Asks again while a transaction of the dead process hides the ledger: the reset moves positions
    side by side, and the kill may have met another one's.
    """
    takeover = Takeover(SOURCE, lambda: START, START, partitions=frozenset(partitions))
    deadline = time.monotonic() + 150
    while True:
        try:
            return topics.sink().open(takeover)
        except Unavailable:
            if time.monotonic() > deadline:
                raise


def read_again(topics: Topics, opened: Opened) -> list[int]:
    """All records of the partitions that were taken; they are good now."""
    parts = {tp: (at, numbered(at, BEFORE[tp])) for tp, at in opened.positions.items()}
    commit_all(topics.sink(), chunk(parts), opened.fence)
    return [n for tp, at in opened.positions.items() for n in range(at, BEFORE[tp])]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "killed", [5, pytest.param(7, marks=pytest.mark.long)], ids=["decided", "one position moved"]
)
def test_a_reset_that_died_half_way_is_finished_by_takeovers_of_some_partitions(
    zygote: Zygote, broker: Broker, killed: int
) -> None:
    """Each finishes it for its own, once, and the others wait; nobody replays a voided letter."""
    topics = written(broker)
    ended = zygote.run(jobs.reset_and_die, topics, TO, killed, "after", "commit_transaction")
    assert ended.signal == signal.SIGKILL
    again = []
    for tp, other in ((T0, T1), (T1, T0)):
        opened = take_some(topics, tp)
        assert opened.positions == {tp: TO[tp]}
        assert where_it_begins(topics)[other] == (TO if other == T1 else BEFORE)[other]
        assert replayed(topics.sink(), judging()) == (0, 0)
        again += read_again(topics, opened)
        assert topics.ids() == sorted([*WHOLE, *again])
    assert dict(take_some(topics, T0, T1).positions) == BEFORE, "a reset is finished once"
    assert dict(open_sink(topics.sink(), START).positions) == BEFORE


@pytest.mark.timeout(200)
@pytest.mark.parametrize("finishes", [take_some, None], ids=["some", "all"])
def test_a_replay_that_has_compared_before_a_reset_that_died_does_not_commit_after_it(
    zygote: Zygote, broker: Broker, finishes: Callable[..., Opened] | None
) -> None:
    """Whoever finishes the reset ends it, before a record is read again."""
    topics = written(broker)
    reset = zygote.start(jobs.reset_and_die_decided, topics, TO)
    reset.wait_until_stopped()
    replay = Paused(topics)
    reset.go_on()
    assert reset.wait().signal == signal.SIGKILL
    opened = finishes(topics, T0) if finishes else open_sink(topics.sink(), START)
    assert opened.positions[T0] == TO[T0]
    again = read_again(topics, opened)
    assert replay.go_on() == (0, 0)
    assert topics.ids() == sorted([*WHOLE, *again])
    assert topics.ids().count(BAD) == 1


class Paused:
    """A replay that has compared, and is slow to begin its transaction."""

    def __init__(self, topics: Topics) -> None:
        self._compared, self._go_on = threading.Event(), threading.Event()
        self._outcome: list[tuple[int, int]] = []
        calls = jobs.Calls(1, "before", self._wait, "begin_transaction")
        sink = jobs.hooked(topics.sink(), calls)
        self._thread = threading.Thread(target=lambda: self._outcome.append(replayed(sink)))
        self._thread.start()
        assert self._compared.wait(180)

    def _wait(self) -> None:
        self._compared.set()
        assert self._go_on.wait(120)

    def go_on(self) -> tuple[int, int]:
        """Let it go on to its end; how many letters it has moved, and kept."""
        self._go_on.set()
        self._thread.join(180)
        return self._outcome[0]


Lose = Callable[[Broker, Topics], None]


def killed_after_a_loss(zygote: Zygote, broker: Broker, lose: Lose, at: int) -> tuple[Ended, bool]:
    """Killed after a commit: a run is refused, or begins where the reset led."""
    topics = written(broker)
    lose(broker, topics)
    ended = zygote.run(jobs.reset_and_die, topics, TO, at, "after", "commit_transaction")
    assert not ended.error, ended.error
    was_reset = where_it_begins(topics) == TO
    if not was_reset:
        with pytest.raises(Stopped, match="t-1"):
            open_sink(topics.sink(), START)
        done = zygote.run(jobs.reset_and_die, topics, TO, 0, "after", "")
        assert not done.error, done.error
    go_on(topics, was_reset=True)
    return ended, was_reset


@pytest.mark.parametrize(
    ("lose", "at", "done"), [(lose_position, 1, False), (lose_all, DECIDING, True)]
)
def test_a_reset_of_a_lost_position_is_killed(
    zygote: Zygote, broker: Broker, lose: Lose, at: int, done: bool
) -> None:
    ended, was_reset = killed_after_a_loss(zygote, broker, lose, at)
    assert ended.signal
    assert was_reset == done


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lose", [lose_position, lose_record_and_position, lose_all])
def test_a_lost_position_stays_lost_until_a_reset_is_decided(
    zygote: Zygote, broker: Broker, lose: Lose
) -> None:
    """Killed after every commit of the reset."""
    effects: list[bool] = []
    for at in itertools.count(1):
        ended, was_reset = killed_after_a_loss(zygote, broker, lose, at)
        effects.append(was_reset)
        if not ended.signal:
            break
    assert effects == sorted(effects), "once it has taken effect it stays"
    assert not effects[0]
    assert effects[-2], "killed before its end"
