"""Detects that a partition's log has lost records that were read, by leader epochs (KIP-320).

An unclean leader election, or a broker that returns with an empty disk, truncates the log. When new
records grow it beyond an old position again, the position alone does not show the loss, and reading
on would skip the new records below it. Each leader writes its epoch into the batches that it
appends, so the leader can return the end of an epoch's records. If this end is below the position,
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
    "group.id": "oncely-looks-at-the-log",  # required by librdkafka, not used
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",  # report a truncation that librdkafka detects, do not repair it
    "isolation.level": "read_uncommitted",
    "fetch.wait.max.ms": 50,
    "max.partition.fetch.bytes": 65_536,
    "queued.max.messages.kbytes": 8192,
}
_STEP = 0.1  # seconds that one poll may take, so that errors are noticed
_DOING = "look for a truncation of the log"
_CUT = (KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION)


def truncated(
    brokers: str,
    kafka: Mapping[str, object],
    positions: Mapping[TopicPartition, tuple[Position, int]],
    timeout: float,
) -> dict[TopicPartition, str]:
    """The partitions that have lost records before a position, and the broker's message.

    Args:
        brokers: ``host:port``, separated by commas.
        kafka: librdkafka's properties for the connection.
        positions: per partition the next offset to read, which is still in the log, and a leader
            epoch that is no older than the record before it.
        timeout: seconds.

    Raises:
        ConfigError: the broker refuses the client.
        Unavailable: no answer.
    """
    found: dict[TopicPartition, str] = {}
    waiting = set(positions)
    if not waiting:
        return found
    error_state = ErrorState(brokers)
    consumer = make(ck.Consumer, brokers, kafka, error_state, **_OWN)
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
            if waiting and error_state.final:
                raise error_state.final
            if waiting and time.monotonic() > deadline:
                raise unanswered(_DOING, brokers, error_state.newest)
    finally:
        consumer.close()
    return found


def _answer(message: Any, brokers: str) -> str | None:
    """The reason why the log is not the one that was read; empty if it is; None: no answer yet."""
    error = message.error()
    if error is None or error.code() == KafkaError._PARTITION_EOF:
        return ""
    if error.code() in _CUT:
        return str(error.str())
    if error.retriable() or error.code() == KafkaError._TRANSPORT:
        return None
    raise classify_error(error, _DOING, brokers)
