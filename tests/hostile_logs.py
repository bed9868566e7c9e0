"""Logs that are hard to read exactly, and what readers other than the engine's find in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Producer

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.kafka.reader import Piece, RecordReader
from oncely.kafka.records import KafkaRecord, each
from oncely.kafka.source import KafkaSource
from oncely.testing.processes import await_that
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker

MakeTopic = Callable[..., str]
Ranges = Mapping[TopicPartition, OffsetRange]
Records = dict[TopicPartition, list[tuple[int, KafkaRecord]]]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
ANY_TIME = {"message.timestamp.after.max.ms": str(2**63 - 1)}
_KEYS = (None, b"", b"k")
_VALUES = (None, b"", b"v", b"long " * 400)
_HEADERS: tuple[list[tuple[str, bytes | None]], ...] = (
    [], [("h", b"1")], [("h", None)], [("h", b"1"), ("h", b"2"), ("", b"")], [("é", b"\xff")],
)  # fmt: skip
_TIMES = (0, 1, 1_700_000_000_123, -86_400_001, 253_402_300_800_000)  # 0: of the producer's clock


def transactional(broker: Broker, topic: str, **config: object) -> Producer:
    """A producer whose transactions have begun nothing yet."""
    made = Producer({**broker.client_config(), "transactional.id": f"of-{topic}", **config})
    made.init_transactions(120)
    return made


def write(producer: Producer, topic: str, count: int, end: str, partition: int = 0) -> None:
    """One transaction; its records are in the log before it ends by ``commit`` or ``abort``."""
    choose = random.Random(count)
    producer.begin_transaction()
    for number in range(count):
        producer.produce(
            topic, choose.choice(_VALUES), choose.choice([*_KEYS, b"%d" % number]),
            headers=choose.choice(_HEADERS), timestamp=choose.choice(_TIMES), partition=partition,
        )  # fmt: skip
    assert producer.flush(120) == 0
    if end != "open":
        (producer.commit_transaction if end == "commit" else producer.abort_transaction)(30)


def codecs(broker: Broker, make_topic: MakeTopic, **config: str) -> tuple[str, list[Producer]]:
    """A topic with a partition of each codec: committed and aborted transactions, of which the last
    is aborted in partition 1, and open in partition 2; and partition 5, in which all are aborted.

    Returns its name, and producers, of which some have a transaction open.
    """
    topic = make_topic(partitions=6, config={**ANY_TIME, **config})
    made = []
    for number, codec in enumerate((*CODECS, "none")):
        choose = random.Random(number)
        producer = transactional(
            broker, topic, **{"transactional.id": f"{topic}-{number}", "linger.ms": 50,
                              "compression.type": codec},
        )  # fmt: skip
        turns = 6 if number < 5 else 2
        for turn in range(turns):
            end = choose.choice(["commit", "abort"]) if number < 5 and turn else "abort"
            write(producer, topic, choose.randrange(1, 40), end, number)
        write(producer, topic, 9, "commit" if number < 5 else "abort", number)
        if number in (1, 2):
            write(producer, topic, 5, "abort" if number == 1 else "open", number)
        made.append(producer)
    return topic, made


def compacted(broker: Broker) -> str:
    """A topic whose log has lost records by compaction, among others those at the end of a
    segment."""
    topic = broker.create_topic(
        "compacted",
        config={
            "cleanup.policy": "compact", "segment.ms": "100", "delete.retention.ms": "0",
            "min.cleanable.dirty.ratio": "0.01", "max.compaction.lag.ms": "100",
        },
    )  # fmt: skip
    producer = Producer({**broker.client_config(), "linger.ms": 20})
    for number in range(300):
        producer.produce(topic, b"%d" % number, b"%d" % (number % 7 if number < 200 else number))
    assert producer.flush(120) == 0

    def holes() -> bool:
        producer.produce(topic, b"rolls the segment", b"last")
        assert producer.flush(120) == 0
        return not {one.offset() for one in messages(broker.bootstrap, topic)} & set(range(190))

    await_that(holes, "the compaction", timeout=120)
    return topic


def whole(broker: Broker, topic: str) -> dict[TopicPartition, OffsetRange]:
    """The partitions up to their last stable offsets."""
    with KafkaSource(broker.bootstrap, [topic]) as source:
        marks = source.watermarks()
    return {tp: OffsetRange(one.low, one.stable) for tp, one in marks.items()}


def some(choose: random.Random, of: Ranges) -> dict[TopicPartition, OffsetRange]:
    """Parts of some of these ranges; most begin inside of a batch, some are empty."""
    found = {}
    for tp in choose.sample(sorted(of), choose.randrange(1, len(of) + 1)):
        start = choose.randrange(of[tp].start, of[tp].end + 1)
        found[tp] = OffsetRange(start, choose.randrange(start, of[tp].end + 1))
    return found


def read(reader: RecordReader, ranges: Ranges, **options: Any) -> Records:
    """The records by partition; checks what each piece says of its range."""
    found: Records = {tp: [] for tp in ranges}
    last: dict[TopicPartition, Piece] = {}
    for piece in reader.read(ranges, **options):
        own = found[piece.partition]
        assert piece.next > (last[piece.partition].next if piece.partition in last else -1)
        for tp, offset, record in each(piece.records):
            assert tp == piece.partition
            assert (own[-1][0] if own else ranges[tp].start - 1) < offset < piece.next
            own.append((offset, record))
        last[piece.partition] = piece
    assert {tp: one.next for tp, one in last.items()} == {
        tp: one.end for tp, one in ranges.items() if not one.is_empty
    }
    return found


def by_messages(broker: Broker, topic: str, ranges: Ranges) -> Records:
    """What a plain consumer finds that reads the whole topic."""
    found: Records = {tp: [] for tp in ranges}
    for one in messages(broker.bootstrap, topic, patience=0):
        tp = TopicPartition(topic, one.partition())
        if tp in ranges and one.offset() in ranges[tp]:
            kind, ms = one.timestamp()
            headers = tuple(one.headers() or ())
            record = KafkaRecord(ms if kind else None, one.key(), one.value(), headers)
            found[tp].append((one.offset(), record))
    return found
