"""Batch commits to Kafka, killed and taken over at every call to a producer."""

from __future__ import annotations

import itertools
import resource
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from oncely.core.batch import Staged
from oncely.core.claim import Claim, Fence
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics, open_sink
from tests.scenarios import publishing_jobs as jobs
from tests.scenarios.kafka_jobs import Calls
from tests.scenarios.zygote import Ended, Zygote
from tests.sinktools import T0

TELLING = [
    ("before", "produce_batch"),
    ("before", "commit_transaction"),
    ("after", "commit_transaction"),
]


def killed(
    zygote: Zygote, broker: Broker, at: int, when: str, only: str = ""
) -> tuple[Ended, bool]:
    """Killed at a call, looked at, and started again; whether it had taken effect before."""
    topics = make_topics(broker)
    fence = open_sink(jobs.batch_sink(topics), jobs.START).fence
    ended = zygote.run(jobs.publish_and_die, topics, fence, at, when, only)
    assert not ended.error, ended.error
    done = zygote.run(jobs.restart, topics)
    assert not done.error, done.error
    jobs.look(topics)
    return ended, done.value


@pytest.mark.parametrize(("when", "call"), TELLING)
def test_killed_where_it_tells_most(zygote: Zygote, broker: Broker, when: str, call: str) -> None:
    ended, replayed = killed(zygote, broker, 1, when, call)
    assert ended.signal == signal.SIGKILL
    assert replayed == ((when, call) == TELLING[-1])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_killed_at_every_producer_call(zygote: Zygote, broker: Broker) -> None:
    """After each call, which is before the next one."""
    effects = []
    for at in itertools.count(1):
        ended, replayed = killed(zygote, broker, at, "after")
        if not ended.signal:
            break
        effects.append(replayed)
    assert at == len(ended.value) + 1
    assert ended.value.count("commit_transaction") == 1
    # All or nothing: it takes effect at one call, and stays.
    commit = ended.value.index("commit_transaction")
    assert effects == [one >= commit for one in range(len(effects))]


KINDS = [("publish", "batch"), ("publish", "partition"), ("hole", "batch"), ("commit", "batch"),
         ("add", "batch"), ("add", "partition")]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [pytest.param(*one, marks=[pytest.mark.deep] * (one[0] == "add")) for one in KINDS],
)
def test_a_zombie_at_every_producer_call_of_a_takeover(
    broker: Broker, kind: str, mode: str
) -> None:
    """It initialises its id and reads there, and goes on when the new run has written."""

    def at_call(at: int) -> Callable[[jobs.Paused], Calls]:
        return lambda old: Calls(at, "before", old.start)

    for at in itertools.count(1):
        topics = make_topics(broker)
        if at > len(jobs.taken_over(kind, mode, topics, at_call(at))):
            break
    assert at > 15


def test_what_a_publication_holds_does_not_grow_with_it(zygote: Zygote, broker: Broker) -> None:
    """Two hundred megabytes in fifty packets, and less than half of that in memory."""
    topics = make_topics(broker)
    ended = zygote.run(peak_of_publishing, topics, 50, 4_000, 1000)
    assert not ended.error, ended.error
    assert topics.committed()[T0] == 200_000
    assert ended.value < 100_000_000


def peak_of_publishing(topics: Topics, packets: int, rows: int, size: int) -> int:
    """Publish that much; by how many bytes the process grew over what it had before."""
    sink = jobs.batch_sink(topics)
    fence: Fence = open_sink(sink, {T0: 0}).fence

    packet, *_ = sink.pack(jobs.large_rows(rows, size))
    made = [Staged(packet.staged.name, packets * rows)]
    what = jobs.publication(sink, ends={T0: packets * rows}, start={T0: 0}, rejects=False)
    what = replace(what, staged=made, packets=lambda: iter([packet] * packets))
    entries = sink.ledger.positions(fence)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sink.publish(what, fence, Claim(fence, what.ranges, entries))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
