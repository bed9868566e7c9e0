"""Polling of messages for as long as there is progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import KafkaError

from oncely.clients.kafka.client import ErrorState, classify_error, unanswered
from oncely.errors import OncelyError

_STEP = 0.1  # seconds that one poll may take, so that errors are noticed
_PASSING = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)


def polled(
    consumer: Any,
    doing: str,
    brokers: str,
    timeout: float,
    error_state: ErrorState | None = None,
    silent: Callable[[], OncelyError] | None = None,
) -> Iterator[Any]:
    """An endless iterator over the messages of the assigned partitions, and the events at their
    ends.

    Each of them extends the deadline: reading a long log has no time limit, but a silent broker is
    reported after ``timeout`` seconds.

    Args:
        consumer: with partitions assigned, and ``enable.partition.eof``.
        doing, brokers: for messages.
        timeout: seconds without a message.
        error_state: the client's errors, which contain the reason of silence.
        silent: creates the error for silence.

    Raises:
        OncelyError: the broker refuses; the class depends on the consequence.
        Unavailable: no message arrived for ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        # consume() would wait for the full number of messages.
        message = consumer.poll(_STEP)
        if message is not None:
            error = message.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                yield message
                deadline = time.monotonic() + timeout
                continue
            if not error.retriable() and error.code() not in _PASSING:
                raise classify_error(error, doing, brokers)
        if error_state is not None and error_state.final:
            raise error_state.final
        if time.monotonic() > deadline:
            raise (
                silent()
                if silent
                else unanswered(doing, brokers, error_state.newest if error_state else "")
            )
