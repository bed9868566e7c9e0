"""The configuration of a single Kafka node: small, fast, and explicit."""

from __future__ import annotations

import secrets as random_secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oncely.testing.servers.certificates import Certificates

MECHANISM = "SCRAM-SHA-512"

LOG4J = """\
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = INFO
rootLogger.appenderRef.out.ref = out
logger.config.name = org.apache.kafka.common.config.AbstractConfig
logger.config.level = WARN
"""

_SMALL: Mapping[str, str] = {
    # One node holds the only replica of every partition, and two cores do all the work.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.min.heartbeat.interval.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "1000",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "log.cleaner.dedupe.buffer.size": "8388608",
    # A missing topic must be reported as missing, not created implicitly.
    "auto.create.topics.enable": "false",
    # A broker that was killed may register again only after its old session has expired (9 s by
    # default).
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
}


@dataclass(frozen=True)
class Scram:
    """Clients reach the broker by SASL_SSL with SCRAM-SHA-512 (RFC 5802, KIP-84) only.

    Attributes:
        users: name to password; one user ``oncely`` with a random password by default.
        client_certificates: also require a certificate of the client (mutual TLS).
    """

    users: Mapping[str, str] = field(
        default_factory=lambda: {"oncely": random_secrets.token_urlsafe(18)}, repr=False
    )
    client_certificates: bool = False


def server_properties(
    *, clients: str, inner: str, controller: str, data: Path, secured: bool
) -> dict[str, str]:
    """Return the lines of ``server.properties`` for one node with three listeners.

    Args:
        clients: ``host:port`` of the listener for clients.
        inner: ``host:port`` of a plaintext listener for the node itself and for admin requests.
        controller: ``host:port`` of the controller's listener.
        data: directory of the log segments.
        secured: the clients' listener speaks SASL_SSL.
    """
    protocol = "SASL_SSL" if secured else "PLAINTEXT"
    reachable = f"CLIENTS://{clients},INNER://{inner}"
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{controller}",
        "listeners": f"{reachable},CONTROLLER://{controller}",
        "advertised.listeners": reachable,
        "listener.security.protocol.map": (
            f"CLIENTS:{protocol},INNER:PLAINTEXT,CONTROLLER:PLAINTEXT"
        ),
        "inter.broker.listener.name": "INNER",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(data),
        **_SMALL,
    }


def security_properties(security: Scram, made: Certificates) -> dict[str, str]:
    """Return the additional lines for a SASL_SSL listener with PEM files (KIP-651)."""
    chain = made.server.with_name("keystore.pem")  # Kafka requires key and chain in one file
    chain.touch(mode=0o600)
    chain.write_bytes(made.server_key.read_bytes() + made.server.read_bytes())
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    prefix = "listener.name.clients."
    return {
        f"{prefix}sasl.enabled.mechanisms": MECHANISM,
        f"{prefix}{MECHANISM.lower()}.sasl.jaas.config": f"{module} required;",
        f"{prefix}ssl.keystore.type": "PEM",
        f"{prefix}ssl.keystore.location": str(chain),
        f"{prefix}ssl.truststore.type": "PEM",
        f"{prefix}ssl.truststore.location": str(made.ca),
        f"{prefix}ssl.client.auth": "required" if security.client_certificates else "none",
    }
