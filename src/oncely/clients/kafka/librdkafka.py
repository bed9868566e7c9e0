"""A direct binding to ``rd_kafka_produce_batch``: many messages in one call, from existing memory.

confluent-kafka's ``produce_batch`` takes a dict and two bytes objects for each message and
allocates a state for its delivery report: 1.5 us of a processor. ``rd_kafka_produce_batch`` itself
takes an array of ``rd_kafka_message_t``. It is looked up through confluent-kafka's own module, so
it is the library with which that module is linked, and it is called on the same instance: begin,
offsets and commit are calls of confluent-kafka (docs/decisions/0015).

An instance keeps its handle, ``rd_kafka_t *rk``, as the first field after its object header. This
is undocumented. So it is read only in versions in which it was tested; with any other version
messages are sent by confluent-kafka's own method.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from typing import Any

import confluent_kafka as ck
import numpy as np
import numpy.typing as npt
from confluent_kafka import KafkaError, KafkaException, cimpl

from oncely import native as package

_logger = logging.getLogger("oncely.sinks.kafka")

TRIED = frozenset({"2.16.0"})
"""Tested versions of confluent-kafka, and of the librdkafka in it."""

MESSAGE = np.dtype(
    [
        ("err", np.int32),
        ("_1", np.int32),
        ("rkt", np.uint64),
        ("partition", np.int32),
        ("_2", np.int32),
        ("payload", np.uint64),
        ("len", np.uint64),
        ("key", np.uint64),
        ("key_len", np.uint64),
        ("offset", np.int64),
        ("_private", np.uint64),
    ]
)
"""``rd_kafka_message_t`` of rdkafka.h if a pointer has eight bytes; a null pointer is null."""

_COPY = 2  # RD_KAFKA_MSG_F_COPY: librdkafka copies the memory before the call returns
_ANY = -1  # RD_KAFKA_PARTITION_UA: the partitioner decides
_HANDLE = object.__basicsize__  # after PyObject_HEAD

Messages = npt.NDArray[np.void]


class Library:
    """The functions of librdkafka that are called directly.

    Args:
        loaded: the shared library, or a library that is linked with it.

    Raises:
        AttributeError: a function is missing.
    """

    def __init__(self, loaded: Any) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int

        def function(name: str, result: Any, *given: Any) -> Any:
            found = getattr(loaded, name)
            found.restype, found.argtypes = result, given
            return found

        self.version: int = function("rd_kafka_version", number)()
        self._topic_new = function("rd_kafka_topic_new", pointer, pointer, ctypes.c_char_p, pointer)
        self._topic_destroy = function("rd_kafka_topic_destroy", None, pointer)
        self._produce_batch = function(
            "rd_kafka_produce_batch", number, pointer, ctypes.c_int32, number, pointer, number
        )
        self._last_error = function("rd_kafka_last_error", number)

    def produce_batch(self, producer: ck.Producer, topic: str, messages: Messages) -> None:
        """Queue messages; the result of each is in ``err``, 0 for success.

        Their state is null, so confluent-kafka's delivery reports skip them: their outcome is
        reported by the transaction only, whose commit fails with the first failed message.

        Args:
            producer: not closed; used by one thread.
            topic: the topic.
            messages: of the type :data:`MESSAGE`, contiguous; the memory that they point to is
                copied.

        Raises:
            KafkaException: the topic's name is invalid.
        """
        handle = handle_of(producer)
        at = self._topic_new(handle, topic.encode(), None)
        if not at:
            raise KafkaException(KafkaError(self._last_error()))
        try:
            self._produce_batch(at, _ANY, _COPY, messages.ctypes.data, len(messages))
        finally:
            self._topic_destroy(at)


def handle_of(client: ck.Producer | ck.Consumer) -> int:
    """The address of a client's ``rd_kafka_t``, which is valid until the client is closed.

    Raises:
        KafkaException: the client is closed.
        TypeError: it is another object.
    """
    if not isinstance(client, cimpl.Producer | cimpl.Consumer):
        raise TypeError(f"{type(client).__name__} is not a client of librdkafka")
    handle = ctypes.c_void_p.from_address(id(client) + _HANDLE).value
    if not handle:
        raise KafkaException(KafkaError(KafkaError._STATE, "the client is closed"))
    return handle


def native() -> Any | None:
    """The package ``oncely_native``; None without it, or if the library is untested."""
    module = package.native()
    return module if module is not None and library() else None


@lru_cache(maxsize=1)
def library() -> Library | None:
    """librdkafka, or None if it must not be called directly; the reason is logged."""
    found, reason = _found()
    if found is None:
        _logger.warning("records are passed to librdkafka separately, which is slower: %s", reason)
    return found


def _found() -> tuple[Library | None, str]:
    name, number = ck.libversion()
    for version, what in ((ck.__version__, "confluent-kafka"), (name, "librdkafka")):
        if version not in TRIED:
            return None, f"{what} {version} was not tested; {', '.join(sorted(TRIED))} was"
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return None, "pointers do not have eight bytes on this platform"
    try:
        found = Library(ctypes.CDLL(cimpl.__file__))
    except (OSError, AttributeError) as error:
        return None, f"it can't be called directly: {error}"
    if found.version != number:
        return None, "confluent-kafka uses another copy of it"
    return found, ""
