"""The producer's settings: what may be passed through, and what makes it exactly once.

Idempotence (KIP-98), ``acks=all`` and at most five requests in flight keep the order and the
number of records; the transactional id and the timeout are part of the protocol. A key that
would weaken one of them is refused, not overruled in silence.
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
"""Keys of ``[sink.kafka]`` that change speed, not meaning."""

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
    "transactional.id": "it is made of the pipeline and the topic-partition: it is what fences",
    "transaction.timeout.ms": "a transaction must not outlive what reads and fences rely on",
    "message.timeout.ms": "a record given up inside a transaction would end it",
    "delivery.timeout.ms": "a record given up inside a transaction would end it",
    "retries": "a request that is not tried again would end the transaction",
    "message.send.max.retries": "a request that is not tried again would end the transaction",
    "message.max.bytes": "it follows from max.message.bytes of the topics",
    "enable.gapless.guarantee": "a transaction keeps its order already",
    "bootstrap.servers": "the sink writes where the source is: one transaction, one cluster",
}


_BATCH = 1_000_000  # bytes, librdkafka's own default
_SLACK = 1_000  # librdkafka counts a few bytes that a batch does not have


def checked(settings: Mapping[str, object]) -> dict[str, str]:
    """``[sink.kafka]`` as texts.

    Raises:
        ConfigError: naming ``sink.kafka.<key>``.
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
            "unknown, or no business of this sink",
            way_out=f"did you mean {near[0]}?" if near else "remove it",
        )
    return key, value


def producer_config(
    settings: Mapping[str, object],
    transactional_id: str | None,
    timeout_ms: int,
    sizes: Collection[int],
) -> dict[str, object]:
    """What one producer instance is told, beside brokers and security.

    Args:
        settings: of ``[sink.kafka]``.
        transactional_id: None for an idempotent producer without transactions.
        timeout_ms: of a transaction, and of a message.
        sizes: ``max.message.bytes`` of the topics written to. The smallest bounds what may go
            together in a batch, the largest what a single record may have.
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
        "partitioner": "murmur2_random",  # the Java clients' choice: keys stay together
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
