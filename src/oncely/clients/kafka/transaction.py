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
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from oncely.clients.kafka.client import stay_connected
from oncely.clients.kafka.sender import InstanceFenced, Message, Sender, served
from oncely.core.topics import Position, TopicPartition
from oncely.errors import OncelyError, Unavailable

__all__ = ["InstanceFenced", "Message", "Transaction"]

_AGAIN = 0.05  # seconds
_ABORT = 5.0  # seconds; who does not answer is fenced by the next instance anyway


class Transaction(Sender):
    """A transaction from InitProducerId to EndTxn; afterwards the instance is gone.

    Inside ``with`` an error aborts it. A commit without an answer leaves it as it is: the next
    instance with the same id learns what became of it.

    Args:
        producer: a new, transactional instance, see :mod:`oncely.clients.kafka.producer`.
        timeout: seconds that one step may take.
        brokers: for messages.
        warm: a topic that is asked for to be connected before anything else.
    """

    def __init__(self, producer: Any, timeout: float, brokers: str, warm: str) -> None:
        super().__init__(producer, timeout, brokers)
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
        self._step("connect", lambda left: stay_connected(self._producer, self._warm, left))
        self._step("init_transactions", self._producer.init_transactions)
        return self

    def begin(self) -> None:
        """From here on readers of committed records wait for the end of this transaction."""
        self._step("begin_transaction", lambda _: self._producer.begin_transaction())
        self._open = True

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
            InstanceFenced: another instance holds the id.
            Unavailable: not within ``seconds``.
        """
        try:
            left: int = served(lambda: self._producer.flush(max(0.0, seconds)))
        except KafkaException as failure:
            raise self._sorted(failure.args[0], "flush") from failure
        if left:
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
                served(partial(call, max(0.1, deadline - time.monotonic())))
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
        """The error by its consequence; after a fatal one not even an abort can be done."""
        if error.code() == KafkaError._FATAL or error.fatal():
            self._open = False
        return super()._sorted(error, doing)

    def _abort(self) -> None:
        """End it, so that readers need not wait for its timeout; best effort."""
        with contextlib.suppress(KafkaException):
            self._producer.abort_transaction(_ABORT)
        self._open = False
