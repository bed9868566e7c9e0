"""What a consumer has received, by partition: messages, ends of partitions, and errors."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import confluent_kafka as ck
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, cimpl

from oncely.core.ranges import Position, TopicPartition
from oncely.kafka import client as clients
from oncely.kafka.records import RecordColumns, Records, headers_of
from oncely.per_process import no_gc

log = logging.getLogger("oncely.kafka.source")

NOT_THERE = (
    KafkaError._AUTO_OFFSET_RESET,
    KafkaError.OFFSET_OUT_OF_RANGE,
    KafkaError._LOG_TRUNCATION,
)
"""The log does not continue at a partition's position."""
PASSING = (
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._MAX_POLL_EXCEEDED,
)
"""Errors after which librdkafka goes on by itself."""
MESSAGE = 400
"""Bytes of a message in memory, beside its key, its value and its headers."""
_HEADER = 100  # bytes of a header, beside its name and its value
_SAMPLED = 13  # one of so many messages is looked at where all would take long
_FIRST = 50  # messages that the first call takes, which does not know their size
_key = methodcaller("key")


def memory_of(records: Records) -> int:
    """The bytes of records in memory: their keys, values and headers, and those beside these.

    The headers of messages are estimated by a sample: confluent-kafka converts a message's headers
    to Python objects when they are first read, which takes longer than all else here, and twice
    their memory.
    """
    if isinstance(records, RecordColumns):
        size: int = records.own.nbytes
        return size
    sample = records[::_SAMPLED]
    headers = sum(
        _HEADER + len(name) + len(value or b"") for one in sample for name, value in headers_of(one)
    )
    keys = sum(map(len, filter(None, map(_key, records))))
    values = sum(map(len, records))
    return MESSAGE * len(records) + keys + values + headers * len(records) // max(1, len(sample))


@dataclass
class PollResult:
    """The result of one call.

    Attributes:
        messages: per partition, ascending; columns of a :class:`ColumnInbox`.
        ends: partitions that were read up to their last stable offset, and that offset.
        failed: partitions whose position can't be read any more, and the reason.
        unreadable: partitions with a batch that can't be decompressed, and its first offset; told
            after the messages before it, and again at each attempt of librdkafka.
        errors: other errors that do not pass.
        more: there were more messages than one call takes.
    """

    messages: dict[TopicPartition, Records] = field(default_factory=dict)
    ends: dict[TopicPartition, Position] = field(default_factory=dict)
    failed: dict[TopicPartition, KafkaError] = field(default_factory=dict)
    unreadable: dict[TopicPartition, Position] = field(default_factory=dict)
    errors: list[KafkaError] = field(default_factory=list)
    more: bool = False


