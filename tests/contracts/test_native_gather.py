"""The records that oncely-native takes: bounded memory, errors, and the end of the consumer."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import closing

import psutil
import pyarrow as pa
import pytest

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Unavailable
from oncely.kafka import inbox
from oncely.kafka.reader import RecordReader
from oncely.kafka.records import EVERY_COLUMN, table_of
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.process import free_port
from tests.hostile_logs import MakeTopic
from tests.nativetools import need_native

MIB = 1 << 20


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    need_native(monkeypatch)


def highest(work: Callable[[], None]) -> int:
    """The bytes that the process grows by meanwhile, at most."""
    process, ended, found = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def look() -> None:
        while not ended.wait(0.005):
            found.append(process.memory_info().rss - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return max(found)


def test_the_memory_of_large_records_is_bounded(
    broker: Broker, make_topic: MakeTopic, taken_as: str
) -> None:
    large, count = random.Random(1).randbytes(10_000_000), 40
    topic = make_topic(config={"max.message.bytes": "20000000"})
    for number in range(count):
        broker_produce(broker, topic, b"%d" % number + large)
    tp, seen = TopicPartition(topic, 0), 0

    def work() -> None:
        nonlocal seen
        with closing(RecordReader(broker.bootstrap, {})) as reader:
            for piece in reader.read({tp: OffsetRange(0, count)}, frozenset({"value"})):
                for value in piece.records["value"]:
                    start = b"%d" % seen
                    assert value.as_buffer().size == len(large) + len(start)
                    seen += 1

    assert highest(work) < 160 * MIB
    assert seen == count


def broker_produce(broker: Broker, topic: str, value: bytes) -> None:
    from confluent_kafka import Producer

    producer = Producer({**broker.client_config(), "message.max.bytes": 20_000_000})
    producer.produce(topic, value)
    assert producer.flush(30) == 0


def test_a_reader_can_be_closed_while_records_wait(
    broker: Broker, make_topic: MakeTopic, native: None
) -> None:
    """A consumer does not end while a message of it exists; and nothing of a place before is
    taken for the next."""
    topic = make_topic(partitions=2, records=[(n % 2, None, b"%d" % n) for n in range(60_000)])
    tps = [TopicPartition(topic, number) for number in range(2)]
    for _ in range(3):
        with closing(RecordReader(broker.bootstrap, {})) as reader:
            next(reader.read(dict.fromkeys(tps, OffsetRange(0, 30_000))))
            (piece,) = reader.read({tps[1]: OffsetRange(5, 7)})
            assert piece.records["value"].to_pylist() == [b"11", b"13"]
            next(reader.read({tps[0]: OffsetRange(9, 30_000)}))


def test_the_table_is_that_of_messages(
    broker: Broker, make_topic: MakeTopic, taken_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(partitions=3, records=[(n % 3, b"k", b"%d" % n) for n in range(9)])
    ranges = {TopicPartition(topic, number): OffsetRange(1, 3) for number in range(3)}
    with closing(RecordReader(broker.bootstrap, {})) as reader:
        tables = list(reader.tables(ranges))
    assert all(one.schema == table_of([], EVERY_COLUMN).schema for one in tables)
    rows = sorted(pa.concat_tables(tables).select(["partition", "offset", "value"]).to_pylist(),
                  key=lambda row: (row["partition"], row["offset"]))  # fmt: skip
    assert [(one["partition"], one["offset"], one["value"]) for one in rows] == [
        (p, o, b"%d" % (p + 3 * o)) for p in range(3) for o in (1, 2)
    ]


def test_the_reason_of_a_missing_answer_is_told(taken_as: str) -> None:
    """It comes by a callback of confluent-kafka, which runs in its own poll."""
    ranges = {TopicPartition("t", 0): OffsetRange(0, 1)}
    with (
        closing(RecordReader(f"127.0.0.1:{free_port()}", {})) as reader,
        pytest.raises(Unavailable, match=r"no answer from .* Connection refused"),
    ):
        list(reader.read(ranges, silence=1.0))


@pytest.mark.parametrize("how", ["off", "untested"])
def test_the_package_is_left_alone(how: str, native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "off":
        monkeypatch.setenv("ONCELY_NATIVE", "off")
    else:
        monkeypatch.setattr(inbox.clients, "native", lambda: None)
    with closing(RecordReader("127.0.0.1:1", {})) as reader:
        reader._opened()
        assert type(reader._inbox) is inbox.Inbox
