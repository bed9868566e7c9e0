"""Single records read again: each as Kafka holds it, absent only when it is gone."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Producer

from oncely.core.ranges import TopicPartition
from oncely.kafka.records import KafkaRecord
from oncely.kafka.source import KafkaSource
from oncely.testing.servers.kafka import Broker

MakeTopic = Callable[..., str]


def test_every_part_of_a_record(broker: Broker, make_topic: MakeTopic) -> None:
    topic = make_topic()
    producer = Producer(broker.client_config())
    headers = [("h", b"\x00\xff"), ("h", b"again"), ("none", None)]
    producer.produce(topic, b"v\x00", b"k", timestamp=1234, headers=headers)
    producer.produce(topic, None, b"tombstone", timestamp=1)
    producer.produce(topic, b"", None, timestamp=5)
    assert producer.flush(30) == 0
    with KafkaSource(broker.bootstrap, [topic]) as source:
        assert source.fetch(TopicPartition(topic, 0), [2, 0, 1, 1]) == {
            0: KafkaRecord(1234, b"k", b"v\x00", tuple(headers)),
            1: KafkaRecord(1, b"tombstone", None, ()),
            2: KafkaRecord(5, None, b"", ()),
        }


def test_any_choice_of_offsets_of_two_partitions_in_turn(
    broker: Broker, make_topic: MakeTopic
) -> None:
    """One consumer is moved about; nothing of the place before may be taken for the next."""
    size = 20_000
    records = [(n % 2, None, f"{n % 2}:{n // 2}".encode()) for n in range(2 * size)]
    topic = make_topic(partitions=2, records=records)
    choose = random.Random(7)
    with KafkaSource(broker.bootstrap, [topic]) as source:
        for turn in range(30):
            partition, start = turn % 2, choose.randrange(size)
            dense = range(start, min(size, start + choose.choice([1, 10, 2000])))
            offsets = {*dense, *choose.sample(range(size), choose.randrange(12))}
            offsets = set(choose.sample(sorted(offsets), k=len(offsets) // 2 + 1))
            found = source.fetch(TopicPartition(topic, partition), sorted(offsets))
            assert found.keys() == offsets
            assert all(r.value == f"{partition}:{o}".encode() for o, r in found.items())


def test_holes_and_what_is_gone(broker: Broker, make_topic: MakeTopic) -> None:
    topic = make_topic()
    producer = Producer({**broker.client_config(), "transactional.id": f"writer-{topic}"})
    producer.init_transactions(30)
    for ending in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        for n in range(3):
            producer.produce(topic, b"%d" % n)
        producer.flush(30)  # or an abort would drop what was not sent yet
        ending(30)
    # 0 1 2 marker 4 5 6 marker; 4 to 6 are aborted, but their bytes are still there.
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush(30)
    broker.delete_records(topic, {0: 2})
    tp = TopicPartition(topic, 0)
    with KafkaSource(broker.bootstrap, [topic]) as source:
        # Waiting for what is gone would end in an error.
        assert set(source.fetch(tp, range(12))) == {2, 4, 5, 6, 8}
        assert source.fetch(tp, [0, 1]) == {}
        assert source.fetch(tp, [3]) == {}
        assert source.fetch(tp, [7, 8]).keys() == {8}
        assert source.fetch(tp, [1000]) == {}
        assert source.fetch(tp, []) == {}
    producer.abort_transaction(30)


def test_a_record_larger_than_what_is_fetched_at_once(
    broker: Broker, make_topic: MakeTopic
) -> None:
    large = bytes(random.Random(1).randbytes(12_000_000))
    topic = make_topic(
        records=[(0, None, b"small"), (0, None, large), (0, None, b"small")],
        config={"max.message.bytes": "20000000"},
    )
    tp = TopicPartition(topic, 0)
    with KafkaSource(broker.bootstrap, [topic]) as source:
        assert source.fetch(tp, [1])[1].value == large
        assert source.fetch(tp, [2])[2].value == b"small"
        assert source.timestamps_at({tp: 1})[tp] == pytest.approx(time.time() * 1000, abs=60_000)
        assert source.too_large() == []
    with KafkaSource(
        broker.bootstrap, [topic], kafka={"receive.message.max.bytes": "19000000"}
    ) as source:
        (told,) = source.too_large()
        assert told.startswith(f"{topic} accepts batches of 20,000,000 bytes")


def test_nothing_is_printed(
    broker: Broker,
    make_topic: MakeTopic,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # nobody has configured logging
    topic = make_topic(records=[(0, None, b"x")])
    capfd.readouterr()  # the producer's
    for _ in range(3):
        with KafkaSource(broker.bootstrap, [topic]) as source:
            source.watermarks()
            source.fetch(TopicPartition(topic, 0), [0])
            source.timestamps_at({TopicPartition(topic, 0): 0})
        gc.collect()
    broken = KafkaSource(f"{broker.bootstrap},127.0.0.1:1", [topic])
    assert broken.partitions()
    broken.close()
    del broken
    gc.collect()
    assert capfd.readouterr() == ("", "")
