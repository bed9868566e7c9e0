"""The audit reads a topic up to an end that was fixed before, whatever is open or written since."""

from __future__ import annotations

import threading
import uuid

import confluent_kafka as ck
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from oncely.audit.stored.log import Topics
from oncely.audit.stored.manifest import read_manifest
from oncely.audit.stored.topic_ledger import read_ledger, read_letters
from oncely.audit.topic import KafkaLog
from oncely.core.ranges import TopicPartition
from oncely.errors import Unavailable
from oncely.testing.servers.kafka import Broker
from tests import filestools, kafkatools
from tests.sinktools import SOURCE, T0, T1, Rec, chunk, commit_all, numbered


@pytest.fixture
def topics(broker: Broker) -> Topics:
    return Topics(broker.bootstrap, timeout=15.0)


def _producer(broker: Broker) -> Producer:
    own = {"transactional.id": uuid.uuid4().hex, "log_level": 0}
    producer = Producer({"bootstrap.servers": broker.bootstrap, **own})
    producer.init_transactions(120)
    return producer


def _write(producer: Producer, topic: str, *values: bytes) -> None:
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(120) == 0


def test_committed_records_below_the_end_are_read(broker: Broker, topics: Topics) -> None:
    topic = broker.create_topic(f"t-{uuid.uuid4().hex}")
    here, producer = TopicPartition(topic, 0), _producer(broker)
    producer.begin_transaction()
    _write(producer, topic, b"aborted")
    producer.abort_transaction(120)
    producer.begin_transaction()
    _write(producer, topic, b"1", b"2")
    producer.commit_transaction(120)
    end = topics.ends(topic)[here]
    assert (end.first, end.stable, end.high) == (0, 5, 5)
    producer.begin_transaction()
    _write(producer, topic, b"later")
    producer.commit_transaction(120)
    found = [(one.offset(), one.value()) for one in topics.read({here: end.high})]
    assert found == [(2, b"1"), (3, b"2")]
    assert [one.offset() for one in topics.read({here: end.high}, {here: 3})] == [3]
    assert list(topics.read({here: 0})) == []


def test_the_end_includes_what_an_open_transaction_hides(broker: Broker, topics: Topics) -> None:
    topic = broker.create_topic(f"t-{uuid.uuid4().hex}")
    here = TopicPartition(topic, 0)
    still_open, done = _producer(broker), _producer(broker)
    still_open.begin_transaction()
    _write(still_open, topic, b"open")
    done.begin_transaction()
    _write(done, topic, b"done")
    done.commit_transaction(120)
    end = topics.ends(topic)[here]
    assert (end.stable, end.high) == (0, 3)
    found: list[bytes] = []
    reading = threading.Thread(
        target=lambda: found.extend(one.value() for one in topics.read({here: end.high}))
    )
    reading.start()
    still_open.abort_transaction(120)
    reading.join(180)
    assert found == [b"done"]


def test_a_transaction_that_stays_open_is_named(broker: Broker) -> None:
    topic = broker.create_topic(f"t-{uuid.uuid4().hex}")
    here, producer = TopicPartition(topic, 0), _producer(broker)
    producer.begin_transaction()
    _write(producer, topic, b"open")
    with pytest.raises(Unavailable, match=f"open transaction.*{topic}-0 below offset 1"):
        list(Topics(broker.bootstrap, timeout=0.5).read({here: 1}))
    producer.abort_transaction(120)


def test_records_that_were_deleted_are_passed_over_or_refused(broker: Broker) -> None:
    topic = broker.create_topic(f"t-{uuid.uuid4().hex}")
    here, producer = TopicPartition(topic, 0), Producer(broker.client_config())
    _write(producer, topic, b"0", b"1", b"2", b"3")
    admin = AdminClient(broker.client_config())
    for done in admin.delete_records([ck.TopicPartition(topic, 0, 2)]).values():
        done.result(120)
    left = [one.offset() for one in Topics(broker.bootstrap).read({here: 4}, {here: 1})]
    assert left == [2, 3]
    whole = Topics(broker.bootstrap, deleted="refuse")
    assert [one.offset() for one in whole.read({here: 4}, {here: 2})] == [2, 3]
    with pytest.raises(Unavailable, match="read the topics"):
        list(whole.read({here: 4}, {here: 1}))


