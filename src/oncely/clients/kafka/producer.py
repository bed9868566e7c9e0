"""Messages without headers, as Arrow columns; and a producer that accepts such columns.

No object is created for a message: the producer's queue is filled from Arrow's memory. If that is
not possible (see :mod:`oncely.clients.kafka.librdkafka`), messages are converted for
confluent-kafka.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import confluent_kafka as ck
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, cimpl

from oncely.clients.kafka import librdkafka
from oncely.clients.kafka.client import Handle
from oncely.errors import check

_EMPTY = np.zeros(
    1, dtype=np.uint8
)  # target of an empty value's pointer: a null pointer means null


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

    def structs(self) -> librdkafka.Messages:
        """The messages for librdkafka: pointers into the arrays, which must not be freed
        meanwhile."""
        messages = np.zeros(len(self), librdkafka.MESSAGE)
        messages["payload"], messages["len"] = _pointers(self.value)
        messages["key"], messages["key_len"] = _pointers(self.key)
        return messages

    def dicts(self) -> list[dict[str, Any]]:
        """The messages for confluent-kafka."""
        pairs = zip(binaries(self.key), binaries(self.value), strict=True)
        return [{"key": key, "value": value} for key, value in pairs]


class Producer(Handle):
    """confluent-kafka's producer; its ``produce_batch`` accepts :class:`Columns`, too.

    Columns are queued directly from Arrow's memory in transactions only: there the commit reports
    whether all have arrived. Otherwise delivery reports do, and these need confluent-kafka's
    messages.
    """

    def __init__(self, config: dict[str, Any], **more: Any) -> None:
        super().__init__(ck.Producer(config, **more))
        self._direct = "transactional.id" in config

    def produce_batch(self, topic: str, messages: Any, *args: Any, **more: Any) -> int:
        """Queue messages from the first on until the queue is full, and return their number.

        Raises:
            KafkaException: a message was refused for another reason.
        """
        if not isinstance(messages, Columns):
            taken: int = self._call("produce_batch", topic, messages, *args, **more)
            return taken
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
        if self._direct and (library := librdkafka.library()):
            structs = messages.structs()
            library.produce_batch(self._opened(), topic, structs)
            return _taken(structs["err"])
        return self._one_by_one(topic, messages.dicts())

    def unanswered(self) -> int:
        """The number of messages that were given to the producer, and are not answered yet."""
        return len(self._opened())

    def _one_by_one(self, topic: str, messages: list[dict[str, Any]]) -> int:
        try:
            self._call("produce_batch", topic, messages)
        except BufferError:
            return 0
        errors = [one.get("_error") for one in messages]
        codes = [0 if error is None else error.code() for error in errors]
        return _taken(np.array(codes, dtype=np.int32))


def binaries(array: pa.LargeBinaryArray) -> Sequence[bytes | None]:
    """The values; several times faster than Arrow's own conversion if none is null."""
    if array.null_count == len(array):
        return [None] * len(array)
    if array.null_count:
        found: list[bytes | None] = array.to_pylist()
        return found
    data = memoryview(array.buffers()[2] or b"")
    return [bytes(data[a:b]) for a, b in pairwise(_bounds(array).tolist())]


def lengths(array: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    """The number of bytes of each value; 0 for null."""
    found = np.diff(_bounds(array))
    return np.where(_valid(array), found, 0) if array.null_count else found


def _bounds(array: pa.LargeBinaryArray) -> npt.NDArray[np.int64]:
    """The offsets of the values in the array's buffer, one more than there are values."""
    if not len(array):
        return np.zeros(1, dtype=np.int64)
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int64)
    return offsets[array.offset : array.offset + len(array) + 1]


def _valid(array: pa.LargeBinaryArray) -> npt.NDArray[np.bool_]:
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _pointers(
    array: pa.LargeBinaryArray,
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Address and length of each value; both are 0 for null."""
    data = array.buffers()[2]
    base = data.address if data is not None and data.size else _EMPTY.ctypes.data
    starts = _bounds(array)[:-1].astype(np.uint64) + np.uint64(base)
    if array.null_count:
        starts = np.where(_valid(array), starts, np.uint64(0))
    return starts, lengths(array).astype(np.uint64)


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
