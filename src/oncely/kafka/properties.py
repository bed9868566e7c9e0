"""The properties of Kafka's clients, checked, as librdkafka gets them: those of users, with their
secrets, and those of producers that exactly-once delivery requires.

A property that would be ignored, or that the clients set themselves, is refused: silence would be
worse than an error. librdkafka itself refuses unknown names only. Beside the properties that are
allowed here it takes twice as many others: those of groups, positions and single kinds of clients,
callbacks and plugins. So the allowed ones are listed.

Idempotence (KIP-98), ``acks=all`` and at most five requests in flight keep the order and the number
of records; the transactional id and the timeout are part of the protocol. A property that would
weaken them is refused, not silently overridden.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from oncely.errors import ConfigError
from oncely.secrets import Secrets, redact

ACCEPTED = frozenset(
    {
        "broker.address.family",
        "broker.address.ttl",
        "check.crcs",
        "client.dns.lookup",
        "client.id",
        "client.rack",
        "connections.max.idle.ms",
        "enable.ssl.certificate.verification",
        "fetch.error.backoff.ms",
        "fetch.max.bytes",
        "fetch.message.max.bytes",
        "fetch.min.bytes",
        "fetch.wait.max.ms",
        "https.ca.location",
        "https.ca.pem",
        "isolation.level",
        "max.partition.fetch.bytes",
        "metadata.max.age.ms",
        "receive.message.max.bytes",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "sasl.kerberos.keytab",
        "sasl.kerberos.kinit.cmd",
        "sasl.kerberos.min.time.before.relogin",
        "sasl.kerberos.principal",
        "sasl.kerberos.service.name",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.extensions",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.token.endpoint.url",
        "sasl.password",
        "sasl.username",
        "security.protocol",
        "socket.connection.setup.timeout.ms",
        "socket.keepalive.enable",
        "socket.max.fails",
        "socket.nagle.disable",
        "socket.receive.buffer.bytes",
        "socket.send.buffer.bytes",
        "socket.timeout.ms",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.cipher.suites",
        "ssl.crl.location",
        "ssl.curves.list",
        "ssl.endpoint.identification.algorithm",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.location",
        "ssl.keystore.password",
        "ssl.sigalgs.list",
    }
)
"""Every property that is allowed in ``[source.kafka]``: what the clients of a pipeline do not set
themselves."""

SECRET = frozenset(
    {
        "sasl.password",
        "sasl.oauthbearer.client.secret",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
    }
)
"""Properties whose value is never shown."""

_POSITIONS = "the position is kept in the sink's database and nowhere else"
OWNED: Mapping[str, tuple[str, str]] = {
    "bootstrap.servers": ("it has its own setting", "write it as source.brokers"),
    "metadata.broker.list": ("it has its own setting", "write it as source.brokers"),
    "group.id": (
        f"no consumer group is used: {_POSITIONS}",
        "source.group names the group that shows the position to lag tools",
    ),
    "group.instance.id": (f"no consumer group is used: {_POSITIONS}", "remove it"),
    "enable.auto.commit": (f"nothing is committed to Kafka: {_POSITIONS}", "remove it"),
    "auto.commit.interval.ms": (f"nothing is committed to Kafka: {_POSITIONS}", "remove it"),
    "enable.auto.offset.store": (f"nothing is committed to Kafka: {_POSITIONS}", "remove it"),
    "auto.offset.reset": (
        "a reset would silently skip or repeat records",
        "use source.start for the first start and source.on_gap for lost records",
    ),
    "allow.auto.create.topics": ("a missing topic is an error here", "remove it"),
    "enable.partition.eof": ("it is set by the reader itself", "remove it"),
    "startingOffsets": ("it has its own setting", "write it as source.start"),
    "failOnDataLoss": ("it has its own setting", "write it as source.on_gap"),
    "maxOffsetsPerTrigger": ("it has its own setting", "write it as spark.max_records_per_batch"),
    "sasl.jaas.config": (
        "the clients are librdkafka's",
        "use sasl.mechanism, sasl.username and sasl.password",
    ),
}
"""What Oncely sets by itself, or by other keys: the reason, and the way out."""

JAVA_NAMES: Mapping[str, str] = {
    "ssl.truststore.location": "ssl.ca.location (PEM)",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.truststore.password": "ssl.ca.location (PEM, needs no password)",
    "ssl.truststore.type": "ssl.ca.location (PEM)",
    "ssl.keystore.type": "ssl.keystore.location (PKCS#12)",
    "ssl.keystore.key": "ssl.key.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "request.timeout.ms": "socket.timeout.ms",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "fetch.max.wait.ms": "fetch.wait.max.ms",
}
"""The Java client's names, and librdkafka's names that replace them."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "isolation.level": ("read_committed",),
    "security.protocol": ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl"),
    "sasl.mechanism": ("plain", "scram-sha-256", "scram-sha-512", "gssapi", "oauthbearer"),
    "ssl.endpoint.identification.algorithm": ("https", "none"),
    "sasl.oauthbearer.method": ("oidc",),
}
"""Allowed values, in lower case."""

