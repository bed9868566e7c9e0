"""Writing without transactions, for delivery semantics weaker than exactly once.

The producer is idempotent (KIP-98): its own retries create no duplicates, and the records of a
partition keep their order. The effect of a crash depends on the order of the position's commit.
"""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException

from oncely.clients.kafka.sender import Sender, served
from oncely.errors import Unavailable


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
