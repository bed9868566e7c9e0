"""The engine's reader on real logs: the records of exact ranges, or an error, never a part."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Producer

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import DataLost, Unavailable
from oncely.kafka.reader import RecordReader
from oncely.kafka.records import LATEST_MS
from oncely.testing.servers.kafka import Broker
from tests.conftest import produce
from tests.hostile_logs import (
    ANY_TIME,
    MakeTopic,
    by_messages,
    codecs,
    read,
    some,
    transactional,
    whole,
    write,
)


@pytest.fixture
def reader(broker: Broker, taken_as: str) -> Iterator[RecordReader]:
    with closing(RecordReader(broker.bootstrap, {})) as made:
        yield made


@pytest.mark.parametrize("clock", ["CreateTime", "LogAppendTime"])
def test_any_ranges_of_hostile_logs(
    broker: Broker, make_topic: MakeTopic, reader: RecordReader, clock: str
) -> None:
    """Records of all forms in all codecs; aborted, committed and open transactions; starts inside
    of batches. In the long suite Spark reads the same."""
    config = {"message.timestamp.type": clock}
    topic, producers = codecs(broker, make_topic, **config)
    of, choose = whole(broker, topic), random.Random(clock)
    records = read(reader, of)
    assert records == by_messages(broker, topic, of)
    assert not records[TopicPartition(topic, 5)]
    assert len({record for own in records.values() for _, record in own}) > 100
    for _ in range(25):
        ranges = some(choose, of)
        assert read(reader, ranges) == {
            tp: [one for one in records[tp] if one[0] in range_] for tp, range_ in ranges.items()
        }
    producers[2].abort_transaction(120)


def test_a_range_beyond_the_last_stable_offset_waits(
    broker: Broker, make_topic: MakeTopic, reader: RecordReader
) -> None:
    topic, found = make_topic(config=ANY_TIME), []
    tp = TopicPartition(topic, 0)
    producer = transactional(broker, topic)
    write(producer, topic, 3, "open")
    with pytest.raises(Unavailable):
        read(reader, {tp: OffsetRange(0, 3)}, silence=0.5)
    thread = threading.Thread(target=lambda: found.append(read(reader, {tp: OffsetRange(0, 3)})))
    thread.start()
    producer.commit_transaction(120)
    thread.join(180)
    assert [offset for offset, _ in found[0][tp]] == [0, 1, 2]


def test_deleted_records(broker: Broker, make_topic: MakeTopic, reader: RecordReader) -> None:
    topic = make_topic(partitions=2, records=[(n % 2, None, b"%d" % n) for n in range(20)])
    t0, t1 = TopicPartition(topic, 0), TopicPartition(topic, 1)
    ranges = {t0: OffsetRange(0, 10), t1: OffsetRange(2, 10)}
    assert len(read(reader, ranges)[t0]) == 10
    broker.delete_records(topic, {0: 4})
    with pytest.raises(DataLost, match=rf"{t0} has the offsets \[4, 10\)"):
        read(reader, ranges)
    found = read(reader, ranges, lost="skip")
    assert [o for o, _ in found[t0]] == [*range(4, 10)]
    assert [o for o, _ in found[t1]] == [*range(2, 10)]
    broker.delete_records(topic, {0: 10})
    with pytest.raises(DataLost):
        read(reader, {t0: OffsetRange(4, 10)})
    assert read(reader, {t0: OffsetRange(4, 10)}, lost="skip") == {t0: []}


def test_only_the_columns_that_are_needed(
    broker: Broker, make_topic: MakeTopic, reader: RecordReader
) -> None:
    topic = make_topic(records=[(0, b"k", b"v"), (0, b"k", None)])
    ranges = {TopicPartition(topic, 0): OffsetRange(0, 2)}
    origin = ["topic", "partition", "offset"]
    for needs in ([], ["value"], ["headers", "key"]):
        (piece,) = reader.read(ranges, frozenset(needs))
        assert piece.records.column_names == [*origin, *needs]
        assert piece.leader_epoch >= 0


def turns(
    reader: RecordReader,
    size: int,
    parts: Sequence[TopicPartition],
    while_: Iterable[object],
    **options: float,
) -> None:
    """Ranges here and there; nothing of the place before may be taken for the next."""
    choose = random.Random(7)
    for _ in while_:
        ranges = {}
        for tp in choose.sample(parts, choose.randrange(1, len(parts) + 1)):
            start = choose.randrange(size)
            ranges[tp] = OffsetRange(start, min(size, start + choose.choice([1, 10, 500])))
        if choose.random() < 0.3:  # left in the middle
            next(reader.read(ranges, **options))
            continue
        for tp, found in read(reader, ranges, **options).items():
            own = ranges[tp]
            assert [(o, r.value) for o, r in found] == [
                (o, b"%d:%d" % (tp.partition, o)) for o in range(own.start, own.end)
            ]


@pytest.mark.parametrize(
    "count",
    [
        100,
        pytest.param(1_000, marks=[pytest.mark.long, pytest.mark.deep, pytest.mark.timeout(300)]),
        pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.deep, pytest.mark.timeout(900)]),
    ],
)
def test_random_assignments_of_one_consumer(
    broker: Broker, make_topic: MakeTopic, reader: RecordReader, count: int
) -> None:
    size = 5_000
    records = [(p, None, b"%d:%d" % (p, n)) for n in range(size) for p in range(4)]
    topic = make_topic(partitions=4, records=records)
    turns(reader, size, [TopicPartition(topic, number) for number in range(4)], range(count))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_random_assignments_while_the_broker_is_killed_and_started(
    tmp_path: Path, taken_as: str
) -> None:
    """A read fails, or it is exact; the next one begins with what librdkafka has kept."""
    size, failed = 5_000, 0
    with Broker(tmp_path) as broker, closing(RecordReader(broker.bootstrap, {})) as reader:
        topic = broker.create_topic("t", 4)
        produce(
            broker, topic, [(p, None, b"%d:%d" % (p, n)) for n in range(size) for p in range(4)]
        )
        parts = [TopicPartition(topic, number) for number in range(4)]
        for _ in range(3):
            broker.kill()
            restart = threading.Thread(target=broker.start)
            restart.start()
            while restart.is_alive():
                try:
                    turns(reader, size, parts, range(20), silence=2.0)
                except Unavailable:
                    failed += 1
            restart.join()
            turns(reader, size, parts, range(100))
    assert failed


def test_large_records(broker: Broker, make_topic: MakeTopic, reader: RecordReader) -> None:
    large = [random.Random(n).randbytes(10_000_000) for n in range(4)]
    topic = make_topic(
        records=[(0, None, one) for one in large], config={"max.message.bytes": "20000000"}
    )
    tp = TopicPartition(topic, 0)
    found = read(reader, {tp: OffsetRange(1, 4)})[tp]
    assert [record.value for _, record in found] == large[1:]


def test_a_timestamp_that_no_column_can_hold_is_null(
    broker: Broker, make_topic: MakeTopic, reader: RecordReader
) -> None:
    """A producer has sent nanoseconds for milliseconds."""
    topic = make_topic(config=ANY_TIME)
    producer = Producer(broker.client_config())
    times = [1_700_000_000_000, 1_700_000_000_000_000_000, LATEST_MS, LATEST_MS + 1, -LATEST_MS]
    for at in times:
        producer.produce(topic, b"%d" % at, timestamp=at)
    assert producer.flush(120) == 0
    tp = TopicPartition(topic, 0)
    found = [record for _, record in read(reader, {tp: OffsetRange(0, len(times))})[tp]]
    assert [one.value for one in found] == [b"%d" % at for at in times]
    assert [one.timestamp_ms for one in found] == [times[0], None, LATEST_MS, None, -LATEST_MS]