def test_an_end_that_the_log_does_not_reach_is_never_taken_for_the_end(broker: Broker) -> None:
    topic = broker.create_topic(f"t-{uuid.uuid4().hex}")
    _write(Producer(broker.client_config()), topic, b"0", b"1")
    with pytest.raises(Unavailable, match=f"{topic}-0 below offset 3"):
        list(Topics(broker.bootstrap, timeout=1.0).read({TopicPartition(topic, 0): 3}))


def test_a_missing_topic_has_no_ends(topics: Topics, topic_name: str) -> None:
    assert topics.ends(topic_name) == {}
    assert topics.topic_id(topic_name) is None
    ledger = read_ledger(topics, topic_name, "p")
    assert (ledger.pipeline, ledger.messages) == (None, ())
    assert not read_manifest(topics, topic_name).files
    assert list(read_letters(topics, topic_name, "p", ledger)) == []


def test_the_ledger_of_a_kafka_sink_is_read(broker: Broker, topics: Topics) -> None:
    place = kafkatools.make_topics(broker)
    sink, fence = kafkatools.ready(place.sink(), {T0: 0, T1: 5})
    commit_all(sink, chunk({T0: (0, [*numbered(0, 3), Rec(3, bad="odd")])}), fence)
    sink.close()
    ledger = read_ledger(topics, place.ledger, place.pipeline)
    assert ledger.source == SOURCE
    assert {tp: one.position for tp, one in ledger.positions.items()} == {T0: 4, T1: 5}
    kinds = [one.entry.kind for one in ledger.history(T0) if one.entry]  # type: ignore[union-attr]
    assert kinds == ["taken", "data"]
    letters = list(read_letters(topics, place.rejects, place.pipeline, ledger))
    assert [(one.of, one.offset, one.waits) for one in letters] == [(T0, 3, True)]


def test_the_manifest_of_a_files_sink_is_read(
    broker: Broker, topics: Topics, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = filestools.make_place(broker, tmp_path_factory.mktemp("files"))
    sink = place.sink()
    fence = filestools.open_sink(sink).fence
    sink.begin_batch()
    filestools.publish_all(sink, filestools.what(filestools.stage(sink, fence)), fence)
    sink.close()
    found = read_manifest(topics, f"{place.name}.manifest")
    assert found.problems == []
    assert found.owners[0].pipeline == place.name
    assert sum(one.rows for one in found.files.values()) == len(filestools.IDS)


def test_times_around_offsets_of_all_partitions(broker: Broker) -> None:
    """Also behind more offsets without a record than are read at first."""
    topic, at = broker.create_topic(f"t-{uuid.uuid4().hex}", 3), 1_700_000_000
    producer = _producer(broker)

    def write(partition: int, *seconds: int) -> None:
        for one in seconds:
            producer.produce(topic, b"", partition=partition, timestamp=(at + one) * 1000)
        assert producer.flush(120) == 0

    producer.begin_transaction()
    write(0, 1, 2)
    write(2, 5, 6)
    producer.commit_transaction(120)  # markers at 0-2 and 2-2
    producer.begin_transaction()
    write(0, *range(100))
    producer.abort_transaction(120)
    producer.begin_transaction()
    write(0, 3)
    producer.commit_transaction(120)
    log, zero, one, two = KafkaLog(broker.bootstrap, [topic]), *(
        TopicPartition(topic, number) for number in range(3)
    )  # fmt: skip

    def times(asked: dict[TopicPartition, int]) -> dict[TopicPartition, tuple[int | None, ...]]:
        return {
            tp: tuple(None if t is None else int(t.timestamp()) - at for t in both)
            for tp, both in log.times(asked).items()
        }

    assert times({zero: 104, one: 0, two: 1}) == {zero: (2, 3), one: (None, None), two: (5, 6)}
    assert times({zero: 0, two: 3}) == {zero: (None, 1), two: (6, None)}
    assert times({zero: 103, two: 0}) == {zero: (2, 3), two: (None, 5)}
    assert times({}) == {}
    log.close()
