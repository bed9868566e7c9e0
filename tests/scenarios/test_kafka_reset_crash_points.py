"""A reset that is killed has moved every position or none; `open` finishes what it has begun."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from contextlib import closing

import pytest

from oncely.commit.path import commit
from oncely.errors import Stopped
from oncely.ledgers.topic.cluster import Cluster
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, empty_ledger, forget_group, make_topics, open_sink, put
from tests.replaytools import judging, left, replayed
from tests.scenarios import kafka_jobs as jobs
from tests.scenarios.kafka_jobs import BAD, LAST, START
from tests.scenarios.zygote import Zygote
from tests.sinktools import T0, T1, chunk, commit_all, impatient, numbered, together

BEFORE = {T0: LAST, T1: 105}
TO = {T0: 5, T1: 102}
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
    with closing(Cluster(topics.sink().place)) as cluster:
        return dict(cluster.look().begins)


def lose_position(broker: Broker, topics: Topics) -> None:
    """Neither the ledger topic nor the group knows where t-1 was."""
    put(topics, topics.sink().place.words.position_key(T1), None)
    forget_group(broker, topics)


def lose_record_and_position(broker: Broker, topics: Topics) -> None:
    """Nor is there a record of the pipeline."""
    put(topics, topics.sink().place.words.pipeline_key(), None)
    lose_position(broker, topics)


def lose_all(broker: Broker, topics: Topics) -> None:
    """Nothing is left but the emptied ledger topic."""
    forget_group(broker, topics)
    empty_ledger(broker, topics)


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


def killed_at_every(zygote: Zygote, broker: Broker, when: str, only: str) -> list[bool]:
    """Kill at each call; whether the reset took effect."""
    effects: list[bool] = []
    for at in itertools.count(1):
        topics = written(broker)
        ended = zygote.run(jobs.reset_and_die, topics, TO, at, when, only)
        assert not ended.error, ended.error
        if ended.signal:
            assert ended.signal == signal.SIGKILL
            effects.append(where_it_begins(topics) == TO)
        go_on(topics, was_reset=not ended.signal or effects[-1])
        if not ended.signal:
            return effects
    raise AssertionError


@pytest.mark.timeout(400)
def test_killed_after_every_commit_of_a_reset(zygote: Zygote, broker: Broker) -> None:
    effects = killed_at_every(zygote, broker, "after", "commit_transaction")
    assert effects == sorted(effects), "once it has taken effect it stays"
    assert effects[-1]
    assert not effects[0]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_producer_call_of_a_reset(
    zygote: Zygote, broker: Broker, when: str
) -> None:
    effects = killed_at_every(zygote, broker, when, "")
    assert effects == sorted(effects)
    assert effects[-1]
    assert not effects[0]


@pytest.mark.timeout(200)
def test_a_reset_that_died_half_way_is_finished_by_the_next_one(
    zygote: Zygote, broker: Broker
) -> None:
    """Partitions that the next one leaves alone go where the first one put them."""
    topics = written(broker)
    ended = zygote.run(jobs.reset_and_die, topics, TO, 5, "after", "commit_transaction")
    assert ended.signal == signal.SIGKILL
    assert where_it_begins(topics) == TO
    done = zygote.run(jobs.reset_and_die, topics, {T0: 7}, 0, "after", "")
    assert not done.error, done.error
    assert dict(open_sink(topics.sink(), START).positions) == {**TO, T0: 7}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "lose",
    [lose_position, pytest.param(lose_record_and_position, marks=pytest.mark.long), lose_all],
)
def test_a_lost_position_stays_lost_until_a_reset_is_decided(
    zygote: Zygote, broker: Broker, lose: Callable[[Broker, Topics], None]
) -> None:
    """Killed after every commit of the reset: a run is refused, or begins where the reset led."""
    effects: list[bool] = []
    for at in itertools.count(1):
        topics = written(broker)
        lose(broker, topics)
        ended = zygote.run(jobs.reset_and_die, topics, TO, at, "after", "commit_transaction")
        assert not ended.error, ended.error
        effects.append(where_it_begins(topics) == TO)
        if not effects[-1]:
            with pytest.raises(Stopped, match="t-1"):
                open_sink(topics.sink(), START)
            done = zygote.run(jobs.reset_and_die, topics, TO, 0, "after", "")
            assert not done.error, done.error
        go_on(topics, was_reset=True)
        if not ended.signal:
            break
    assert effects == sorted(effects), "once it has taken effect it stays"
    assert not effects[0]
    assert effects[-2], "killed before its end"
