"""Reads the committed records of exact offset ranges, and around offsets."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, NamedTuple

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from oncely.clients.kafka.client import ASSIGNED, ErrorState, classify_error, make, unanswered
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition

_OWN = ASSIGNED | {
    "group.id": "oncely-reads-ranges",  # required by librdkafka, not used
    "isolation.level": "read_committed",
}
_STEP = 0.1  # seconds that one poll may take, so that errors are noticed
_MANY = 10_000  # messages that are taken at once
_SILENCE = 30.0  # seconds without a message


class Batch(NamedTuple):
    """Messages in the order of their offsets; ``ended``: the last stable offset was reached."""

    messages: Sequence[Any]
    ended: bool


class RangeReader:
    """One connection for ranges that are read one after another. Not thread-safe."""

    def __init__(self, brokers: str, kafka: Mapping[str, object]) -> None:
        self._brokers = brokers
        self._error_state = ErrorState(brokers)
        self._consumer: Any = make(ck.Consumer, brokers, kafka, self._error_state, **_OWN)

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()

    def read(self, tp: TopicPartition, range_: OffsetRange) -> Generator[Sequence[Any]]:
        """The messages of a range, which ends at or below the last stable offset.

        Raises the errors of :meth:`batches`.
        """
        if range_.is_empty:
            return
        for batch in self.batches(tp, range_.start):
            inside = [one for one in batch.messages if one.offset() < range_.end]
            if inside:
                yield inside
            last = batch.messages[-1].offset() if batch.messages else -1
            if batch.ended or last >= range_.end - 1:
                return

    def batches(self, tp: TopicPartition, start: Position) -> Iterator[Batch]:
        """Messages from an offset on; endless, so that the caller must stop at the end.

        Raises:
            ConfigError: the broker refuses the client.
            Unavailable: no message arrived in time.
        """
        with closing(self._polled({tp: start}, f"read {tp}")) as batches:
            for messages in batches:
                good = [one for one in messages if one.error() is None]
                yield Batch(good, len(good) < len(messages))

    def follow(self, starts: Mapping[TopicPartition, Position]) -> Iterator[Any]:
        """The messages of all partitions from these offsets on, as they are committed; endless.

        Raises:
            ConfigError: the broker refuses the client.
        """
        with closing(self._polled(starts, "follow", silence=math.inf)) as batches:
            for message in chain.from_iterable(batches):
                if message.error() is None:
                    yield message

    def around(
        self, at: Mapping[TopicPartition, Position], back: int
    ) -> dict[TopicPartition, tuple[Any | None, Any | None]]:
        """The last message of up to ``back`` offsets before each offset, and the first message at
        or after it; None where there is none. All partitions are read together.

        Raises the errors of :meth:`batches`.
        """
        found: dict[TopicPartition, tuple[Any | None, Any | None]] = dict.fromkeys(at, (None, None))
        left = set(at)
        if not left:
            return found
        starts = {tp: max(0, one - back) for tp, one in at.items()}
        with closing(self._polled(starts, "read around offsets")) as batches:
            for message in chain.from_iterable(batches):
                tp = TopicPartition(message.topic(), message.partition())
                if tp not in left:
                    continue
                ended = message.error() is not None
                if not ended and message.offset() < at[tp]:
                    found[tp] = message, None
                    continue
                found[tp] = found[tp][0], None if ended else message
                left.discard(tp)
                if not left:
                    break
                self._consumer.incremental_unassign([ck.TopicPartition(*tp)])
        return found

    def _polled(
        self, starts: Mapping[TopicPartition, Position], doing: str, silence: float = _SILENCE
    ) -> Generator[list[Any]]:
        """Messages and the events at the ends of logs, as many as have arrived; endless. Raises
        after ``silence`` seconds without any."""
        self._consumer.assign([ck.TopicPartition(*tp, start) for tp, start in starts.items()])
        self._error_state.newest, self._error_state.final = "", None
        deadline = time.monotonic() + silence
        try:
            while True:
                first = self._consumer.poll(_STEP)
                # With a timeout consume() would wait for the full number.
                taken = [] if first is None else [first, *self._consumer.consume(_MANY, 0)]
                # A list, for permanent errors behind the first message, too.
                messages = [one for one in taken if one.error() is None or _is_end(one)]
                if messages:
                    yield messages
                    deadline = time.monotonic() + silence
                if self._error_state.final:
                    raise self._error_state.final
                if time.monotonic() > deadline:
                    raise unanswered(doing, self._brokers, self._error_state.newest)
        except KafkaException as error:
            raise classify_error(error.args[0], doing, self._brokers) from error
        finally:
            self._consumer.unassign()


def _is_end(message: Any) -> bool:
    """True for the event at the end of a log; raises permanent errors."""
    error = message.error()
    if error.code() == KafkaError._PARTITION_EOF:
        return True
    passing = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)
    if not error.retriable() and error.code() not in passing:
        raise KafkaException(error)
    return False
