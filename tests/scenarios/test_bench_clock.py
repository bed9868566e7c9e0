"""What the benchmark's clock relies on: a broker stamps the marker of a commit, too."""

from __future__ import annotations

from confluent_kafka import Producer

from bench.kafka.check import committed, settle
from bench.kafka.clock import _stamps, appended
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

    producer.commit_transaction(120)
    settle(broker.bootstrap, topic_name)
    assert committed(broker.bootstrap, topic_name)[1] == [(b"k", b"v")]
    (segment,) = (data / f"{topic_name}-1").glob("*.log")
    assert len(list(_stamps(segment))) == 2  # the record, and the marker
    assert appended(data, topic_name)[0] == written