MECHANISM_NEEDS: Mapping[str, tuple[str, ...]] = {
    "plain": ("sasl.username", "sasl.password"),
    "scram-sha-256": ("sasl.username", "sasl.password"),
    "scram-sha-512": ("sasl.username", "sasl.password"),
    "gssapi": ("sasl.kerberos.principal", "sasl.kerberos.keytab"),
    "oauthbearer": (
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.token.endpoint.url",
    ),
}
"""Properties that a mechanism requires."""


def plain(kafka: Mapping[str, object]) -> dict[str, str]:
    """The values as texts, and ``sasl.mechanisms`` by its shorter name.

    Raises:
        ConfigError: a value is not a text, a number or true/false.
    """
    done: dict[str, str] = {}
    for name, value in kafka.items():
        key = name
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str | int | float):
            text = str(value)
        else:
            raise _error(
                key, f"found {type(value).__name__}; allowed: a text, a number, true/false"
            )
        if key in ("sasl.mechanism", "sasl.mechanisms"):
            key, text = "sasl.mechanism", text.upper()  # librdkafka requires capitals
        done[key] = text
    return done


def problems(kafka: Mapping[str, object]) -> list[ConfigError]:
    """All problems of ``[source.kafka]``; empty if it is accepted."""
    found = [error for key in kafka for error in _unknown(key)]
    if {"sasl.mechanism", "sasl.mechanisms"} <= kafka.keys():
        found.append(_error("sasl.mechanisms", "the same key as sasl.mechanism", "keep one"))
    try:
        values = plain({key: value for key, value in kafka.items() if key in ACCEPTED})
    except ConfigError as error:
        return [*found, error]
    found += [error for key, value in values.items() for error in _value(key, value)]
    # Missing properties are reported only if each given property is valid.
    return found or [*_sasl(values), *_ssl(values)]


def checked(kafka: Mapping[str, object]) -> dict[str, str]:
    """``kafka`` as :func:`plain` texts.

    Raises:
        ConfigError: the error names ``source.kafka.<key>``; the first of :func:`problems`.
    """
    for problem in problems(kafka):
        raise problem
    return plain(kafka)


def librdkafka(kafka: Mapping[str, object]) -> dict[str, str]:
    """The properties of the clients, without brokers and settings of single clients.

    Raises:
        ConfigError: the error names ``source.kafka.<key>``.
    """
    values = checked(kafka)
    return {key: value for key, value in values.items() if key != "isolation.level"}


def secrets(kafka: Mapping[str, object]) -> Secrets:
    """The secrets of ``[source.kafka]``, for the error texts of its clients."""
    key_file = kafka.get("ssl.key.location")
    with suppress(OSError, UnicodeDecodeError):
        pem = Path(str(key_file)).read_text("ascii") if key_file else ""
        return Secrets.of([*secret_values(kafka), pem, *_body(pem)])
    return Secrets.of(secret_values(kafka))


def secret_values(kafka: Mapping[str, object]) -> list[str]:
    """Every value that must not be shown; of a PEM each line, too."""
    values = {key: str(kafka[key]) for key in SECRET & kafka.keys()}
    lines = [line for key, pem in values.items() if key.endswith(".pem") for line in _body(pem)]
    return [*values.values(), *lines, *_of_oauth(kafka)]


def _of_oauth(kafka: Mapping[str, object]) -> Iterator[str]:
    """What the endpoint's URL contains beside its address, and the login of HTTP's Basic."""
    url = urlsplit(str(kafka.get("sasl.oauthbearer.token.endpoint.url", "")))
    yield from (url.password or "", url.netloc.rpartition("@")[0])
    yield from (part.rpartition("=")[2] for part in url.query.split("&"))
    if secret := kafka.get("sasl.oauthbearer.client.secret"):
        yield f"{kafka.get('sasl.oauthbearer.client.id')}:{secret}"


