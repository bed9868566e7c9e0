"""The benchmark's clock ends when a ``read_committed`` reader sees the result, not earlier."""

from __future__ import annotations

import time

from confluent_kafka import Producer

from bench.kafka.check import committed, settle
from bench.kafka.clock import appended
from oncely.testing.servers.kafka import Broker

STAMPED = {"message.timestamp.type": "LogAppendTime"}


def test_the_last_stamp_is_the_commit(broker: Broker, topic_name: str) -> None:
    broker.create_topic(topic_name, 4, config=STAMPED)
    data = broker.directory / "data"
    assert appended(data, topic_name) == (0.0, 0.0)
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap, "transactional.id": topic_name, "linger.ms": 0}
    )
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce(topic_name, b"v", b"k", partition=1)
    producer.flush(120)
    written, last = appended(data, topic_name)
    assert written == last
    assert not any(committed(broker.bootstrap, topic_name).values())

    while time.time() < last + 0.002:  # the broker's stamps are whole milliseconds
        pass
    producer.commit_transaction(120)
    settle(broker.bootstrap, topic_name)
    assert committed(broker.bootstrap, topic_name)[1] == [(b"k", b"v")]
    first, last = appended(data, topic_name)
    assert first == written
    assert written < last <= time.time()
