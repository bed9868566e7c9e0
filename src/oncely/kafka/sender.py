"""Queueing of messages in a producer, and its errors by consequence; for transactions and plain
writes.

Without transactions, for delivery semantics weaker than exactly once, the producer is
idempotent (KIP-98): its own retries create no duplicates, and the records of a
partition keep their order. The effect of a crash depends on the order of the position's commit.

A producer accepts messages without headers as Arrow columns, too. With ``oncely_native`` no object
is created for a message: the producer's queue is filled from Arrow's memory. Otherwise messages are
passed to confluent-kafka one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import confluent_kafka as ck
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, cimpl

from oncely.errors import ConfigError, OncelyError, Stopped, Unavailable, check
from oncely.kafka import client as clients
from oncely.kafka.client import Handle, classify_error

T = TypeVar("T")

_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
# The broker and this instance disagree on its state; a new instance begins with a new state.
_LOST_STATE = (
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    KafkaError.UNKNOWN_PRODUCER_ID,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.INVALID_TXN_STATE,
    KafkaError.TRANSACTION_ABORTABLE,
    KafkaError._STATE,
    KafkaError._FATAL,  # it has failed before; the next instance gets the reason itself
)
_DENIED = (
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
_INVALID = (KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP)
_CLEARED = "without setting an exception"  # Python's words for a C function that failed silently
_SLICE = 10_000  # messages queued at once, so that the queue is served in between


def served(call: Callable[[], T]) -> T:
    """Make a call that serves an instance's events.

    A fatal error is raised as a KafkaException, but occasionally, on a busy machine, in one of
    three other forms:

    - the bare KafkaError: that is no exception class, so no ``except`` clause with a class catches
      it, and a thread ends by it without a message;
    - a SystemError with the KafkaException as its cause: confluent-kafka passes a log line to its
      logger while the exception is set, and Python notices that at the logger's return (once for
      each line);
    - a SystemError without a cause: what the logger called has cleared the exception. The code is
      then ``_FATAL``, as for each later call of that instance.

    Raises:
        KafkaException: for the error in every form.
    """
    try:
        return call()
    except SystemError as broken:
        fatal = _cause(broken)
        if fatal is None and _CLEARED not in str(broken):
            raise
        error = fatal.args[0] if fatal else KafkaError(KafkaError._FATAL, "a fatal error")
    except BaseException:
        raise
    except:  # noqa: E722
        error = sys.exc_info()[1]
    raise KafkaException(error)


def _cause(error: BaseException | None) -> KafkaException | None:
    """The KafkaException in a chain of causes."""
    while error is not None and not isinstance(error, KafkaException):
        error = error.__cause__
    return error


class Message(NamedTuple):
    """A record to be written; ``headers`` in order, ``timestamp`` in ms since 1970 or None: now."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    timestamp: int | None = None


class InstanceFenced(Unavailable):
    """Another instance has the transactional id: a concurrent attempt of the same run, or a
    newer run."""


class Sender:
    """Queues messages of one producer instance.

    Args:
        producer: a new instance, see :mod:`oncely.kafka.sender`.
        timeout: the time limit of one step, in seconds.
        brokers: for messages.

    Attributes:
        placed: returns the partition of all messages that :meth:`send` gets for a topic; without
            it the partitioner decides.
    """

    def __init__(self, producer: Any, timeout: float, brokers: str) -> None:
        self._producer, self._timeout, self._brokers = producer, timeout, brokers
        self.placed: Mapping[str, Callable[[], int]] = {}

    def close(self) -> None:
        """Close the instance; what is queued is dropped."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def send(self, topic: str, messages: Iterable[Message]) -> None:
        """Queue messages; librdkafka sends them in order, and the commit waits for all."""
        produce = self._producer.produce
        to = {"partition": self.placed[topic]()} if topic in self.placed else {}
        for value, key, headers, timestamp in messages:
            more = to if timestamp is None else {**to, "timestamp": timestamp}
            while True:
                try:
                    produce(topic, value, key, headers=list(headers) if headers else None, **more)
                    break
                except BufferError:
                    self._make_room()
                except KafkaException as error:
                    raise self._sorted(error.args[0], f"produce to {topic}") from error
        self._serve(0)

    def send_columns(self, topic: str, messages: MessageColumns) -> None:
        """Queue messages without headers, many in one call."""
        for at in range(0, len(messages), _SLICE):
            waiting = messages[at : at + _SLICE]
            self._serve(0)  # a sent message counts as queued until its delivery event is served
            while True:
                try:
                    taken = self._producer.produce_batch(topic, waiting)
                except KafkaException as error:
                    raise self._sorted(error.args[0], f"produce to {topic}") from error
                if taken == len(waiting):
                    break
                waiting = waiting[taken:]
                self._make_room()

    def _sorted(self, error: KafkaError, doing: str) -> OncelyError:
        """The error by its consequence."""
        code, text = error.code(), f"{doing}: {error.str()}"
        if code in _FENCED:
            return InstanceFenced(text)
        if code in _DENIED:
            return ConfigError(
                "sink.kafka",
                f"{self._brokers} denies it: {text}",
                way_out="grant this user Write on the output topics and the ledger, Read on the"
                " group, and Write and Describe on transactional ids with the prefix oncely/",
            )
        if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return ConfigError(
                "sink.transaction_timeout",
                f"{self._brokers} refuses it: {error.str()}",
                way_out="stay below the broker's transaction.max.timeout.ms",
            )
        if code in _INVALID:
            return Stopped(
                f"{self._brokers} refuses a record: {text}",
                way_out="compare cleanup.policy (a compacted topic takes no record without a key)"
                " and message.timestamp.before.max.ms and message.timestamp.after.max.ms of the"
                " topic with the records, and the clocks of broker and client; then start again: a"
                " start reads these settings, and what they exclude becomes a dead letter",
            )
        if error.txn_requires_abort() or error.retriable() or code in _LOST_STATE:
            return Unavailable(f"{self._brokers}: {text}")
        if error.fatal():
            return Stopped(f"{self._brokers}: {text}", way_out="see the broker's log")
        return classify_error(error, doing, self._brokers)

    def _make_room(self) -> None:
        """Wait until queued messages are sent."""
        self._serve(0.1)

    def _serve(self, seconds: float) -> None:
        """Serve the instance's events; this may raise that it was fenced."""
        try:
            served(lambda: self._producer.poll(seconds))
        except KafkaException as error:
            raise self._sorted(error.args[0], "produce") from error


