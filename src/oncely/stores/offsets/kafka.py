"""Positions as committed offsets of a consumer group, in Kafka itself.

The metadata of each offset has the Kafka sink's format, with epoch, cluster and topic id. An offset
without such metadata was committed by another program (or shows the position of an exactly-once
pipeline to lag tools). To begin there would skip records, and to begin elsewhere would overwrite
that program's position: loading it is refused.

Kafka deletes the offsets of a group without commits (``offsets.retention.minutes``, a week by
default), separately for each partition (KIP-211): idle partitions must be saved regularly, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, OncelyError
from oncely.kafka.client import OFFSETS_DELAYED, ErrorState, classify_error, make, unanswered
from oncely.per_process import PerProcess
from oncely.stores.offsets.base import OffsetStore, StoredPosition, foreign
from oncely.stores.topic.records import OffsetMetadata, read_stamp, stamp
from oncely.threads import tries

_CLIENT = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # Makes a fetch of offsets wait for pending offsets of a transaction (KIP-447).
    "isolation.level": "read_committed",
}
_PASSING = (*OFFSETS_DELAYED, KafkaError._WAIT_COORD)
_NO_ANSWER = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)
_IN_USE = (
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_INSTANCE_ID,
)
_AGAIN = 0.05  # seconds
_SLICE = 1.0  # seconds; between two slices the client's errors are served


class KafkaStore(OffsetStore):
    """Keeps positions as offsets of a group that has no members.

    Args:
        brokers: ``host:port``, separated by commas.
        group: the consumer group; it belongs to one pipeline.
        pipeline: its name, which is in each offset's metadata.
        partitions: returns the partitions to load, called at each load; picklable.
        kafka: librdkafka's properties for the connection, as for the source.
        timeout: seconds to wait for a response.
    """

    def __init__(
        self,
        brokers: str,
        group: str,
        pipeline: str,
        partitions: Callable[[], Iterable[TopicPartition]],
        kafka: Mapping[str, object] | None = None,
        timeout: float = 10.0,
    ) -> None:
        self.brokers, self.group, self.partitions, self.timeout = (
            brokers, group, partitions, timeout,
        )  # fmt: skip
        self.pipeline = pipeline
        connect = partial(_connect, brokers, group, dict(kafka or {}), timeout)
        self._client: PerProcess[_Client] = PerProcess(connect, _end)

    def __repr__(self) -> str:
        return f"KafkaStore({self.brokers!r}, {self.group!r})"

    @property
    def where(self) -> str:
        """Brokers and group."""
        return f"Kafka {self.brokers}, group {self.group}"

    def load(self) -> dict[TopicPartition, StoredPosition]:
        """See :meth:`OffsetStore.load`. Also raises the errors of ``partitions``."""
        wanted = [ck.TopicPartition(*tp) for tp in self.partitions()]
        if not wanted:
            return {}
        found = self._ask("read", lambda client, wait: client.committed(wanted, wait))
        return {
            TopicPartition(one.topic, one.partition): self._stored(one)
            for one in found
            if one.offset >= 0
        }

    def save(self, positions: Mapping[TopicPartition, StoredPosition]) -> None:
        """See :meth:`OffsetStore.save`. One request; the broker may refuse single partitions."""
        offsets = [
            ck.TopicPartition(*tp, stored.position, _stamp(stored, self.pipeline))
            for tp, stored in sorted(positions.items())
        ]
        if offsets:
            self._ask("write", lambda client, _: client.commit(offsets=offsets, asynchronous=False))

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def _stored(self, found: Any) -> StoredPosition:
        stamped = read_stamp(found.offset, found.metadata)
        if stamped is None:
            raise foreign(
                self.where,
                f"{found.topic}-{found.partition}",
                f"offset {found.offset} has no metadata of Oncely",
            )
        if stamped.pipeline != self.pipeline:
            raise ConfigError(
                "offsets.group",
                f"group {self.group!r} holds positions of pipeline {stamped.pipeline!r}",
                way_out="give the pipeline a group of its own",
            )
        return StoredPosition(stamped.position, stamped.epoch, stamped.cluster, stamped.topic_id)

    def _ask(self, doing: str, request: Callable[[Any, float], Sequence[Any]]) -> Sequence[Any]:
        """Repeat a request until its result is good, while its error is temporary."""
        with self._client.use() as client:
            client.error_state.newest, client.error_state.final = "", None
            for left in tries(self.timeout, _AGAIN):
                try:
                    answer = request(client.consumer, min(_SLICE, left))
                    bad = next((one.error for one in answer if one.error), None)
                except KafkaException as error:
                    bad = error.args[0]
                if bad is None:
                    return answer
                bad = client.complaint() or bad
                passes = bad.code() in (*_PASSING, *_NO_ANSWER)
                if client.error_state.final is not None or not passes:
                    break
            raise self._sorted(bad, doing, client.error_state)

    def _sorted(self, error: KafkaError, doing: str, error_state: ErrorState) -> OncelyError:
        doing = f"{doing} the offsets of group {self.group!r}"
        if error.code() in (*_NO_ANSWER, *_PASSING):
            return error_state.final or unanswered(doing, self.brokers, error_state.newest)
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return ConfigError(
                "offsets.group",
                f"{doing}: {self.brokers} denies it: {error.str()}",
                way_out=f"grant this user Read and Describe on group {self.group!r}",
            )
        if error.code() in _IN_USE:
            return ConfigError(
                "offsets.group",
                f"{doing}: the group has members: another program consumes by this name",
                way_out="give the pipeline a group of its own",
            )
        return classify_error(error, doing, self.brokers)


class _Client:
    def __init__(self, consumer: Any, error_state: ErrorState) -> None:
        self.consumer, self.error_state = consumer, error_state

    def complaint(self) -> KafkaError | None:
        """The error that prevents an answer; it is reported only inside ``poll``.

        A wrong login reaches ``error_state`` there. A group without permission has no
        coordinator, for which a request would wait without an error.
        """
        message = self.consumer.poll(0)
        error = message.error() if message is not None else None
        return error if error and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED else None


def _stamp(stored: StoredPosition, pipeline: str) -> str:
    known = OffsetMetadata(stored.position, stored.epoch, stored.cluster_id, stored.topic_id)
    return stamp(known, pipeline)


def _connect(brokers: str, group: str, kafka: Mapping[str, object], timeout: float) -> _Client:
    error_state = ErrorState(brokers)
    # librdkafka drops a commit if it has found no coordinator for a session's time.
    patience = {"session.timeout.ms": round(timeout * 1000), "heartbeat.interval.ms": 300}
    own = {**_CLIENT, **patience, "group.id": group}
    return _Client(make(ck.Consumer, brokers, kafka, error_state, **own), error_state)


def _end(client: _Client) -> None:
    client.consumer.close()
