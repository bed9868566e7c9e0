"""Independent readers: plain clients, without code of the pipeline.

Any other reader with the same isolation level would get the same results.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from oncely.threads import tries

Isolation = Literal["read_committed", "read_uncommitted"]

_LEVELS = {
    "read_committed": IsolationLevel.READ_COMMITTED,
    "read_uncommitted": IsolationLevel.READ_UNCOMMITTED,
}
_ASK = 60.0
_QUIET = 60.0  # seconds without a message or an end
_MANY = 10_000
_AGAIN = 0.02
# The leader of a partition has changed, or a broker does not have the metadata of a new topic yet.
_PASSING = (
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
)


def messages(
    brokers: str, topic: str, isolation: Isolation = "read_committed", *, patience: float = 2.0
) -> list[Any]:
    """All messages of a topic up to its end as of now, partition by partition.

    Args:
        brokers: ``host:port``.
        topic: the topic.
        isolation: ``read_committed`` ends at the last stable offset (KIP-98).
        patience: seconds to wait while a transaction hides the end of the topic from committed
            readers. The broker answers a commit before it writes the markers that end it.

    Returns:
        ``confluent_kafka.Message``, in the order of partition and offset.

    Raises:
        TimeoutError: the end was not reached.
        KafkaException: another error of the broker.
    """
    left = {n: end for n, end in _settled_ends(brokers, topic, isolation, patience).items() if end}
    found: dict[int, list[Any]] = {n: [] for n in sorted(left)}
    if not left:
        return []
    reader = _consumer(brokers, isolation)
    try:
        reader.assign([TopicPartition(topic, n, 0) for n in found])
        quiet_since = time.monotonic()
        while left:
            first = reader.poll(0.1)  # with a timeout consume() would wait for the full number
            for message in [] if first is None else [first, *reader.consume(_MANY, 0)]:
                quiet_since = time.monotonic()
                _take(message, left, found)
            if time.monotonic() - quiet_since > _QUIET:
                raise TimeoutError(f"the end of topic {topic} did not come")
    finally:
        reader.close()
    return [message for partition in found.values() for message in partition]


def _take(message: Any, left: dict[int, int], found: dict[int, list[Any]]) -> None:
    """Note a message below its partition's end, or that the end was reached."""
    partition, error = message.partition(), message.error()
    if error is None:
        if partition in left and message.offset() < left[partition]:
            found[partition].append(message)
    elif error.code() == KafkaError._PARTITION_EOF:
        left.pop(partition, None)  # at or beyond the end at the time of the call
    else:
        raise KafkaException(error)


def ends(brokers: str, topic: str, isolation: Isolation = "read_committed") -> dict[int, int]:
    """The end of each partition: the next offset, or the last stable offset (KIP-98).

    A topic that does not exist has no partitions.

    Raises:
        KafkaException: the broker does not answer, or a partition has no leader for 60 seconds.
    """
    return _ends(_admin(brokers), topic, isolation)


def held_back(brokers: str, topic: str) -> bool:
    """True if an open transaction hides the end of a topic from committed readers."""
    admin = _admin(brokers)
    return _ends(admin, topic, "read_committed") != _ends(admin, topic, "read_uncommitted")


def _settled_ends(
    brokers: str, topic: str, isolation: Isolation, patience: float
) -> dict[int, int]:
    """The ends, once no transaction hides them or the patience is over."""
    admin = _admin(brokers)
    for _ in tries(patience, _AGAIN):
        found = _ends(admin, topic, isolation)
        if isolation == "read_uncommitted" or found == _ends(admin, topic, "read_uncommitted"):
            break
    return found


def _admin(brokers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": brokers, "log_level": 2})


def _ends(admin: AdminClient, topic: str, isolation: Isolation) -> dict[int, int]:
    """The ends; the request is repeated after errors that pass."""
    for _ in tries(_ASK, _AGAIN):
        try:
            return _ends_now(admin, topic, isolation)
        except KafkaException as failure:
            error = failure.args[0]
        if error.code() not in _PASSING:
            break
    raise KafkaException(error)


def _ends_now(admin: AdminClient, topic: str, isolation: Isolation) -> dict[int, int]:
    known = admin.list_topics(topic, timeout=_ASK).topics[topic]
    if known.error is not None and known.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise KafkaException(known.error)
    wanted = {TopicPartition(topic, n): OffsetSpec.latest() for n in known.partitions}
    answers = admin.list_offsets(wanted, isolation_level=_LEVELS[isolation])
    return {tp.partition: answer.result(_ASK).offset for tp, answer in answers.items()}


def _consumer(brokers: str, isolation: Isolation) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": f"reader-{uuid.uuid4().hex}",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
    )
