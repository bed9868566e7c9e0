"""One producer instance, one transaction.

librdkafka's client does not implement KIP-890's second part: its transactions share producer id and
epoch, so a delayed EndTxn of transaction 1 can end transaction 2. An instance that is initialised
anew (a new epoch) for every transaction prevents that: the delayed request has an epoch that the
coordinator no longer accepts.

Errors by kind (KIP-360): transient errors are retried; errors that require an abort are aborted,
and the caller decides again; an instance that was fenced or ended by the broker is discarded, and
the caller reads the ledger, which alone shows whether a newer run holds it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Self

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from oncely.core.ranges import Position, TopicPartition
from oncely.errors import OncelyError, Unavailable
from oncely.kafka.client import stay_connected
from oncely.kafka.sender import InstanceFenced, Message, Sender, served
from oncely.phases import phase
from oncely.threads import tries

__all__ = ["InstanceFenced", "Message", "Transaction"]

_AGAIN = 0.05  # seconds
_GRACE = 2.0  # seconds; librdkafka ends a call by itself, this is for a call that it does not end
_OFFSETS = "send_offsets_to_transaction"
_ABORT = 5.0  # seconds; without an answer, the next instance fences this one anyway
_ANSWERS = 2.0  # seconds


class Transaction(Sender):
    """A transaction from InitProducerId to EndTxn; then the instance is closed.

    Inside ``with`` an error aborts it. A commit without an answer leaves its outcome open: the next
    instance with the same id determines it.

    Args:
        producer: a new, transactional instance, see :mod:`oncely.kafka.sender`.
        timeout: the time limit of one step, in seconds.
        brokers: for messages.
        warm: a topic whose metadata is requested first, to establish connections.
    """

    def __init__(self, producer: Any, timeout: float, brokers: str, warm: str) -> None:
        super().__init__(producer, timeout, brokers)
        self._warm = warm
        self._open = False
        self._initialised = self._ending = float("inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._abort()
        self.close()

    def close(self) -> None:
        """Close the instance; what is queued is dropped, and what was sent is answered first.

        librdkafka 2.16 frees the state of transactions before the threads of its connections end. A
        response that arrives in between and tells that the instance was fenced frees the text of an
        earlier error again, and glibc ends the process (``rd_kafka_txns_term``).
        """
        if self._producer is not None:
            self._await_answers()
        super().close()

    def _await_answers(self) -> None:
        deadline = time.monotonic() + _ANSWERS
        while self._producer.unanswered() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(KafkaException):  # reported before, or not needed any more
                served(partial(self._producer.purge, in_flight=False, blocking=False))
                served(partial(self._producer.flush, left))

    def init(self) -> Self:
        """Fence every earlier instance, end its open transaction, and wait for that.

        Raises:
            Unavailable: no answer.
            ConfigError: the broker forbids it, or does not support it.
        """
        self._step("connect", lambda left: stay_connected(self._producer, self._warm, left))
        self._step("init_transactions", self._producer.init_transactions)
        self._initialised = time.monotonic()
        return self

    def is_older_than_end_of(self, other: Transaction) -> bool:
        """True if this instance was initialised before the other one's transaction was ended."""
        return self._initialised < other._ending

    def begin(self) -> None:
        """Begin. From now on readers of committed records wait for the end of this transaction."""
        self._step("begin_transaction", lambda _: self._producer.begin_transaction())
        self._open = True

    def send_offsets(
        self, offsets: Mapping[TopicPartition, tuple[Position, str]], group: Any
    ) -> None:
        """Commit positions with their metadata in this transaction (KIP-447).

        Args:
            offsets: position and metadata.
            group: ``consumer_group_metadata()`` of a consumer of that group.
        """
        wanted = [ck.TopicPartition(*tp, at, metadata) for tp, (at, metadata) in offsets.items()]
        call = self._producer.send_offsets_to_transaction

        def send(left: float) -> None:
            # Its own timeout begins when the request is sent. Before that it waits, without a
            # limit, for the next change of a broker's connection.
            if not _returns(partial(call, wanted, group, left), left + _GRACE):
                self._open = False  # the instance accepts no other call
                raise Unavailable(f"{self._brokers}: {_OFFSETS}: no answer in time")

        self._step(_OFFSETS, send)

    def flush(self, seconds: float) -> None:
        """Wait until the broker has responded for all queued messages.

        ``commit`` reports the outcome of the messages.

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

    @phase("commit")
    def commit(self) -> None:
        """Send the queued messages and commit.

        Raises:
            InstanceFenced, Unavailable: not committed, or unknown: read the ledger, after the next
                instance's ``init``.
        """
        self._ending = time.monotonic()
        self._step("commit_transaction", self._producer.commit_transaction)
        self._open = False

    def _step(self, name: str, call: Callable[[float], object]) -> None:
        for left in tries(self._timeout, _AGAIN):
            try:
                served(partial(call, left))
                return
            except KafkaException as failure:
                error = failure.args[0]
            if not error.retriable():
                break
        if name == "commit_transaction" and not error.txn_requires_abort():
            self._open = False  # an abort could race with a late commit
        raise self._sorted(error, name)

    def _sorted(self, error: KafkaError, doing: str) -> OncelyError:
        """The error by its consequence; after a fatal error not even an abort is possible."""
        if error.code() == KafkaError._FATAL or error.fatal():
            self._open = False
        return super()._sorted(error, doing)

    def _abort(self) -> None:
        """Abort, so that readers need not wait for the timeout; best effort."""
        with contextlib.suppress(KafkaException):
            served(lambda: self._producer.abort_transaction(_ABORT))
        self._open = False


def _returns(call: Callable[[], object], seconds: float) -> bool:
    """Make a call in a thread of its own, and wait for its end or its error.

    Returns:
        False if it has not ended in time. Then it is left alone with its instance, which the next
        instance of the transactional id fences.
    """
    ended: Future[object] = Future()

    def make() -> None:
        try:
            ended.set_result(served(call))
        except BaseException as error:
            ended.set_exception(error)

    # A daemon: the interpreter does not wait for it at its end.
    threading.Thread(target=make, name=_OFFSETS, daemon=True).start()
    if not wait([ended], seconds).done:
        return False
    ended.result()
    return True
