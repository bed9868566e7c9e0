"""Which topic it is, where it begins, and where a reader of committed records gets to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import KafkaException, Producer

from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError
from oncely.kafka.source import (
    KafkaSource,
    PartitionLag,
    Watermarks,
    measure_lag,
    open_transactions,
)
from oncely.kafka.start import StartTime
from oncely.pipeline.status import Status, _hidden
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker

MakeTopic = Callable[..., str]
DAY = 1_717_113_600_000


@pytest.fixture
def source(broker: Broker, topic_name: str) -> Iterator[KafkaSource]:
    """Reads ``topic_name``, which the test creates."""
    with KafkaSource(broker.bootstrap, [topic_name]) as source:
        yield source


class Transactions:
    """Writes records in transactions of its own."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self.topic = topic
        self.producer = Producer(
            {
                **broker.client_config(),
                "transactional.id": f"writer-{topic}",
                "transaction.timeout.ms": 60_000,
            }
        )
        self.producer.init_transactions(120)

    def write(self, *values: bytes, partition: int = 0, at: int = DAY) -> None:
        for value in values:
            self.producer.produce(self.topic, value, partition=partition, timestamp=at)
        assert self.producer.flush(120) == 0


@pytest.fixture
def writer(broker: Broker, topic_name: str, make_topic: MakeTopic) -> Iterator[Transactions]:
    """Writes to ``topic_name``, two partitions; what is open at the end is aborted."""
    make_topic(name=topic_name, partitions=2)
    writer = Transactions(broker, topic_name)
    yield writer
    with contextlib.suppress(KafkaException):  # none is open
        writer.producer.abort_transaction(120)


def test_the_end_is_the_last_stable_offset(source: KafkaSource, writer: Transactions) -> None:
    p0, p1 = (TopicPartition(source.topics[0], n) for n in (0, 1))
    assert source.partitions() == [p0, p1]
    assert source.watermarks() == {p0: Watermarks(0, 0, 0), p1: Watermarks(0, 0, 0)}

    writer.producer.begin_transaction()
    writer.write(b"a", b"b", b"c")
    writer.producer.commit_transaction(120)
    # Three records and the marker of the commit.
    await_that(lambda: source.stable_end()[p0] == 4, "the stable end")
    assert source.watermarks()[p0] == Watermarks(0, 4, 4)

    writer.producer.begin_transaction()
    writer.write(b"d", b"e")
    writer.producer.abort_transaction(120)
    await_that(lambda: source.stable_end()[p0] == 7, "the stable end")

    writer.producer.begin_transaction()
    writer.write(b"f", b"g")
    assert source.watermarks()[p0] == Watermarks(0, 7, 9), "an open transaction holds the end"
    assert source.stable_end() == {p0: 7, p1: 0}
    assert source.resolve_start("latest") == {p0: 7, p1: 0}
    assert source.earliest() == {p0: 0, p1: 0}


def test_lag_counts_to_the_stable_end_and_ages_from_the_next_record(
    source: KafkaSource, writer: Transactions
) -> None:
    topic = source.topics[0]
    p0, p1 = (TopicPartition(topic, n) for n in (0, 1))
    writer.producer.begin_transaction()
    writer.write(b"a", at=DAY)
    writer.write(b"b", at=DAY + 60_000)
    writer.producer.commit_transaction(120)
    writer.producer.begin_transaction()
    writer.write(b"no", at=DAY + 90_000)
    writer.producer.abort_transaction(120)
    writer.producer.begin_transaction()
    writer.write(b"open", at=DAY + 120_000)
    writer.write(b"open", partition=1, at=DAY)
    await_that(lambda: source.stable_end()[p0] == 5, "the stable end")
    now = DAY + 100_000

    def lag(position: int | None) -> list[PartitionLag]:
        return measure_lag(source, {} if position is None else {p0: position, p1: 0}, now)

    assert lag(None) == [
        PartitionLag(topic, 0, None, 5, 5, 100.0),
        PartitionLag(topic, 1, None, 0, 0, 0.0),
    ]
    assert lag(1)[0] == PartitionLag(topic, 0, 1, 5, 4, 40.0)
    # Only a marker, an aborted record and its marker are left: nothing that has an age.
    assert lag(2)[0] == PartitionLag(topic, 0, 2, 5, 3, None)
    assert lag(5)[0] == PartitionLag(topic, 0, 5, 5, 0, 0.0)
    assert source.timestamps_at({p0: 0, p1: 0}) == {p0: DAY, p1: None}
    # Of open transactions the one of p1 is the oldest; a line of an earlier end is not judged.
    assert open_transactions(source, lag(5), DAY + 180_000) == {p0: 60.0, p1: 180.0}
    assert open_transactions(source, [lag(5)[0]._replace(end=2)], DAY + 180_000) == {}
    reason = _hidden(source, lag(5), DAY + 180_000)
    assert f"records of {p1} from offset 0 on wait" in reason
    assert f"abort --topic {topic} --partition 1 --start-offset 0" in reason
    assert _hidden(source, lag(5), DAY + 60_000) == ""
    told = Status(tuple(lag(5)), 0, 1, hidden=reason)
    assert told.judgement[:2] == ("hidden", reason)
    assert (told.as_json()["state"], told.as_json()["reason"]) == ("WARN", reason)
    writer.producer.commit_transaction(120)
    await_that(lambda: source.stable_end()[p0] == 7, "the end of the transaction")
    assert open_transactions(source, lag(5), DAY + 180_000) == {}


