"""Messages without headers, as Arrow columns; and a producer that accepts such columns.

With ``oncely_native`` no object is created for a message: the producer's queue is filled from
Arrow's memory. Otherwise messages are passed to confluent-kafka one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import confluent_kafka as ck
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, cimpl

from oncely.clients.kafka import librdkafka
from oncely.clients.kafka.client import Handle
from oncely.errors import check


@dataclass(frozen=True)
class Columns:
    """Messages in order. A null key is no key, a null value a tombstone.

    Attributes:
        key, value: arrays of large binaries, of the same length.
    """

    key: pa.LargeBinaryArray
    value: pa.LargeBinaryArray

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, part: slice) -> Columns:
        """Consecutive messages; nothing is copied."""
        start, stop, _ = part.indices(len(self))
        return Columns(
            self.key.slice(start, max(0, stop - start)),
            self.value.slice(start, max(0, stop - start)),
        )


class Producer(Handle):
    """confluent-kafka's producer, whose ``produce_batch`` accepts :class:`Columns`.

    Columns are queued from Arrow's memory in transactions only: there the commit reports whether
    all have arrived. Otherwise delivery reports do, and these need confluent-kafka's messages.
    """

    def __init__(self, config: dict[str, Any], **more: Any) -> None:
        super().__init__(ck.Producer(config, **more))
        self._direct = "transactional.id" in config

    def produce_batch(self, topic: str, messages: Columns) -> int:
        """Queue messages from the first on until the queue is full, and return their number.

        Raises:
            KafkaException: a message was refused for another reason.
        """
        if self._direct and (native := librdkafka.native()):
            producer = self._opened()  # another thread may close this handle meanwhile
            errors = native.produce_batch(
                cimpl.__file__,
                librdkafka.handle_of(producer),
                topic,
                messages.key,
                messages.value,
            )
            return _taken(np.frombuffer(errors, np.int32))
        return self._one_by_one(topic, messages)

    def unanswered(self) -> int:
        """The number of messages that were given to the producer, and are not answered yet."""
        return len(self._opened())

    def _one_by_one(self, topic: str, messages: Columns) -> int:
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
