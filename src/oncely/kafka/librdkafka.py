"""The address of a client's ``rd_kafka_t``, with which ``oncely_native`` calls librdkafka itself.

The package looks librdkafka's functions up through confluent-kafka's own module, so they are those
of the library with which that module is linked, and calls them on the same instance: begin, offsets
and commit are calls of confluent-kafka (docs/decisions/0015).

An instance keeps its handle, ``rd_kafka_t *rk``, as the first field after its object header. This
is undocumented. So it is read only in versions in which it was tested; with any other version
records go through confluent-kafka's own methods, as without the package.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from typing import Any

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException, cimpl

from oncely import extras as package

_logger = logging.getLogger(__name__)

TRIED = frozenset({"2.16.0"})
"""Tested versions of confluent-kafka, and of the librdkafka in it."""

_HANDLE = object.__basicsize__  # after PyObject_HEAD


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
    """The package ``oncely_native``; None without it, or if it can't call librdkafka."""
    module = package.native()
    return module if module is not None and _callable() else None


@lru_cache(maxsize=1)
def _callable() -> bool:
    """True if librdkafka may be called directly; if not, the reason is logged."""
    if reason := _obstacle():
        _logger.warning("records are passed to librdkafka separately, which is slower: %s", reason)
    return not reason


def _obstacle() -> str:
    name, number = ck.libversion()
    for version, what in ((ck.__version__, "confluent-kafka"), (name, "librdkafka")):
        if version not in TRIED:
            return f"{what} {version} was not tested; {', '.join(sorted(TRIED))} was"
    try:
        found = ctypes.CDLL(cimpl.__file__).rd_kafka_version()
    except (OSError, AttributeError) as error:
        return f"it can't be called directly: {error}"
    return "" if found == number else "confluent-kafka uses another copy of it"
