"""Opening needs a bounded number of file descriptors, however many partitions there are."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from typing import Any

import pytest

from oncely.core.claim import Takeover
from oncely.core.ranges import SourceIdentity, TopicPartition
from oncely.kafka.client import make
from oncely.kinds.topic_destination import LedgerTopic
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics
from tests.scenarios.zygote import Zygote

PARTITIONS = 150
LIMIT = 256


def test_opening_stays_below_the_limit_of_open_files(zygote: Zygote, broker: Broker) -> None:
    topics = make_topics(broker)
    source = broker.create_topic(f"many-{topics.pipeline}", PARTITIONS)
    opened = zygote.run(open_limited, topics, source, PARTITIONS, LIMIT)
    assert not opened.error, opened.error
    positions, most = opened.value
    assert positions == {TopicPartition(source, n): n for n in range(PARTITIONS)}
    assert most < LIMIT / 2
    again = zygote.run(open_limited, topics, source, PARTITIONS, LIMIT)
    assert not again.error, again.error
    assert again.value[0] == positions
    held = topics.ledger_positions()
    assert held == {tp: (at, 2) for tp, at in positions.items()}


def test_a_limit_that_is_too_low_is_refused(zygote: Zygote, broker: Broker) -> None:
    topics = make_topics(broker)
    source = broker.create_topic(f"few-{topics.pipeline}", 2)
    opened = zygote.run(open_limited, topics, source, 2, 64)
    assert "ConfigError" in opened.error
    assert "ulimit -n" in opened.error
    assert topics.ledger not in broker.admin().list_topics(timeout=60).topics  # nothing was done


def test_a_plan_says_that_the_limit_is_too_low(zygote: Zygote, broker: Broker) -> None:
    topics = make_topics(broker)
    planned = zygote.run(check_limited, topics, 64)
    assert "ConfigError" in planned.error
    assert "ulimit -n" in planned.error
    assert not zygote.run(check_limited, topics, LIMIT).error


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_thousand_partitions_open(zygote: Zygote, broker: Broker) -> None:
    topics = make_topics(broker)
    source = broker.create_topic(f"most-{topics.pipeline}", 1000)
    opened = zygote.run(open_limited, topics, source, 1000, 1024)
    assert not opened.error, opened.error
    positions, most = opened.value
    assert len(positions) == 1000
    assert most < 512


# -- in the child --------------------------------------------------------------------------


def open_limited(topics: Topics, source: str, partitions: int, limit: int) -> Any:
    """Open with so many file descriptors; the positions, and the most that were open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    most = 0

    def connect(kind: Any, *args: Any, **own: Any) -> Any:
        nonlocal most
        client = make(kind, *args, **own)
        most = max(most, len(os.listdir("/proc/self/fd")))
        return client

    sink = topics.sink()
    sink = replace(sink, pipeline_topics=replace(sink.pipeline_topics, connect=connect))
    start = {TopicPartition(source, n): n for n in range(partitions)}
    identity = SourceIdentity("cluster-1", {source: "id-of-it"})
    return dict(sink.open(Takeover(identity, lambda: start, start)).positions), most


def check_limited(topics: Topics, limit: int) -> None:
    """What ``plan`` asks of the ledger topic, with so many file descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    LedgerTopic(topics.sink().pipeline_topics, topics.rejects).check((), (), create=True)
