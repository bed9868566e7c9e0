"""Single records, read again by offset: for dead letters, and for the lag in seconds.

Partitions are assigned to the consumer manually: no group, no commits, no rebalances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import confluent_kafka as ck
from confluent_kafka import KafkaException

from oncely.clients.kafka.client import ASSIGNED, ErrorState, classify_error, make
from oncely.clients.kafka.polling import polled
from oncely.core.topics import Position, TopicPartition

_OWN = ASSIGNED | {
    "group.id": "oncely-reads-again",  # required by librdkafka, not used
    # Fetch little ahead: single records arrive ten times sooner than with the default of 1 MiB, and
    # long runs no later. A larger record is returned all the same (KIP-74).
    "max.partition.fetch.bytes": 65_536,
    "queued.max.messages.kbytes": 8192,
}
_NEAR = 250  # offsets: reading over so many records is faster than a seek
_AGE = "read the age of the lag"


class KafkaRecord(NamedTuple):
    """A record as Kafka stores it; its offset is the key under which it is returned.

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
    """Reads records of one partition after another over one connection. Not thread-safe.

    Args:
        brokers: ``host:port``, separated by commas.
        kafka: librdkafka's properties.
        committed: leave out records of aborted transactions.
    """

    def __init__(
        self, brokers: str, kafka: Mapping[str, object], *, committed: bool = False
    ) -> None:
        self._brokers = brokers
        self._error_state = ErrorState(brokers)
        # Records that were read before by a reader of committed records: there is no need to wait
        # for the end of a transaction that is open now.
        level = "read_committed" if committed else "read_uncommitted"
        own = _OWN | {"isolation.level": level}
        self._consumer: Any = make(ck.Consumer, brokers, kafka, self._error_state, **own)

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()

    def read(
        self, partition: TopicPartition, offsets: Sequence[int], timeout: float
    ) -> dict[int, KafkaRecord]:
        """The records at ``offsets``; absent if they are no longer in the topic.

        Raises:
            ConfigError: the broker refuses the client.
            Unavailable: no message arrived for ``timeout`` seconds.
        """
        found: dict[int, KafkaRecord] = {}
        try:
            for run in _runs(sorted(set(offsets))):
                found |= self._read_run(partition, run, timeout)
        except KafkaException as error:
            raise classify_error(error.args[0], f"read {partition} again", self._brokers) from error
        finally:
            self._consumer.unassign()
        return found

    def _read_run(
        self, partition: TopicPartition, offsets: Sequence[int], timeout: float
    ) -> dict[int, KafkaRecord]:
        """Read from the first to the last of ``offsets``, which are close together."""
        wanted, last = set(offsets), offsets[-1]
        found: dict[int, KafkaRecord] = {}
        self._consumer.assign([ck.TopicPartition(*partition, offsets[0])])
        # Messages of the previous position may still arrive when a new one is assigned, but
        # librdkafka drops them: they carry an older version of the assignment.
        self._error_state.newest, self._error_state.final = "", None
        doing = f"read {partition} again"
        for message in polled(self._consumer, doing, self._brokers, timeout, self._error_state):
            if message.error() is not None or message.offset() > last:
                return found  # the log ends here, or continues beyond the holes
            if message.offset() in wanted:
                found[message.offset()] = _record(message)
            if message.offset() == last:
                return found
        return found


def first_timestamps(
    brokers: str,
    kafka: Mapping[str, object],
    positions: Mapping[TopicPartition, Position],
    timeout: float,
) -> dict[TopicPartition, int | None]:
    """See :meth:`oncely.sources.kafka.KafkaSource.timestamps_at`."""
    return _of_first_records(brokers, kafka, positions, timeout, _timestamp)


def first_sizes(
    brokers: str,
    kafka: Mapping[str, object],
    positions: Mapping[TopicPartition, Position],
    timeout: float,
) -> dict[TopicPartition, int | None]:
    """Bytes of key and value of the next record in every partition; None if there is none."""
    return _of_first_records(brokers, kafka, positions, timeout, _size)


def _of_first_records(
    brokers: str,
    kafka: Mapping[str, object],
    positions: Mapping[TopicPartition, Position],
    timeout: float,
    take: Callable[[Any], int | None],
) -> dict[TopicPartition, int | None]:
    """Apply ``take`` to the next record of every partition; None if there is none."""
    found: dict[TopicPartition, int | None] = dict.fromkeys(positions)
    error_state = ErrorState(brokers)
    own = _OWN | {"isolation.level": "read_committed"}
    consumer = make(ck.Consumer, brokers, kafka, error_state, **own)
    waiting = set(positions)
    try:
        consumer.assign([ck.TopicPartition(*tp, at) for tp, at in positions.items()])
        messages = polled(consumer, _AGE, brokers, timeout, error_state)
        while waiting:
            message = next(messages)
            tp = TopicPartition(message.topic(), message.partition())
            if tp in waiting:
                waiting.discard(tp)
                if message.error() is None:
                    found[tp] = take(message)
                consumer.incremental_unassign([ck.TopicPartition(*tp)])
    finally:
        consumer.close()
    return found


def _runs(offsets: Sequence[int]) -> Iterator[list[int]]:
    """Split ascending offsets where the distance to the next is large."""
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


def _size(message: Any) -> int:
    return sum(len(part) for part in (message.key(), message.value()) if part is not None)


def _record(message: Any) -> KafkaRecord:
    headers = tuple((name, value) for name, value in message.headers() or ())
    return KafkaRecord(_timestamp(message), message.key(), message.value(), headers)
