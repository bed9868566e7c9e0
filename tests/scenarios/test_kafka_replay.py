"""A replay into Kafka that is killed, stopped or left without an answer at each of its steps.

No letter takes effect twice and none is lost: whatever happens, afterwards each record is in
the output once, or its letter waits, and another replay finishes.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator

import pytest

from oncely.core.claim import Takeover
from oncely.testing.servers.kafka import Broker
from tests import kafka_proxy as kp
from tests.kafka_proxy import KafkaProxy, proxied_broker
from tests.kafkatools import Topics, make_topics, ready
from tests.replaytools import bad, judging, left, replayed
from tests.scenarios import kafka_jobs as jobs
from tests.scenarios.zygote import Zygote
from tests.sinktools import SOURCE, T0, T1, at_t0, chunk, commit_all, numbered, rec

WRITTEN = 10
LETTERS = range(10, 15)
MOST = [*range(WRITTEN), *(n for n in LETTERS if n != jobs.BAD)]


LONG = {"transaction_timeout": 600.0}


def rejected(broker: Broker) -> Topics:
    """Ten records in the output, and five letters in two partitions of the rejects' topic."""
    topics = make_topics(broker)
    rejects = broker.create_topic(f"two-{topics.rejects}", 2)
    topics = dataclasses.replace(topics, rejects=rejects)
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    first = {T0: (0, [*numbered(0, WRITTEN), *bad(10, 11, 12)]), T1: (0, bad(13, 14))}
    commit_all(sink, chunk(first), fence)
    sink.close()
    return topics


def finish(topics: Topics) -> None:
    """What every replay that comes to its end leaves, whatever was before it.

    It does not wait for the timeout of an open transaction, which is longer than any test.
    """
    replayed(topics.sink(), judging(lambda one: one.offset != jobs.BAD), 3, jobs.patient())
    assert topics.ids() == MOST
    assert left(topics) == [jobs.BAD]


def killed(zygote: Zygote, topics: Topics, at: int, when: str) -> None:
    ended = zygote.run(jobs.replay, topics, at, when, "kill", LONG)
    assert ended.signal == signal.SIGKILL, ended.error
    finish(topics)


@pytest.fixture(scope="module")
def calls(zygote: Zygote, broker: Broker) -> list[str]:
    """The calls to producers of a replay that nothing disturbs."""
    topics = rejected(broker)
    ended = zygote.run(jobs.replay, topics, 0, "before", "kill", {})
    assert not ended.error, ended.error
    names: list[str]
    names, counts = ended.value
    assert counts == (4, 1)
    finish(topics)
    assert names.count("commit_transaction") == 2
    return names


@pytest.mark.parametrize(
    ("call", "when"),
    [
        ("init_transactions", "after"),
        ("send_offsets_to_transaction", "after"),
        ("commit_transaction", "before"),
        ("commit_transaction", "after"),
    ],
)
def test_killed_where_it_tells_most(
    zygote: Zygote, broker: Broker, calls: list[str], call: str, when: str
) -> None:
    killed(zygote, rejected(broker), len(calls) - calls[::-1].index(call), when)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_killed_at_every_producer_call(zygote: Zygote, broker: Broker, calls: list[str]) -> None:
    """After each call, which is before the next one."""
    for at in range(1, len(calls) + 1):
        killed(zygote, rejected(broker), at, "after")


@pytest.mark.parametrize("call", ["produce", "commit_transaction"])
def test_stopped_while_another_replay_does_it_all(
    zygote: Zygote, broker: Broker, calls: list[str], call: str
) -> None:
    """SIGSTOP in an open transaction; the other one fences it, and SIGCONT changes nothing."""
    at = calls.index(call) + 1
    topics = rejected(broker)
    job = zygote.start(jobs.replay, topics, at, "before", "stop", LONG)
    job.wait_until_stopped()
    finish(topics)
    job.go_on()
    ended = job.wait()
    assert not ended.error, ended.error
    finish(topics)


def test_the_pipeline_opens_and_writes_while_a_replay_is_stopped(
    zygote: Zygote, broker: Broker, calls: list[str]
) -> None:
    """Its open transaction would hide the ledger's end for ten minutes; the opening ends it."""
    at = calls.index("commit_transaction") + 1
    topics = rejected(broker)
    job = zygote.start(jobs.replay, topics, at, "before", "stop", LONG)
    job.wait_until_stopped()
    sink, fence = ready(topics.sink(), {T0: 0, T1: 0})
    commit_all(sink, at_t0(13, bad(20)), fence)
    job.go_on()
    ended = job.wait()
    assert not ended.error, ended.error
    assert topics.ids() == MOST
    assert sorted(left(topics)) == [jobs.BAD, 20]


def test_a_takeover_of_some_partitions_goes_on_after_a_killed_replay(
    zygote: Zygote, broker: Broker, calls: list[str]
) -> None:
    """It leaves the id of replays alone: the broker ends the open transaction at its timeout."""
    at = calls.index("commit_transaction") + 1
    topics = rejected(broker)
    ended = zygote.run(jobs.replay, topics, at, "before", "kill", {"transaction_timeout": 3.0})
    assert ended.signal == signal.SIGKILL, ended.error
    opened = topics.sink().open(
        Takeover(SOURCE, lambda: jobs.START, jobs.START, partitions=frozenset({T0}))
    )
    assert opened.positions == {T0: 13}
    more = at_t0(13, [rec(n, id=100 + n, name="n") for n in (13, 14)])
    commit_all(topics.sink(), more, opened.fence)
    replayed(topics.sink(), judging(lambda one: one.offset != jobs.BAD), 3, jobs.patient())
    assert topics.ids() == [*MOST, 113, 114]
    assert left(topics) == [jobs.BAD]


# -- lost and late answers -------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[Broker, KafkaProxy]]:
    with proxied_broker() as both:
        yield both


def hurt(proxied: tuple[Broker, KafkaProxy], api: int, kind: kp.Kind) -> None:
    broker, proxy = proxied
    made = rejected(broker)
    topics = dataclasses.replace(made, bootstrap=broker._inner, brokers=proxy.bootstrap)
    with proxy.fault(api, kind) as fault:
        finish(topics)
        assert fault.met.is_set()
        if kind == "hold request":
            fault.release()
    finish(topics)


@pytest.mark.parametrize("kind", ["lose request", "lose response"])
def test_the_answer_to_the_commit_is_lost(
    proxied: tuple[Broker, KafkaProxy], kind: kp.Kind
) -> None:
    hurt(proxied, kp.END_TXN, kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lose request", "lose response", "hold request"])
@pytest.mark.parametrize("api", kp.NAMES, ids=list(kp.NAMES.values()))
def test_a_frame_is_lost_or_late(
    proxied: tuple[Broker, KafkaProxy], api: int, kind: kp.Kind
) -> None:
    hurt(proxied, api, kind)
