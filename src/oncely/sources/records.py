"""Single records, read again by offset: for dead letters, and for the age of the lag.

A consumer is given its partitions by hand: no group, no commits, no rebalances.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from oncely.core.offsets import Position, TopicPartition
from oncely.sources.clients import Trouble, make, sort_error, unanswered

_OWN = {
    "group.id": "oncely-reads-again",  # demanded by librdkafka, never used
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    # An offset that retention has taken moves the reader on to the oldest record there is.
    "auto.offset.reset": "earliest",
    "fetch.wait.max.ms": 50,
    "fetch.queue.backoff.ms": 5,
}
_SMALL = {
    # Little is fetched ahead: single records come ten times sooner than with the default of
    # 1 MiB, and long runs no later. A larger record comes all the same (KIP-74).
    "max.partition.fetch.bytes": 65_536,
    "queued.max.messages.kbytes": 8192,
}
_STEP = 0.1  # seconds that one poll may take, so that complaints are seen
_NEAR = 250  # offsets: reading on over so many records is quicker than asking for a place
_AGE = "read the age of the lag"


class KafkaRecord(NamedTuple):
    """A record as Kafka holds it; its offset is what it was asked by.

    Attributes:
        timestamp_ms: milliseconds since 1970, or None.
        key: bytes, or None.
        value: bytes, or None for a tombstone.
        headers: name and bytes, in order.
    """

    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class RecordReader:
    """Reads records of one partition after another with one connection. Not thread-safe."""

    def __init__(self, brokers: str, kafka: Mapping[str, object]) -> None:
        self._brokers = brokers
        self._trouble = Trouble(brokers)
        # What is read again was read before, by a reader of committed records: no need to wait
        # here for the end of a transaction that is open now.
        own = _OWN | {"isolation.level": "read_uncommitted"} | _SMALL
        self._consumer: Any = make(ck.Consumer, brokers, kafka, self._trouble, **own)

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()

    def read(
        self, partition: TopicPartition, offsets: Sequence[int], timeout: float
    ) -> dict[int, KafkaRecord]:
        """The records at ``offsets``; absent when the topic no longer holds them.

        Raises:
            ConfigError: the broker refuses us.
            Unavailable: not finished within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        found: dict[int, KafkaRecord] = {}
        try:
            for run in _runs(sorted(set(offsets))):
                found |= self._read_run(partition, run, deadline)
        except KafkaException as error:
            raise sort_error(error.args[0], f"read {partition} again", self._brokers) from error
        finally:
            self._consumer.unassign()
        return found

    def _read_run(
        self, partition: TopicPartition, offsets: Sequence[int], deadline: float
    ) -> dict[int, KafkaRecord]:
        """Read from the first to the last of ``offsets``, which lie close together."""
        wanted, last = set(offsets), offsets[-1]
        found: dict[int, KafkaRecord] = {}
        self._consumer.assign([ck.TopicPartition(*partition, offsets[0])])
        for message in self._messages(partition, deadline):
            if message is None or message.offset() > last:
                return found  # the log ends here, or goes on beyond the holes
            if message.offset() in wanted:
                found[message.offset()] = _record(message)
            if message.offset() == last:
                return found
        return found

    def _messages(self, partition: TopicPartition, deadline: float) -> Iterator[Any]:
        """The records from the assigned place on; None at the end of the partition.

        Messages of the place before are still under way when a new place is assigned, but
        librdkafka drops them: they carry an older version of the assignment.
        """
        doing = f"read {partition} again"
        self._trouble.newest, self._trouble.final = "", None
        while True:
            message = self._consumer.poll(_STEP)
            if message is not None and (error := message.error()) is None:
                yield message
            elif message is not None and error.code() == KafkaError._PARTITION_EOF:
                yield None
            elif message is not None and not _passes(error):
                raise sort_error(error, doing, self._brokers)
            if self._trouble.final:
                raise self._trouble.final
            if time.monotonic() > deadline:
                raise unanswered(doing, self._brokers, self._trouble.newest)


def first_timestamps(
    brokers: str,
    kafka: Mapping[str, object],
    positions: Mapping[TopicPartition, Position],
    timeout: float,
) -> dict[TopicPartition, int | None]:
    """See :meth:`oncely.sources.kafka.KafkaSource.timestamps_at`."""
    found: dict[TopicPartition, int | None] = dict.fromkeys(positions)
    trouble = Trouble(brokers)
    own = _OWN | {"isolation.level": "read_committed"} | _SMALL
    consumer = make(ck.Consumer, brokers, kafka, trouble, **own)
    deadline = time.monotonic() + timeout
    waiting = set(positions)
    try:
        consumer.assign([ck.TopicPartition(*tp, at) for tp, at in positions.items()])
        while waiting:
            message = consumer.poll(_STEP)
            tp = message and TopicPartition(message.topic(), message.partition())
            if tp in waiting and _settles(message, found, brokers):
                waiting.discard(tp)
                consumer.incremental_unassign([ck.TopicPartition(*tp)])
            if waiting and trouble.final:
                raise trouble.final
            if waiting and time.monotonic() > deadline:
                raise unanswered(_AGE, brokers, trouble.newest)
    finally:
        consumer.close()
    return found


def _settles(message: Any, found: dict[TopicPartition, int | None], brokers: str) -> bool:
    """Take a partition's first record, or learn that there is none; False to wait on."""
    error = message.error()
    if error is None:
        found[TopicPartition(message.topic(), message.partition())] = _timestamp(message)
    elif error.code() != KafkaError._PARTITION_EOF:
        if _passes(error):
            return False
        raise sort_error(error, _AGE, brokers)
    return True


def _passes(error: KafkaError) -> bool:
    """True for a complaint that librdkafka goes on from by itself."""
    return bool(error.retriable()) or error.code() == KafkaError._TRANSPORT


def _runs(offsets: Sequence[int]) -> Iterator[list[int]]:
    """Cut ascending offsets where the way to the next is long."""
    run: list[int] = []
    for offset in offsets:
        if run and offset - run[-1] > _NEAR:
            yield run
            run = []
        run.append(offset)
    if run:
        yield run


def _timestamp(message: Any) -> int | None:
    kind, timestamp_ms = message.timestamp()
    return None if kind == ck.TIMESTAMP_NOT_AVAILABLE else int(timestamp_ms)


def _record(message: Any) -> KafkaRecord:
    headers = tuple((name, value) for name, value in message.headers() or ())
    return KafkaRecord(_timestamp(message), message.key(), message.value(), headers)
