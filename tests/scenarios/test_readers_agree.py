"""Hostile logs are read alike by Spark's Kafka source, a Java client, and the engine's reader."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import DataLost
from oncely.kafka.reader import RecordReader
from oncely.kafka.records import KafkaRecord
from oncely.testing.servers.kafka import Broker
from tests.hostile_logs import MakeTopic, Ranges, Records, codecs, compacted, read, some, whole

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def reader(broker: Broker, taken_as: str) -> Iterator[RecordReader]:
    with closing(RecordReader(broker.bootstrap, {})) as made:
        yield made


def by_spark(spark: Any, broker: Broker, ranges: Ranges) -> Records:
    """What Spark's source finds. It has no headers where there are none, instead of an empty
    list."""
    options = {
        "kafka.bootstrap.servers": broker.bootstrap, "kafka.isolation.level": "read_committed",
        "includeHeaders": "true", "failOnDataLoss": "true", "assign": _by_topic(ranges, list),
        "startingOffsets": _by_topic(ranges, lambda own: {n: one.start for n, one in own.items()}),
        "endingOffsets": _by_topic(ranges, lambda own: {n: one.end for n, one in own.items()}),
    }  # fmt: skip
    frame = (
        spark.read.format("kafka")
        .options(**options)
        .load()
        .selectExpr(
            "topic", "partition", "offset", "unix_millis(timestamp) at", "key", "value", "headers"
        )
    )
    found: Records = {tp: [] for tp in ranges}
    for row in sorted(frame.collect(), key=lambda row: row.offset):
        headers = tuple((key, _bytes(value)) for key, value in row.headers or ())
        record = KafkaRecord(row.at, _bytes(row.key), _bytes(row.value), headers)
        found[TopicPartition(row.topic, row.partition)].append((row.offset, record))
    return found


def _by_topic(ranges: Ranges, told: Callable[[dict[int, OffsetRange]], object]) -> str:
    (topic,) = {tp.topic for tp in ranges}
    return json.dumps({topic: told({tp.partition: one for tp, one in ranges.items()})})


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


@pytest.mark.parametrize("clock", ["CreateTime", "LogAppendTime"])
def test_transactions_codecs_and_records_of_all_forms(
    spark: Any, broker: Broker, make_topic: MakeTopic, reader: RecordReader, clock: str
) -> None:
    topic, producers = codecs(broker, make_topic, **{"message.timestamp.type": clock})
    of, choose = whole(broker, topic), random.Random(clock)
    aborted = {TopicPartition(topic, 5): of[TopicPartition(topic, 5)]}
    for ranges in (of, aborted, *(some(choose, of) for _ in range(6))):
        assert read(reader, ranges) == by_spark(spark, broker, ranges)
    producers[2].abort_transaction(120)


def test_a_compacted_log_before_and_after_a_restart(
    spark: Any, tmp_path: Path, taken_as: str
) -> None:
    """The reader's consumer is kept over the restart."""
    cleans_often = {"log.cleaner.backoff.ms": "100"}
    with (
        Broker(tmp_path, properties=cleans_often) as broker,
        closing(RecordReader(broker.bootstrap, {})) as reader,
    ):
        topic = compacted(broker)
        of, choose = whole(broker, topic), random.Random(5)
        (tp,) = of
        in_a_hole = {tp: OffsetRange(20, 150)}
        assert read(reader, in_a_hole) == {tp: []} == by_spark(spark, broker, in_a_hole)
        for ranges in (of, *(some(choose, of) for _ in range(3))):
            assert read(reader, ranges) == by_spark(spark, broker, ranges)
        broker.stop()
        broker.start()
        for ranges in (of, in_a_hole, some(choose, of)):
            assert read(reader, ranges) == by_spark(spark, broker, ranges)


def test_records_that_were_deleted_are_refused_by_both(
    spark: Any, broker: Broker, make_topic: MakeTopic, reader: RecordReader
) -> None:
    topic = make_topic(records=[(0, None, b"%d" % n) for n in range(20)])
    of = whole(broker, topic)
    broker.delete_records(topic, {0: 7})
    with pytest.raises(DataLost):
        read(reader, of)
    with pytest.raises(Exception, match=r"(?i)offset"):
        by_spark(spark, broker, of)
    left = {tp: OffsetRange(7, one.end) for tp, one in of.items()}
    assert read(reader, left) == by_spark(spark, broker, left)


def test_records_of_10_mb(
    spark: Any, broker: Broker, make_topic: MakeTopic, reader: RecordReader
) -> None:
    large = [(0, None, random.Random(n).randbytes(10_000_000)) for n in range(3)]
    topic = make_topic(
        records=[*large, (0, b"small", b"")], config={"max.message.bytes": "20000000"}
    )
    ranges = {TopicPartition(topic, 0): OffsetRange(1, 4)}
    assert read(reader, ranges) == by_spark(spark, broker, ranges)
