"""The properties of ``[source.kafka]``, which are librdkafka's."""

from __future__ import annotations

from collections.abc import Mapping

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
