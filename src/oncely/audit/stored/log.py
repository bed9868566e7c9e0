"""Topics, read from their first offset to an end that was fixed before.

Committed readers see a topic up to its last stable offset, which an open transaction holds back. An
end that is the high watermark includes the records of every transaction that was committed when it
was asked for: reading waits until no transaction hides them any more, at most for the timeout.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, Self

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import OffsetSpec

from oncely.core.ranges import TopicPartition
from oncely.errors import Unavailable
from oncely.kafka import topics
from oncely.kafka.client import (
    ErrorState,
    KafkaAdmin,
    classify_error,
    make,
    stay_connected,
    unanswered,
)

_READER: Mapping[str, object] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 20,
    "fetch.queue.backoff.ms": 5,
}
_STEP = 0.1  # seconds that one poll may take, so that errors are noticed
_MANY = 10_000  # messages that are taken at once
_PASSING = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)


class Ends(NamedTuple):
    """The offsets of a partition's log.

    Attributes:
        first: the first offset that is kept.
        stable: the last stable offset, where committed readers end now.
        high: the high watermark.
    """

    first: int
    stable: int
    high: int


@dataclass
class Topics:
    """Reads topics of one cluster. Not thread-safe; writes and commits nothing.

    Attributes:
        brokers: ``host:port``, separated by commas.
        kafka: librdkafka's properties for the connection, as for the source. Never in a repr.
        timeout: seconds without progress after which a request fails.
        group: the id of the group; nothing is committed.
        deleted: what happens where records that are to be read have been deleted: those that are
            left are read, or the read fails.
    """

    brokers: str
    kafka: Mapping[str, object] = field(default_factory=dict, repr=False)
    timeout: float = 30.0
    group: str = "oncely-audit"
    deleted: Literal["pass over", "refuse"] = "pass over"
    _admin: KafkaAdmin | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._admin is not None:
            self._admin.close()
        self._admin = None

    @property
    def admin(self) -> KafkaAdmin:
        """The admin client."""
        if self._admin is None:
            self._admin = KafkaAdmin(self.brokers, self.kafka, min(10.0, self.timeout))
        return self._admin

    def topic_id(self, topic: str) -> str | None:
        """A topic's id; None if it does not exist."""
        found = topics.identified(self.admin, topic)
        return None if found is None else found[0]

    def settings(self, topic: str) -> Mapping[str, str]:
        """The configuration of a topic that exists."""
        return topics.configured(self.admin, [topic])[topic]

    def ends(self, topic: str) -> dict[TopicPartition, Ends]:
        """The ends of every partition; empty if there is no such topic.

        Raises:
            Unavailable: no answer.
        """
        known = topics.identified(self.admin, topic)
        if known is None:
            return {}
        here = [TopicPartition(topic, number) for number in range(known[1])]
        # In this order each is no smaller than the one before, whatever is written meanwhile.
        doing, latest = "read the ends of the topics", dict.fromkeys(here, OffsetSpec.latest())
        first = dict.fromkeys(here, OffsetSpec.earliest())
        each = [
            topics.offsets(self.admin, doing, wanted, committed=committed)
            for wanted, committed in ((first, False), (latest, True), (latest, False))
        ]
        return {tp: Ends(*(one[tp] for one in each)) for tp in here}

    def read(
        self,
        until: Mapping[TopicPartition, int],
        since: Mapping[TopicPartition, int] | None = None,
    ) -> Iterator[Any]:
        """The committed messages below these offsets, in order within a partition.

        Args:
            until: the offset after the last one, at most the high watermark.
            since: the first offset; by default the first that is kept.

        Raises:
            Unavailable: a transaction stayed open, or no answer.
        """
        for batch in self.batches(until, since):
            yield from batch

    def batches(
        self,
        until: Mapping[TopicPartition, int],
        since: Mapping[TopicPartition, int] | None = None,
    ) -> Iterator[list[Any]]:
        """The messages of :meth:`read`, many at a time."""
        given = since or {}
        left = {(tp[0], tp[1]): end for tp, end in until.items() if end > given.get(tp, 0)}
        if not left:
            return
        beginning = ck.OFFSET_BEGINNING
        starts = {TopicPartition(*tp): given.get(TopicPartition(*tp), beginning) for tp in left}
        with self._assigned(starts) as (consumer, state):
            for batch in self._polled(consumer, state, left):
                found = self._below(batch, left, consumer)
                if found:
                    yield found
                if not left:
                    return

    @contextlib.contextmanager
    def _assigned(self, starts: Mapping[TopicPartition, int]) -> Iterator[tuple[Any, ErrorState]]:
        """A consumer of these partitions, at least one, from these offsets on."""
        consumer, state = self._consumer("read_committed")
        try:
            # Also returns the topic's leaders; a client looks for a new topic's only once a second.
            with contextlib.suppress(KafkaException):
                stay_connected(consumer, next(iter(starts)).topic, self.timeout)
            consumer.assign([ck.TopicPartition(*tp, at) for tp, at in starts.items()])
            yield consumer, state
        finally:
            consumer.close()

    def around(
        self, at: Mapping[TopicPartition, int], back: int
    ) -> dict[TopicPartition, tuple[Any | None, Any | None]]:
        """The last message of up to ``back`` offsets before each offset, and the first message at
        or after it; None where there is none. All partitions are read together.

        Raises the errors of :meth:`read`.
        """
        found: dict[TopicPartition, tuple[Any | None, Any | None]] = dict.fromkeys(at, (None, None))
        left = {(tp[0], tp[1]): one for tp, one in at.items()}
        if not left:
            return found
        starts = {tp: max(0, one - back) for tp, one in at.items()}
        with self._assigned(starts) as (consumer, state):
            for message in chain.from_iterable(self._polled(consumer, state, left)):
                key = message.topic(), message.partition()
                if key not in left:
                    continue
                tp, is_record = TopicPartition(*key), message.error() is None
                if is_record and message.offset() < left[key]:
                    found[tp] = message, None
                    continue
                found[tp] = found[tp][0], message if is_record else None
                del left[key]
                if not left:
                    break
                consumer.incremental_unassign([ck.TopicPartition(*tp)])
        return found

    def _below(
        self, batch: Iterable[Any], left: dict[tuple[str, int], int], consumer: Any
    ) -> list[Any]:
        """The messages of a batch that are wanted; partitions that are complete are removed."""
        found = []
        for message in batch:
            tp = message.topic(), message.partition()
            end = left.get(tp)
            if end is None:
                continue
            offset, is_record = message.offset(), message.error() is None
            if is_record and offset < end:
                found.append(message)
            if offset + is_record >= end:
                del left[tp]
                consumer.incremental_unassign([ck.TopicPartition(*tp)])
        return found

    def _polled(
        self, consumer: Any, state: ErrorState, left: Mapping[tuple[str, int], int]
    ) -> Iterator[list[Any]]:
        """Messages and ends; each of them extends the deadline."""
        doing, deadline = "read the topics", time.monotonic() + self.timeout
        while True:
            first = consumer.poll(_STEP)
            # With a timeout consume() would wait for the full number.
            batch = [] if first is None else [first, *consumer.consume(_MANY, 0)]
            errors = [(one, one.error()) for one in batch if one.error() is not None]
            for _, error in errors:
                ended = error.code() == KafkaError._PARTITION_EOF
                if not ended and not error.retriable() and error.code() not in _PASSING:
                    raise classify_error(error, doing, self.brokers)
            bad = [one for one, error in errors if error.code() != KafkaError._PARTITION_EOF]
            if good := [one for one in batch if one not in bad] if bad else batch:
                yield good
                deadline = time.monotonic() + self.timeout
            if state.final:
                raise state.final
            if time.monotonic() > deadline:
                raise self._silent(left) from unanswered(doing, self.brokers, state.newest)

    @staticmethod
    def _silent(left: Mapping[tuple[str, int], int]) -> Unavailable:
        what = ", ".join(
            f"{name}-{n} below offset {end}" for (name, n), end in sorted(left.items())
        )
        return Unavailable(
            f"an open transaction or a silent broker hides the messages of {what}",
            way_out="the transaction ends by its timeout, at the latest",
        )

    def _consumer(self, level: str) -> tuple[Any, ErrorState]:
        state = ErrorState(self.brokers)
        reset = "error" if self.deleted == "refuse" else "earliest"
        own = {**_READER, "isolation.level": level, "group.id": self.group,
               "auto.offset.reset": reset}  # fmt: skip
        return make(ck.Consumer, self.brokers, self.kafka, state, **own), state
