"""Has a partition's log lost records that were read? Asked by leader epoch (KIP-320).

An unclean leader election, or a broker that comes back with an empty disk, cuts the log. When new
records grow it beyond an old position again, the position alone shows nothing, and reading on
would leave out what stands in its place. Each leader writes its epoch into the batches that it
appends, so the leader tells where the records of an epoch end. Where they end before the position,
records that were read are gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import confluent_kafka as ck
from confluent_kafka import KafkaError

from oncely.clients.kafka.client import ErrorState, classify_error, make, unanswered
from oncely.core.topics import Position, TopicPartition

_OWN = {
    "group.id": "oncely-looks-at-the-log",  # demanded by librdkafka, never used
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",  # what librdkafka finds by the leader epoch is told, not mended
    "isolation.level": "read_uncommitted",
    "fetch.wait.max.ms": 50,
    "max.partition.fetch.bytes": 65_536,
    "queued.max.messages.kbytes": 8192,
}
_STEP = 0.1  # seconds that one poll may take, so that complaints are seen
_DOING = "look for a truncation of the log"
_CUT = (KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION)


def truncated(
    brokers: str,
    kafka: Mapping[str, object],
    positions: Mapping[TopicPartition, tuple[Position, int]],
    timeout: float,
) -> dict[TopicPartition, str]:
    """The partitions that have lost records before a position, and what the broker says.

    Args:
        brokers: ``host:port``, separated by commas.
        kafka: librdkafka's keys for the connection.
        positions: per partition the next offset to read, which the log still holds, and a leader
            epoch that is no older than the record before it.
        timeout: seconds.

    Raises:
        ConfigError: the broker refuses us.
        Unavailable: no answer.
    """
    found: dict[TopicPartition, str] = {}
    waiting = set(positions)
    if not waiting:
        return found
    trouble = ErrorState(brokers)
    consumer = make(ck.Consumer, brokers, kafka, trouble, **_OWN)
    deadline = time.monotonic() + timeout
    try:
        consumer.assign([ck.TopicPartition(*tp, at, "", of) for tp, (at, of) in positions.items()])
        while waiting:
            message = consumer.poll(_STEP)
            tp = message and TopicPartition(message.topic(), message.partition())
            if tp in waiting and (answer := _answer(message, brokers)) is not None:
                waiting.discard(tp)
                consumer.incremental_unassign([ck.TopicPartition(*tp)])
                if answer:
                    found[tp] = answer
            if waiting and trouble.final:
                raise trouble.final
            if waiting and time.monotonic() > deadline:
                raise unanswered(_DOING, brokers, trouble.newest)
    finally:
        consumer.close()
    return found


def _answer(message: Any, brokers: str) -> str | None:
    """Why the log is not the one that was read; empty when it is; None: no answer yet."""
    error = message.error()
    if error is None or error.code() == KafkaError._PARTITION_EOF:
        return ""
    if error.code() in _CUT:
        return str(error.str())
    if error.retriable() or error.code() == KafkaError._TRANSPORT:
        return None
    raise classify_error(error, _DOING, brokers)