# -- without a transaction -----------------------------------------------------------------


class Delivered:
    """The producer's ``on_delivery``: remembers the first record that was not delivered."""

    def __init__(self) -> None:
        self.first: KafkaError | None = None

    def __call__(self, error: KafkaError | None, _message: object) -> None:
        """Called for every record, inside ``poll`` and ``flush``."""
        if error is not None and self.first is None:
            self.first = error


class Plain(Sender):
    """Sends records that take effect separately, on arrival.

    Args:
        producer: a new, idempotent instance, with ``delivered`` as its ``on_delivery``.
        delivered: receives the delivery report of each record.
        timeout: seconds to wait for all acknowledgements.
        brokers: for messages.
    """

    def __init__(self, producer: Any, delivered: Delivered, timeout: float, brokers: str) -> None:
        super().__init__(producer, timeout, brokers)
        self._delivered = delivered

    def finish(self) -> None:
        """Wait until every record is acknowledged.

        Raises:
            Unavailable: some are not, or it is unknown.
        """
        try:
            left: int = served(lambda: self._producer.flush(self._timeout))
        except KafkaException as error:
            raise self._sorted(error.args[0], "flush") from error
        if self._delivered.first is not None:
            raise self._sorted(self._delivered.first, "produce")
        if left:
            raise Unavailable(f"{self._brokers}: {left} records are not acknowledged in time")


@dataclass(frozen=True)
class MessageColumns:
    """Messages in order. A null key is no key, a null value a tombstone.

    Attributes:
        key, value: arrays of large binaries, of the same length.
    """

    key: pa.LargeBinaryArray
    value: pa.LargeBinaryArray

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, part: slice) -> MessageColumns:
        """Consecutive messages; nothing is copied."""
        start, stop, _ = part.indices(len(self))
        return MessageColumns(
            self.key.slice(start, max(0, stop - start)),
            self.value.slice(start, max(0, stop - start)),
        )


class Producer(Handle):
    """confluent-kafka's producer, whose ``produce_batch`` accepts :class:`MessageColumns`.

    Columns are queued from Arrow's memory in transactions only: there the commit reports whether
    all have arrived. Otherwise delivery reports do, and these need confluent-kafka's messages.
    """

    def __init__(self, config: dict[str, Any], **more: Any) -> None:
        super().__init__(ck.Producer(config, **more))
        self._direct = "transactional.id" in config

    def produce_batch(self, topic: str, messages: MessageColumns) -> int:
        """Queue messages from the first on until the queue is full, and return their number.

        Raises:
            KafkaException: a message was refused for another reason.
        """
        if self._direct and (native := clients.native()):
            producer = self._opened()  # another thread may close this handle meanwhile
            errors = native.produce_batch(
                cimpl.__file__,
                clients.handle_of(producer),
                topic,
                messages.key,
                messages.value,
            )
            return _taken(np.frombuffer(errors, np.int32))
        return self._one_by_one(topic, messages)

    def unanswered(self) -> int:
        """The number of messages that were given to the producer, and are not answered yet."""
        return len(self._opened())

    def _one_by_one(self, topic: str, messages: MessageColumns) -> int:
        produce, taken = self._opened().produce, 0
        pairs = zip(messages.key.to_pylist(), messages.value.to_pylist(), strict=True)
        try:
            for taken, (key, value) in enumerate(pairs):  # noqa: B007
                produce(topic, value, key)
        except BufferError:
            return taken
        finally:
            del produce  # the traceback of an error keeps this frame
        return len(messages)


def _taken(errors: npt.NDArray[np.int32]) -> int:
    """The number of messages that were queued.

    A full queue ends a call: the following messages are refused too, or the order would be lost.

    Raises:
        KafkaException: a message was refused for another reason than a full queue.
    """
    refused = np.flatnonzero(errors)
    if not len(refused):
        return len(errors)
    others = errors[refused][errors[refused] != KafkaError._QUEUE_FULL]
    if len(others):
        raise KafkaException(KafkaError(int(others[0])))
    first = int(refused[0])
    check(len(refused) == len(errors) - first, "messages were taken behind one that was refused")
    return first


BATCH_HEAD = 61
"""Bytes before the records of a batch (KIP-98, message format 2)."""
_FIXED = 3  # attributes, timestamp delta and offset delta of its first record


def batch_size(message: Message) -> int:
    """Bytes of a batch with only this message, uncompressed."""
    body = _FIXED + _sized(message.key) + _sized(message.value) + _varint(len(message.headers))
    for name, value in message.headers:
        body += _sized(name.encode()) + _sized(value)
    return BATCH_HEAD + _varint(body) + body


def _sized(data: bytes | None) -> int:
    """Bytes of a length prefix and its content; null has the length -1."""
    return 1 if data is None else _varint(len(data)) + len(data)


def _varint(number: int) -> int:
    """Bytes of a non-negative number as a zigzag varint."""
    return max(1, -(-(2 * number).bit_length() // 7))
