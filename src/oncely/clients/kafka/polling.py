"""Reading on, message by message, for as long as there is progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import KafkaError

from oncely.clients.kafka.client import ErrorState, classify_error, unanswered
from oncely.errors import OncelyError

_STEP = 0.1  # seconds that one poll may take, so that complaints are seen
_PASSING = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)


def polled(
    consumer: Any,
    doing: str,
    brokers: str,
    timeout: float,
    trouble: ErrorState | None = None,
    silent: Callable[[], OncelyError] | None = None,
) -> Iterator[Any]:
    """The messages of the assigned partitions, and the events at their ends, without end.

    The deadline moves with each of them: a long log takes as long as it takes, a broker that has
    become silent is reported after ``timeout`` seconds.

    Args:
        consumer: with partitions assigned, and ``enable.partition.eof``.
        doing, brokers: for messages.
        timeout: seconds without a message.
        trouble: the client's complaints, which say more about silence.
        silent: makes the error for silence.

    Raises:
        OncelyError: the broker refuses, by its consequence.
        Unavailable: nothing came for ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        # consume() would wait for as many messages as it was asked for.
        message = consumer.poll(_STEP)
        if message is not None:
            error = message.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                yield message
                deadline = time.monotonic() + timeout
                continue
            if not error.retriable() and error.code() not in _PASSING:
                raise classify_error(error, doing, brokers)
        if trouble is not None and trouble.final:
            raise trouble.final
        if time.monotonic() > deadline:
            raise (
                silent()
                if silent
                else unanswered(doing, brokers, trouble.newest if trouble else "")
            )
