"""The producer's settings: those that users may set, and those that exactly-once delivery requires.

Idempotence (KIP-98), ``acks=all`` and at most five requests in flight keep the order and the number
of records; the transactional id and the timeout are part of the protocol. A property that would
weaken them is refused, not silently overridden.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from oncely.errors import ConfigError

ACCEPTED = frozenset(
    {
        "client.id",
        "compression.codec",
        "compression.level",
        "compression.type",
        "linger.ms",
        "queue.buffering.max.ms",
        "queue.buffering.max.messages",
        "queue.buffering.max.kbytes",
        "batch.num.messages",
        "batch.size",
        "sticky.partitioning.linger.ms",
        "partitioner",
        "socket.timeout.ms",
        "socket.nagle.disable",
        "retry.backoff.ms",
        "retry.backoff.max.ms",
        "reconnect.backoff.ms",
        "reconnect.backoff.max.ms",
    }
)
"""Properties of ``[sink.kafka]`` that change speed, not semantics."""

_STRONG: Mapping[str, tuple[frozenset[str], str]] = {
    "enable.idempotence": (frozenset({"true"}), "without it a retried request doubles records"),
    "acks": (frozenset({"all", "-1"}), "an acknowledged record could be lost with its broker"),
    "request.required.acks": (
        frozenset({"all", "-1"}),
        "an acknowledged record could be lost with its broker",
    ),
}
_IN_FLIGHT = ("max.in.flight", "max.in.flight.requests.per.connection")
_OWNED: Mapping[str, str] = {
    "transactional.id": "it is derived from the pipeline and the topic-partition, for fencing",
    "transaction.timeout.ms": "readers and fencing rely on it",
    "message.timeout.ms": "a record given up inside a transaction would end it",
    "delivery.timeout.ms": "a record given up inside a transaction would end it",
    "retries": "a request that is not tried again would end the transaction",
    "message.send.max.retries": "a request that is not tried again would end the transaction",
    "message.max.bytes": "it follows from max.message.bytes of the topics",
    "enable.gapless.guarantee": "a transaction keeps its order already",
    "bootstrap.servers": "the sink writes where the source is: one transaction, one cluster",
}


_BATCH = 1_000_000  # bytes, librdkafka's own default
_SLACK = 1_000  # librdkafka counts a few more bytes than a batch has


def checked(settings: Mapping[str, object]) -> dict[str, str]:
    """``[sink.kafka]`` as texts.

    Raises:
        ConfigError: the error names ``sink.kafka.<key>``.
    """
    return {key: value for key, value in map(_one, settings.items()) if key in ACCEPTED}


def _one(item: tuple[str, object]) -> tuple[str, str]:
    key, given = item
    name = f"sink.kafka.{key}"
    if not isinstance(given, str | int | float):
        raise ConfigError(name, f"found {type(given).__name__}; allowed: a text or a number")
    value = str(given).lower() if isinstance(given, bool) else str(given)
    if key in _OWNED:
        raise ConfigError(name, f"refused: {_OWNED[key]}", way_out="remove it")
    if key in _STRONG:
        allowed, reason = _STRONG[key]
        if value.lower() not in allowed:
            raise ConfigError(name, f"found {value!r}: {reason}", way_out="remove it")
    elif key in _IN_FLIGHT:
        if not value.isdecimal() or not 1 <= int(value) <= 5:
            raise ConfigError(
                name,
                f"found {value!r}; allowed: 1 to 5, beyond that a retry changes the order",
                way_out="remove it",
            )
    elif key not in ACCEPTED:
        near = difflib.get_close_matches(key, sorted(ACCEPTED), 1, 0.75)
        raise ConfigError(
            name,
            "unknown, or not a setting of this sink",
            way_out=f"did you mean {near[0]}?" if near else "remove it",
        )
    return key, value


def producer_config(
    settings: Mapping[str, object],
    transactional_id: str | None,
    timeout_ms: int,
    sizes: Collection[int],
) -> dict[str, object]:
    """The configuration of a producer instance, except brokers and security.

    Args:
        settings: the properties of ``[sink.kafka]``.
        transactional_id: None for an idempotent producer without transactions.
        timeout_ms: the timeout of a transaction, and of a message.
        sizes: ``max.message.bytes`` of the sink's topics. The smallest is the limit of a batch, the
            largest is the limit of a single record.
    """
    own = checked(settings)
    transactional: dict[str, object] = {}
    if transactional_id is not None:
        transactional = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
        }
    batch = min([int(own.get("batch.size", _BATCH)), *sizes, _BATCH])
    return {
        "linger.ms": 5,
        "partitioner": "murmur2_random",  # as the Java clients: a key keeps its partition
        "queue.buffering.max.messages": 1_000_000,
        "socket.timeout.ms": min(10_000, timeout_ms),
        **own,
        "enable.idempotence": True,
        "acks": "all",
        "max.in.flight": 5,
        **transactional,
        "message.timeout.ms": timeout_ms,
        "message.max.bytes": max([_BATCH, *sizes]) + _SLACK,
        "batch.size": batch,
    }
