"""The properties of ``[source.kafka]``: librdkafka's names, and their equivalents in Spark's
client."""

from __future__ import annotations

from collections.abc import Mapping

SAME = frozenset(
    {
        "client.id",
        "client.rack",
        "client.dns.lookup",
        "metadata.max.age.ms",
        "socket.connection.setup.timeout.ms",
        "connections.max.idle.ms",
        "reconnect.backoff.ms",
        "reconnect.backoff.max.ms",
        "retry.backoff.ms",
        "retry.backoff.max.ms",
        "check.crcs",
        "fetch.min.bytes",
        "fetch.max.bytes",
        "max.partition.fetch.bytes",
    }
)
"""Properties with the same name in both clients."""

RENAMED: Mapping[str, str] = {
    "socket.timeout.ms": "request.timeout.ms",
    "socket.send.buffer.bytes": "send.buffer.bytes",
    "socket.receive.buffer.bytes": "receive.buffer.bytes",
    "fetch.wait.max.ms": "fetch.max.wait.ms",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
}
"""librdkafka's name to the Java client's name."""

LOCAL = frozenset({"receive.message.max.bytes"})
"""A limit of librdkafka that the Java client does not have."""

SECURITY = frozenset(
    {
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "sasl.kerberos.service.name",
        "sasl.kerberos.principal",
        "sasl.kerberos.keytab",
        "sasl.kerberos.min.time.before.relogin",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.extensions",
        "sasl.oauthbearer.token.endpoint.url",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.key.location",
        "ssl.key.pem",
        "ssl.keystore.location",
        "ssl.keystore.password",
        "ssl.endpoint.identification.algorithm",
    }
)
"""Properties that :mod:`oncely.clients.kafka.security` translates."""

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

FIXED: Mapping[str, tuple[str, str]] = {
    "isolation.level": (
        "read_committed",
        "records of aborted transactions would become rows",
    ),
    "enable.ssl.certificate.verification": (
        "true",
        "Spark's Java client can't switch it off; name the broker's authority in ssl.ca.location",
    ),
    "socket.keepalive.enable": ("true", "Spark's Java client always keeps connections alive"),
}
"""Properties with one possible value: the value, and the reason."""

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
    "ssl.key.password": (
        "Spark's client can't open a PEM key that has a password (Java 17 has no PBES2 for it)",
        "openssl pkcs12 -export makes one file for ssl.keystore.location, ssl.keystore.password",
    ),
    "sasl.jaas.config": (
        "it is written from librdkafka's keys, which both clients need",
        "use sasl.mechanism, sasl.username and sasl.password",
    ),
}
"""Properties that Oncely sets: the reason, and the way out."""

JAVA_NAMES: Mapping[str, str] = {
    "ssl.truststore.location": "ssl.ca.location (PEM)",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.truststore.password": "ssl.ca.location (PEM, needs no password)",
    "ssl.truststore.type": "ssl.ca.location (PEM)",
    "ssl.keystore.type": "ssl.keystore.location (PKCS#12)",
    "ssl.keystore.key": "ssl.key.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    **{java: rd for rd, java in RENAMED.items() if java not in SAME},
}
"""The Java client's names, and librdkafka's names that replace them."""

READER_OPTIONS = frozenset(
    {
        "assign",
        "subscribe",
        "subscribepattern",
        "startingoffsets",
        "startingtimestamp",
        "startingoffsetsbytimestamp",
        "startingoffsetsbytimestampstrategy",
        "endingoffsets",
        "endingtimestamp",
        "endingoffsetsbytimestamp",
        "failondataloss",
        "minpartitions",
        "maxrecordsperpartition",
        "maxoffsetspertrigger",
        "minoffsetspertrigger",
        "maxtriggerdelay",
        "includeheaders",
        "groupidprefix",
        "kafkaconsumer.polltimeoutms",
        "fetchoffset.numretries",
        "fetchoffset.retryintervalms",
    }
)
"""Options of Spark's Kafka reader, in lower case: Spark ignores case there."""

READER_REASONS: Mapping[str, str] = {
    "minpartitions": "it gives one range of offsets to two tasks",
    "maxrecordsperpartition": "it gives one range of offsets to two tasks",
    "failondataloss": "lost records would be skipped silently; see source.on_gap",
    "maxoffsetspertrigger": "it is spark.max_records_per_batch",
}

CHOICES: Mapping[str, tuple[str, ...]] = {
    "security.protocol": ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl"),
    "sasl.mechanism": ("plain", "scram-sha-256", "scram-sha-512", "gssapi", "oauthbearer"),
    "ssl.endpoint.identification.algorithm": ("https", "none"),
    "sasl.oauthbearer.method": ("oidc",),
}
"""Allowed values, in lower case."""

ACCEPTED = SAME | RENAMED.keys() | LOCAL | SECURITY | FIXED.keys()
"""Every property that is allowed in ``[source.kafka]``."""

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
