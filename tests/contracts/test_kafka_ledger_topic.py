"""The ledger topic stays small, and each process reads each part of it once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer

from oncely.kafka.client import KafkaAdmin, make
from oncely.kafka.topics import configured
from oncely.kinds.files.topics import SETTINGS
from oncely.kinds.kafka.sink import KafkaSink
from oncely.stores.topic import ledger
from oncely.testing.servers.kafka import Broker
from tests.kafkatools import Topics, make_topics, open_sink, ready
from tests.sinktools import T0, at_t0, commit_all, numbered

SEGMENT = "segment.bytes"
COMPACT = {"cleanup.policy": "compact"}
assigned: list[int] = []


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return make_topics(broker)


@pytest.fixture(autouse=True)
def worker() -> Iterator[None]:
    assigned.clear()
    yield
    ledger._worker.close()


def segment_bytes(topics: Topics) -> str:
    return configured(KafkaAdmin(topics.bootstrap, {}, 10.0), [topics.ledger])[topics.ledger][
        SEGMENT
    ]


def test_it_is_made_with_the_segments_of_the_manifest(topics: Topics) -> None:
    open_sink(topics.sink())
    assert segment_bytes(topics) == SETTINGS[SEGMENT]


@pytest.mark.parametrize("create", [True, False])
def test_a_setting_of_the_operator_stays(topics: Topics, broker: Broker, create: bool) -> None:
    own = {SEGMENT: "1048576"} if create else {}
    broker.create_topic(topics.ledger, 16, COMPACT | own)
    before = segment_bytes(topics)
    open_sink(replace(topics.sink(), create=create))
    assert segment_bytes(topics) == before != SETTINGS[SEGMENT]


def noting(kind: Any, *args: Any, **own: Any) -> Any:
    """A client that notes the offsets from which it reads."""
    if kind is not Consumer:
        return make(kind, *args, **own)

    class Noting(Consumer):  # type: ignore[misc]
        def assign(self, partitions: Any) -> None:
            assigned.extend(one.offset for one in partitions)
            super().assign(partitions)

    return make(Noting, *args, **own)


def test_a_worker_reads_on_from_where_the_driver_has_read(topics: Topics) -> None:
    driver = topics.sink(connect=noting)
    driver, fence = ready(driver)
    commit_all(driver, at_t0(0, numbered(0, 3)), fence)
    known = driver.ledger.positions(fence)
    read = driver.cluster.copy().next
    assert read > 0
    task: KafkaSink = pickle.loads(pickle.dumps(driver))
    assigned.clear()
    assert task.ledger.positions(fence) == known
    commit_all(task, at_t0(3, numbered(3, 5)), fence)
    assert task.ledger.positions(fence)[T0].position == 5
    task.cluster.settled()  # the marker of the commit may follow its answer
    assert assigned
    assert min(assigned) >= read


def test_a_later_task_is_given_more(topics: Topics) -> None:
    driver, fence = ready(topics.sink(connect=noting))
    first: KafkaSink = pickle.loads(pickle.dumps(driver))
    assert first.ledger.positions(fence)[T0].position == 0
    commit_all(driver, at_t0(0, numbered(0, 3)), fence)
    driver.cluster.settled()
    driver.cluster.look()  # also the marker behind the last record, which follows the answer
    later: KafkaSink = pickle.loads(pickle.dumps(driver))
    assigned.clear()
    assert later.ledger.positions(fence)[T0].position == 3
    assert later.cluster is first.cluster
    assert assigned == []
