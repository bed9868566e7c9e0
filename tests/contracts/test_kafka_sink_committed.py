"""What another process has committed is known to the driver at once, though its markers follow."""

from __future__ import annotations

import pytest

from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics, ready
from tests.sinktools import T0, at_t0, commit_all, numbered

COMMITS = 25


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker)


def test_a_commit_that_was_answered_is_seen_by_others(topics: Topics) -> None:
    task, fence = ready(topics.sink())
    driver = topics.sink(run=task.run)
    for at in range(COMMITS):
        commit_all(task, at_t0(at, numbered(at, at + 1)), fence)
        assert driver.ledger.positions(fence, settled=True)[T0].position == at + 1