def test_a_moment_is_the_first_record_from_then_on(
    source: KafkaSource, writer: Transactions
) -> None:
    p0, p1 = (TopicPartition(source.topics[0], n) for n in (0, 1))
    writer.producer.begin_transaction()
    for n in range(5):
        writer.write(b"x", at=DAY + n * 1000)
    writer.write(b"x", partition=1, at=DAY + 9000)
    writer.producer.commit_transaction(120)
    await_that(lambda: source.stable_end() == {p0: 6, p1: 2}, "the stable end")
    later = int(time.time() * 1000) + 3_600_000
    for moment, expected in (
        (DAY + 2000, {p0: 2, p1: 0}),
        (DAY + 2001, {p0: 3, p1: 0}),
        # The marker of the commit counts for the broker: it is as young as this test.
        (DAY + 5000, {p0: 5, p1: 0}),
        (DAY + 90_000, {p0: 5, p1: 1}),
        (later, {p0: 6, p1: 2}),
        (0, {p0: 0, p1: 0}),
        (-5, {p0: 0, p1: 0}),
    ):
        assert source.resolve_start(StartTime(moment)) == expected, moment
    # What an open transaction has written does not count yet: the end is the stable one.
    writer.producer.begin_transaction()
    writer.write(b"open", at=later + 1)
    assert source.offsets_at(later) == {p0: 6, p1: 2}


def test_records_that_retention_took(
    broker: Broker, source: KafkaSource, make_topic: MakeTopic
) -> None:
    topic = make_topic(name=source.topics[0], records=[(0, None, b"x")] * 10)
    broker.delete_records(topic, {0: 7})
    tp = TopicPartition(topic, 0)
    assert source.watermarks() == {tp: Watermarks(7, 10, 10)}
    assert source.resolve_start("earliest") == {tp: 7}
    assert measure_lag(source, {tp: 3}, 0)[0].lag == 7, "as far as the ledger is behind"


def test_a_topic_made_again_has_another_id(
    broker: Broker, source: KafkaSource, make_topic: MakeTopic
) -> None:
    topic = make_topic(name=source.topics[0])
    first = source.identity()
    assert source.identity() == first
    assert len(first.cluster_id) > 10
    broker.delete_topic(topic)
    with pytest.raises(ConfigError, match=r"source\.topics: no such topic on") as caught:
        source.identity()
    assert repr(topic) in str(caught.value)
    assert caught.value.way_out
    broker.create_topic(topic, 1)
    second = source.identity()
    assert second.cluster_id == first.cluster_id
    assert second.topic_ids[topic] != first.topic_ids[topic]
    assert set(second.topic_ids[topic]) <= set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    ), "as kafka-topics --describe prints it"


def test_a_partition_added_is_seen_at_once(
    broker: Broker, source: KafkaSource, make_topic: MakeTopic
) -> None:
    topic = make_topic(name=source.topics[0], records=[(0, None, b"x")])
    assert len(source.partitions()) == 1
    broker.add_partitions(topic, 3)
    assert source.earliest() == {TopicPartition(topic, n): 0 for n in range(3)}
    assert source.stable_end() == {TopicPartition(topic, n): int(n == 0) for n in range(3)}


def test_one_missing_topic_of_several_is_named(broker: Broker, make_topic: MakeTopic) -> None:
    with (
        KafkaSource(broker.bootstrap, [make_topic(), "no-such-topic"]) as source,
        pytest.raises(ConfigError) as caught,
    ):
        source.stable_end()
    assert caught.value.key == "source.topics"
    assert "'no-such-topic'" in str(caught.value)
    assert source.topics[0] not in str(caught.value)
