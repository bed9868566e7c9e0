"""Killed, stopped and gone on at every call to a producer; nothing is lost or doubled."""

from __future__ import annotations

import dataclasses
import itertools
import signal
from typing import Any

import pytest

from oncely.core.claim import Takeover
from oncely.core.ranges import TopicPartition
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics, open_sink
from tests.scenarios import kafka_jobs as jobs
from tests.scenarios.zygote import Zygote
from tests.sinktools import SOURCE, T0, T1, chunk, commit_all, numbered

WHOLE = [n for n in range(jobs.LAST) if n != jobs.BAD]
OTHER = list(range(100, 105))


def new_run(broker: Broker) -> tuple[Topics, Any]:
    topics = make_topics(broker)
    return topics, open_sink(topics.sink(), jobs.START).fence


def look(topics: Topics, *, both: bool) -> None:
    """Everything once, in order, with its reject and its position."""
    seen = [one["id"] for one in topics.values()]
    assert [one for one in seen if one < 100] == WHOLE
    assert [one for one in seen if one >= 100] == (OTHER if both else [])
    assert len(topics.records(topics.rejects)) == 1
    assert topics.committed() == {T0: jobs.LAST, T1: 105 if both else 0}
    positions = {tp: at for tp, (at, _) in topics.ledger_positions().items()}
    assert positions == topics.committed()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("both", [False, True], ids=["one partition", "two partitions"])
def test_killed_at_every_producer_call(zygote: Zygote, broker: Broker, both: bool) -> None:
    """After each call, which is before the next one."""
    effects = []
    for at in itertools.count(1):
        topics, fence = new_run(broker)
        ended = zygote.run(jobs.write, topics, fence, at, "after", "kill", both, {})
        assert not ended.error, ended.error
        if not ended.signal:
            break
        assert ended.signal == signal.SIGKILL
        done = zygote.run(jobs.restart, topics, both)
        assert not done.error, done.error
        look(topics, both=both)
        effects.append([replayed for _, replayed in done.value])
    calls, _ = ended.value
    assert at == len(calls) + 1
    assert calls.count("commit_transaction") == (2 if both else 1)
    assert not any(effects[0])  # killed at the first call: nothing had taken effect
    # After the last call its transaction had. Two are committed side by side: the process may die
    # while the commit of the other one, which was called before, is on its way.
    assert (any if both else all)(effects[-1])


@pytest.mark.long
@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "name", ["init_transactions", "send_offsets_to_transaction", "commit_transaction"]
)
def test_killed_while_two_ids_take_turns(
    zygote: Zygote, broker: Broker, name: str, when: str, at: int
) -> None:
    """A worker dies, and a run on Spark goes on with the rest."""
    topics, _ = new_run(broker)
    turns = dataclasses.replace(topics, turns=True)
    fence = open_sink(turns.sink(), jobs.START).fence
    ended = zygote.run(jobs.write_in_turns, turns, fence, name, at, when)
    assert ended.signal == signal.SIGKILL, ended.error
    done = zygote.run(jobs.restart_after, topics)
    assert not done.error, done.error
    assert [one["id"] for one in topics.values()] == list(range(jobs.LAST))
    assert topics.committed() == {T0: jobs.LAST, T1: 0}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("taken", [(), (T0,)], ids=["all", "some"])
def test_killed_at_every_producer_call_of_open(
    zygote: Zygote, broker: Broker, taken: tuple[TopicPartition, ...]
) -> None:
    for at in itertools.count(1):
        topics = make_topics(broker)
        ended = zygote.run(jobs.open_and_die, topics, at, "after", *taken)
        assert not ended.error, ended.error
        done = zygote.run(jobs.restart, topics, True)
        assert not done.error, done.error
        look(topics, both=True)
        if not ended.signal:
            return


@pytest.mark.long
@pytest.mark.timeout(400)
def test_killed_at_every_producer_call_of_a_takeover_of_some(
    zygote: Zygote, broker: Broker
) -> None:
    """The holder of the other partition commits all the same."""
    for at in itertools.count(1):
        topics = make_topics(broker)
        start = Takeover(SOURCE, lambda: jobs.START, jobs.START, partitions=frozenset({T1}))
        fence = topics.sink().open(start).fence
        ended = zygote.run(jobs.open_and_die, topics, at, "after", T0)
        assert not ended.error, ended.error
        commit_all(topics.sink(), chunk({T1: (0, numbered(100, 105))}), fence)
        done = zygote.run(jobs.restart, topics, True)
        assert not done.error, done.error
        look(topics, both=True)
        if not ended.signal:
            return


@pytest.mark.long
@pytest.mark.parametrize("takeover", [True, False], ids=["taken over", "alone"])
@pytest.mark.parametrize("call", ["produce_batch", "commit_transaction"])
def test_stopped_past_the_transaction_timeout(
    zygote: Zygote, broker: Broker, call: str, takeover: bool
) -> None:
    """SIGSTOP in an open transaction, until the broker has aborted it; then SIGCONT."""
    topics, fence = new_run(broker)
    names, _ = zygote.run(jobs.write, topics, fence, 0, "before", "stop", False, {}).value
    topics, fence = new_run(broker)
    short = {"transaction_timeout": 1.0}
    at = names.index(call) + 1
    job = zygote.start(jobs.write, topics, fence, at, "before", "stop", False, short)
    job.wait_until_stopped()
    if takeover:
        done = zygote.run(jobs.restart, topics, False)
        assert not done.error, done.error
        look(topics, both=False)
    else:
        # What the stopped process wrote is aborted by the broker: a new transaction's end shows.
        probe = topics.sink(timeout=60.0)
        probe.cluster.settled()
        assert topics.ids() == []
    job.go_on()
    ended = job.wait()
    assert not ended.error, ended.error
    assert (ended.value[1] == "fenced") == takeover
    look(topics, both=False)


def test_a_takeover_does_not_wait_for_what_a_stopped_run_left_open(
    zygote: Zygote, broker: Broker
) -> None:
    """Its timeout is far away, and its records in the ledger topic would hide the end of it."""
    long = {"transaction_timeout": 600.0}
    topics, fence = new_run(broker)
    names, _ = zygote.run(jobs.write, topics, fence, 0, "before", "stop", False, {}).value
    topics, fence = new_run(broker)
    at = names.index("commit_transaction") + 1
    job = zygote.start(jobs.write, topics, fence, at, "before", "stop", False, long)
    job.wait_until_stopped()
    done = zygote.run(jobs.restart, topics, False)
    assert not done.error, done.error
    job.go_on()
    assert job.wait().value[1] == "fenced"
    look(topics, both=False)
