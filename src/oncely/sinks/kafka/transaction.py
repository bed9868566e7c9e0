"""One producer instance, one transaction.

librdkafka's client does not speak KIP-890's second part: its transactions share producer id and
epoch, so an EndTxn of transaction 1 that arrives late can end transaction 2. An instance that
is initialised anew (a new epoch) for every transaction closes that hole: the late request
carries an epoch that the coordinator no longer takes.

Errors by kind (KIP-360): what may pass is tried again; what asks for an abort is aborted, and
the caller decides again; an instance that was fenced or ended by the broker is thrown away,
and the caller asks the ledger, which alone knows whether a newer run holds it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from oncely.core.offsets import Position, TopicPartition
from oncely.errors import ConfigError, OncelyError, Stopped, Unavailable
from oncely.sources.clients import sort_error

_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
# The broker and this instance no longer agree on its state; a new instance begins with a new one.
_LOST_STATE = (
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    KafkaError.UNKNOWN_PRODUCER_ID,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.INVALID_TXN_STATE,
    KafkaError.TRANSACTION_ABORTABLE,
    KafkaError._STATE,
    KafkaError._FATAL,  # it has failed before; why, the next instance learns for itself
)
_DENIED = (
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
_AGAIN = 0.05  # seconds
_ABORT = 5.0  # seconds; who does not answer is fenced by the next instance anyway
_SLICE = 10_000  # messages handed over at once, so that the queue is served in between


class Message(NamedTuple):
    """A record to be written; ``headers`` in order."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()


class InstanceFenced(Unavailable):
    """Another instance holds the transactional id: a rival of the same run, or a newer run."""


class Transaction:
    """A transaction from InitProducerId to EndTxn; afterwards the instance is gone.

    Inside ``with`` an error aborts it. A commit without an answer leaves it as it is: the next
    instance with the same id learns what became of it.

    Args:
        producer: a new, transactional instance of confluent-kafka's Producer.
        timeout: seconds that one step may take.
        brokers: for messages.
        warm: a topic that is asked for to be connected before anything else.
    """

    def __init__(self, producer: Any, timeout: float, brokers: str, warm: str) -> None:
        self._producer, self._timeout, self._brokers = producer, timeout, brokers
        self._warm = warm
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._open:
            self._abort()
        self._producer = None

    def init(self) -> Self:
        """Fence every earlier instance, end what it left open, and wait until that is done.

        Raises:
            Unavailable: no answer.
            ConfigError: the broker forbids it, or can't do it.
        """
        # Without a connection librdkafka would look for the coordinator in half a second's time.
        self._step("connect", lambda left: self._producer.list_topics(self._warm, timeout=left))
        self._step("init_transactions", self._producer.init_transactions)
        return self

    def begin(self) -> None:
        """From here on readers of committed records wait for the end of this transaction."""
        self._step("begin_transaction", lambda _: self._producer.begin_transaction())
        self._open = True

    def send(self, topic: str, messages: Iterable[Message]) -> None:
        """Queue messages; librdkafka sends them in order, and the commit waits for all."""
        produce = self._producer.produce
        for value, key, headers in messages:
            while True:
                try:
                    produce(topic, value, key, headers=list(headers) if headers else None)
                    break
                except BufferError:
                    self._make_room()
                except KafkaException as error:
                    raise self._sorted(error.args[0], f"produce to {topic}") from error
        self._serve(0)

    def send_plain(self, topic: str, messages: list[dict[str, object]]) -> None:
        """Queue messages without headers, many at a call; dicts of ``key`` and ``value``."""
        for at in range(0, len(messages), _SLICE):
            waiting = messages[at : at + _SLICE]
            self._serve(0)  # until its end is told, a sent message counts as queued
            while waiting:
                try:
                    if self._producer.produce_batch(topic, waiting) == len(waiting):
                        break
                except BufferError:
                    pass
                except KafkaException as error:
                    raise self._sorted(error.args[0], f"produce to {topic}") from error
                waiting = self._refused(topic, waiting)

    def send_offsets(
        self, offsets: Mapping[TopicPartition, tuple[Position, str]], group: Any
    ) -> None:
        """Commit positions with their stamps in this transaction (KIP-447).

        Args:
            offsets: position and metadata.
            group: ``consumer_group_metadata()`` of a consumer of that group.
        """
        wanted = [ck.TopicPartition(*tp, at, metadata) for tp, (at, metadata) in offsets.items()]
        self._step(
            "send_offsets_to_transaction",
            lambda left: self._producer.send_offsets_to_transaction(wanted, group, left),
        )

    def flush(self, seconds: float) -> None:
        """Wait until the broker has answered for everything that was queued.

        What became of the messages, ``commit`` tells.

        Raises:
            Unavailable: not within ``seconds``.
        """
        if left := self._producer.flush(max(0.0, seconds)):
            raise Unavailable(f"{self._brokers}: {left} messages were not taken in time")

    def commit(self) -> None:
        """Send what is queued and commit.

        Raises:
            InstanceFenced, Unavailable: not committed, or nobody knows: ask the ledger, after
                the next instance's ``init``.
        """
        self._step("commit_transaction", self._producer.commit_transaction)
        self._open = False

    def _step(self, name: str, call: Callable[[float], object]) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                call(max(0.1, deadline - time.monotonic()))
                return
            except KafkaException as failure:
                error = failure.args[0]
                if error.retriable() and time.monotonic() < deadline:
                    time.sleep(_AGAIN)
                    continue
                if name == "commit_transaction" and not error.txn_requires_abort():
                    self._open = False  # an abort could end what a late commit has begun
                raise self._sorted(error, name) from failure

    def _sorted(self, error: KafkaError, doing: str) -> OncelyError:
        """The error by its consequence."""
        code, text = error.code(), f"{doing}: {error.str()}"
        if error.code() == KafkaError._FATAL or error.fatal():
            self._open = False  # nothing more can be done with this instance, not even an abort
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
        if error.txn_requires_abort() or error.retriable() or code in _LOST_STATE:
            return Unavailable(f"{self._brokers}: {text}")
        if error.fatal():
            return Stopped(f"{self._brokers}: {text}", way_out="the broker's log says more")
        return sort_error(error, doing, self._brokers)

    def _abort(self) -> None:
        """End it, so that readers need not wait for its timeout; best effort."""
        with contextlib.suppress(KafkaException):
            self._producer.abort_transaction(_ABORT)
        self._open = False

    def _make_room(self) -> None:
        """Wait until queued messages have gone."""
        self._serve(0.1)

    def _serve(self, seconds: float) -> None:
        """Serve the instance's events; that it was fenced may come out here."""
        try:
            self._producer.poll(seconds)
        except KafkaException as error:
            raise self._sorted(error.args[0], "produce") from error

    def _refused(self, topic: str, messages: list[dict[str, object]]) -> list[dict[str, object]]:
        """Those that did not fit into the queue, to be handed over again."""
        again = []
        for message in messages:
            error = message.pop("_error", None)
            if error is None:
                continue
            if not isinstance(error, KafkaError) or error.code() != KafkaError._QUEUE_FULL:
                reason = error if isinstance(error, KafkaError) else KafkaError(KafkaError._FAIL)
                raise self._sorted(reason, f"produce to {topic}")
            again.append(message)
        if again:
            self._make_room()
        return again