def is_sasl(values: Mapping[str, str]) -> bool:
    """True if the connection authenticates by SASL."""
    return values.get("security.protocol", "plaintext").lower().startswith("sasl")


def is_tls(values: Mapping[str, str]) -> bool:
    """True if the connection is encrypted."""
    return values.get("security.protocol", "plaintext").lower().endswith("ssl")


def _error(key: str, problem: str, way_out: str = "") -> ConfigError:
    return ConfigError(f"source.kafka.{key}", problem, way_out=way_out)


def _unknown(key: str) -> Iterator[ConfigError]:
    """The reason why a property is not accepted, if it is not."""
    if key in ACCEPTED:
        return
    if key in OWNED:
        reason, way_out = OWNED[key]
        yield _error(key, f"refused: {reason}", way_out)
    elif key in JAVA_NAMES:
        yield _error(key, "this is the Java client's name", f"write {JAVA_NAMES[key]}")
    elif key.startswith("kafka."):
        yield _error(key, "the prefix is Spark's", f"write {key.removeprefix('kafka.')}")
    else:
        near = difflib.get_close_matches(key, sorted(ACCEPTED), 1, 0.75)
        way_out = f"did you mean {near[0]}?" if near else "remove it"
        yield _error(key, "is unknown, or set by the clients themselves", way_out)


def _value(key: str, value: str) -> Iterator[ConfigError]:
    """The reason why a value is not accepted, if it is not."""
    if key in CHOICES and value.lower() not in CHOICES[key]:
        allowed = ", ".join(CHOICES[key])
        yield _error(key, f"found {redact(value)!r}; allowed: {allowed}", "use one of these")
    if not value.strip() and key not in SECRET:
        yield _error(key, "is empty", "give it a value or remove it")


def _sasl(values: Mapping[str, str]) -> Iterator[ConfigError]:
    """SASL properties that require each other, or that would be ignored."""
    given = [key for key in values if key.startswith("sasl.")]
    if not is_sasl(values):
        for key in given:
            yield _error(
                key,
                "would be ignored: security.protocol names no SASL",
                'write security.protocol = "SASL_SSL"',
            )
        return
    mechanism = values.get("sasl.mechanism", "").lower()
    if not mechanism:
        yield _error("sasl.mechanism", "is missing", f"one of {', '.join(MECHANISM_NEEDS)}")
        return
    for key in MECHANISM_NEEDS[mechanism]:
        if not values.get(key):
            yield _error(key, f"is missing; {mechanism.upper()} needs it", "give it a value")


def _ssl(values: Mapping[str, str]) -> Iterator[ConfigError]:
    """TLS properties that require or exclude each other, or that would be ignored."""
    given = {key for key in values if key.startswith("ssl.")}
    if not is_tls(values):
        for key in sorted(given):
            yield _error(
                key,
                "would be ignored: security.protocol names no SSL",
                'write security.protocol = "SSL" or "SASL_SSL"',
            )
        return
    if {"ssl.ca.location", "ssl.ca.pem"} <= given:
        yield _error("ssl.ca.pem", "excludes ssl.ca.location", "keep one of the two")
    pairs = (
        ("ssl.certificate.location", "ssl.key.location"),
        ("ssl.certificate.pem", "ssl.key.pem"),
        ("ssl.keystore.location", "ssl.keystore.password"),
    )
    for pair in pairs:
        missing = [key for key in pair if key not in given]
        if len(missing) == 1:
            yield _error(missing[0], f"is missing; {', '.join(set(pair) & given)} needs it")
    stores = [pair[0] for pair in pairs if given & set(pair)]
    if len(stores) > 1:
        yield _error(stores[1], f"excludes {stores[0]}: give one client key", "keep one pair")


def _body(pem: str) -> list[str]:
    """The lines of a PEM with content: a text may quote a single line."""
    return [line for line in pem.splitlines() if line and not line.startswith("-----")]


PRODUCER_ACCEPTED = frozenset(
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


# -- producers ------------------------------------------------------------------------------

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


def checked_producer(settings: Mapping[str, object]) -> dict[str, str]:
    """``[sink.kafka]`` as texts.

    Raises:
        ConfigError: the error names ``sink.kafka.<key>``.
    """
    return {key: value for key, value in map(_one, settings.items()) if key in PRODUCER_ACCEPTED}


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
    elif key not in PRODUCER_ACCEPTED:
        near = difflib.get_close_matches(key, sorted(PRODUCER_ACCEPTED), 1, 0.75)
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
    own = checked_producer(settings)
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