class Inbox:
    """Takes what a consumer has received. Used by one thread.

    Args:
        consumer: of confluent-kafka, with ``enable.partition.eof``.
        many: messages that are taken at once; meanwhile no other thread runs Python.
        size: their bytes in memory, by the mean size of a sample of those before.
        failing: codes of errors that end the reading of their partition.
    """

    def __init__(
        self, consumer: Any, many: int, size: int, failing: Collection[int] = NOT_THERE
    ) -> None:
        self.consumer = consumer
        self._most, self._size, self._failing = many, size, failing
        self._many = _FIRST

    def poll(self, seconds: float) -> PollResult:
        """All that has arrived, as far as one call takes it; waits for the first message.

        Raises the errors of the consumer's callbacks.
        """
        first = self.consumer.poll(seconds)
        with no_gc():  # a collection would be due with each 700 messages, and visit all others
            # With a timeout consume() would wait for the full number.
            taken = [] if first is None else [first, *self.consumer.consume(self._many, 0)]
        polled = PollResult(more=len(taken) > self._many)
        messages: dict[TopicPartition, list[Any]] = {}
        # librdkafka fetches more while messages are taken. It bounds what is there at once, also
        # where a sample misses large ones.
        if sample := taken[::_SAMPLED]:
            self._many = max(1, min(self._most, len(sample) * self._size // memory_of(sample)))
        # Messages of one partition come in long runs: little is done for each.
        for (broken, topic, number), run in itertools.groupby(taken, _kind):
            if broken:
                for one in run:
                    self._event(one, polled)
            else:
                messages.setdefault(TopicPartition(topic, number), []).extend(run)
        polled.messages.update(messages)
        return polled

    def enter(self, partitions: Collection[TopicPartition], needs: frozenset[str]) -> None:
        """Called before partitions are assigned to the consumer.

        Args:
            partitions: these.
            needs: the names of :data:`oncely.kafka.records.RECORDS` that are read; of all
                partitions the same.
        """

    def left(self, partitions: Collection[TopicPartition]) -> None:
        """Called when partitions are not assigned to the consumer any more."""

    def sought(self, partition: TopicPartition) -> None:
        """Called after a seek of the consumer."""

    def assign(self, partitions: list[ck.TopicPartition], needs: frozenset[str]) -> None:
        """Read these partitions, and no others.

        Args:
            partitions: with offsets.
            needs: names of :data:`oncely.kafka.records.RECORDS`.
        """
        del needs  # messages have all columns
        self.consumer.assign(partitions)

    def leave(self, partitions: list[ck.TopicPartition]) -> None:
        """Read some of the assigned partitions no more."""
        self.consumer.incremental_unassign(partitions)

    def unassign(self) -> None:
        """Read nothing."""
        self.consumer.unassign()

    def close(self) -> None:
        """Close the consumer."""
        self.consumer.close()

    def _event(self, message: Any, polled: PollResult) -> None:
        number = message.partition()
        known = message.topic() is not None and number >= 0
        tp = TopicPartition(message.topic(), number) if known else None
        self._sort(message.error(), tp, message.offset(), polled)

    def _sort(
        self, error: KafkaError, tp: TopicPartition | None, offset: Position, polled: PollResult
    ) -> None:
        if tp is not None and error.code() == KafkaError._PARTITION_EOF:
            polled.ends[tp] = offset
        elif tp is not None and error.code() == KafkaError._BAD_COMPRESSION:
            polled.unreadable[tp] = offset
        elif tp is not None and error.code() in self._failing:
            polled.failed[tp] = error
        elif error.code() in self._failing or error.retriable() or error.code() in PASSING:
            log.debug("%s", error.str())
        else:
            polled.errors.append(error)


class ColumnInbox(Inbox):
    """Takes records as Arrow columns, without an object for each, by the package
    ``oncely_native``.

    Each assigned partition has a queue of its own in librdkafka, from which the package takes. It
    calls no callback of confluent-kafka; those are called by the consumer's ``poll``.

    Args:
        gather: an ``oncely_native.Gather`` of the consumer.
    """

    def __init__(
        self,
        consumer: Any,
        many: int,
        size: int,
        gather: Any,
        failing: Collection[int] = NOT_THERE,
    ) -> None:
        super().__init__(consumer, many, size, failing)
        self._gather = gather
        self._index: dict[TopicPartition, int] = {}
        self._needs: frozenset[str] = frozenset()
        self._closing = False

    def poll(self, seconds: float) -> PollResult:
        """As of :class:`Inbox`; ends without records when a callback of the consumer is due."""
        columns, runs, events = self._gather.take(seconds, self._most, self._size)
        named = {at: tp for tp, at in self._index.items()}  # before callbacks change it
        batch, row = pa.record_batch(columns), 0
        polled = PollResult(more=batch.num_rows >= self._most)
        for at, count in runs:
            polled.messages[named[at]] = RecordColumns(batch, range(row, row + count))
            row += count
        for at, code, offset, text in events:
            self._sort(KafkaError(code, text), named[at], offset, polled)
        while (message := self.consumer.poll(0)) is not None:
            if message.error() is None:  # of a partition's former incarnation
                raise KafkaException(KafkaError(KafkaError._STATE, "a record in a wrong queue"))
            self._event(message, polled)
        return polled

    def enter(self, partitions: Collection[TopicPartition], needs: frozenset[str]) -> None:
        """Open their queues: librdkafka forwards those that are opened later to a common one."""
        if needs != self._needs:
            self._begin(needs)
        self.left(self._index.keys() & set(partitions))
        for tp in () if self._closing else sorted(partitions):  # a callback of `close`
            self._index[tp] = self._gather.enter(*tp)

    def left(self, partitions: Collection[TopicPartition]) -> None:
        """Close their queues."""
        for tp in partitions:
            if (at := self._index.pop(tp, None)) is not None:
                self._gather.leave(at)

    def sought(self, partition: TopicPartition) -> None:
        """Drop what was fetched before."""
        if partition in self._index:
            self._gather.clear(self._index[partition])

    def assign(self, partitions: list[ck.TopicPartition], needs: frozenset[str]) -> None:
        """Read these partitions, and no others."""
        self._begin(needs)
        self.enter([TopicPartition(one.topic, one.partition) for one in partitions], needs)
        super().assign(partitions, needs)

    def leave(self, partitions: list[ck.TopicPartition]) -> None:
        """Read some of the assigned partitions no more."""
        self.left([TopicPartition(one.topic, one.partition) for one in partitions])
        super().leave(partitions)

    def unassign(self) -> None:
        """Read nothing."""
        super().unassign()
        self._begin(self._needs)

    def close(self) -> None:
        """Close the consumer."""
        self._closing = True
        self._index.clear()
        self._gather.close()
        super().close()

    def _begin(self, needs: frozenset[str]) -> None:
        self._index, self._needs = {}, needs
        self._gather.begin(needs)


def inbox_of(
    consumer: Any,
    many: int,
    size: int,
    failing: Collection[int] = NOT_THERE,
    *,
    rows: int | None = None,
) -> Inbox:
    """An inbox that takes columns if it can; the arguments are those of :class:`Inbox`.

    Args:
        rows: taken at once as columns, instead of ``many``.
    """
    native = clients.native()
    if native is None or not isinstance(consumer, cimpl.Consumer):
        return Inbox(consumer, many, size, failing)
    gather = native.Gather(cimpl.__file__, clients.handle_of(consumer), consumer)
    return ColumnInbox(consumer, rows or many, size, gather, failing)


def _kind(message: Any) -> tuple[bool, str, int]:
    return message.error() is not None, message.topic(), message.partition()
