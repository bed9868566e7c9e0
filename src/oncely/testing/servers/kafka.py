"""A real Kafka: one KRaft node that is broker and controller (KIP-500, KIP-833).

Its configuration is small, fast, and explicit.
"""

from __future__ import annotations

import base64
import os
import secrets as random_secrets
import shlex
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oncely import artifacts
from oncely.errors import Unavailable, WrongInput
from oncely.secrets import Secrets
from oncely.testing.servers.certificates import Certificates, make_certificates
from oncely.testing.servers.process import HOST, ChildServer, Process, free_port, wait_until

if TYPE_CHECKING:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

_START = 60.0
_ADMIN = 60.0
_CONNECT = 5.0
_ITERATIONS = 4096

__all__ = ["Broker", "Scram"]


class Broker(ChildServer):
    """One Kafka node on 127.0.0.1 with a directory of its own.

    Args:
        directory: kept after :meth:`stop`; by default a temporary directory that :meth:`close`
            deletes.
        properties: more lines of ``server.properties``, which override the generated ones.
        security: the authentication of :attr:`bootstrap`; plaintext for all by default.
        heap: the heap of the JVM, for ``-Xmx``.
        port: the port of the clients' listener; a free port by default.
    """

    name = "the Kafka broker"

    def __init__(
        self,
        directory: Path | None = None,
        *,
        properties: Mapping[str, str] | None = None,
        security: Scram | None = None,
        heap: str = "512m",
        port: int | None = None,
    ) -> None:
        place = (directory or Path(tempfile.mkdtemp(prefix="oncely-kafka-"))).absolute()
        place.mkdir(parents=True, exist_ok=True)
        super().__init__(place, temporary=directory is None)
        self.security = security
        self.port = port or free_port()
        self._inner_port, self._controller_port = free_port(), free_port()
        self._heap = heap
        self._properties = dict(properties or {})
        self._certificates: Certificates | None = None
        self._admins: dict[
            int, tuple[object, AdminClient]
        ] = {}  # by pid: no client survives fork()
        if security:
            self._secrets = Secrets.of(security.users.values())
            self._certificates = make_certificates(self.directory / "tls")

    @property
    def bootstrap(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.port}"

    @property
    def ca_file(self) -> Path:
        """The authority that signed the broker's certificate.

        Raises:
            WrongInput: the broker has no ``security``.
        """
        if self._certificates is None:
            raise WrongInput("this Kafka broker speaks plaintext", way_out="pass security=Scram()")
        return self._certificates.ca

    def client_config(self, user: str | None = None) -> dict[str, str]:
        """Return the properties of a client, with librdkafka's names; for the first user by
        default."""
        config = {"bootstrap.servers": self.bootstrap}
        if self.security is None or self._certificates is None:
            return config
        user = user or next(iter(self.security.users))
        config |= {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": MECHANISM,
            "sasl.username": user,
            "sasl.password": self.security.users[user],
            "ssl.ca.location": str(self._certificates.ca),
        }
        if self.security.client_certificates:
            config["ssl.certificate.location"] = str(self._certificates.client)
            config["ssl.key.location"] = str(self._certificates.client_key)
        return config

    def stop(self, timeout: float = 30.0) -> None:
        """Stop the broker; SIGKILL after ``timeout`` seconds. Data and port are kept."""
        if self._process is not None:
            self._process.stop(timeout=timeout)

    def admin(self) -> AdminClient:
        """Return an admin client with all rights; it uses an internal listener.

        A process has one for each start of the broker. Safe for several threads.
        """
        start, client = self._admins.get(os.getpid(), (None, None))
        if client is None or start is not self._process:
            client = self._connect()
            self._admins[os.getpid()] = self._process, client
        return client

    def _connect(self) -> AdminClient:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        client = AdminClient({"bootstrap.servers": self._inner, "log_level": 2})
        # Other requests can be lost, and cost seconds, while the first connection is replaced;
        # see oncely.kafka.client.
        with suppress(KafkaException):
            client.describe_cluster(request_timeout=_CONNECT).result()
        return client

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> str:
        """Create a topic, wait until its partitions answer requests, and return its name."""
        from confluent_kafka.admin import NewTopic

        admin = self.admin()
        topic = NewTopic(name, partitions, 1, config=dict(config or {}))
        admin.create_topics([topic], operation_timeout=_ADMIN)[name].result(_ADMIN)
        self._await_partitions(admin, name, partitions)
        return name

    def ensure_topic(self, name: str, partitions: int = 1) -> str:
        """Create a topic if it does not exist, and return its name."""
        from confluent_kafka import KafkaError, KafkaException

        try:
            return self.create_topic(name, partitions)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            self._await_partitions(self.admin(), name, partitions)
            return name

    def delete_topic(self, name: str) -> None:
        """Delete a topic and wait until the broker has deleted it."""
        from confluent_kafka import KafkaError

        admin = self.admin()
        admin.delete_topics([name], operation_timeout=_ADMIN)[name].result(_ADMIN)

        def deleted() -> bool:
            error = admin.list_topics(name, timeout=_ADMIN).topics[name].error
            return error is not None and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART

        self._await(deleted, "it is deleted")

    def add_partitions(self, name: str, total: int) -> None:
        """Raise the number of partitions to ``total`` and wait until the broker has them."""
        from confluent_kafka.admin import NewPartitions

        admin = self.admin()
        wanted = [NewPartitions(name, total)]
        admin.create_partitions(wanted, operation_timeout=_ADMIN)[name].result(_ADMIN)
        self._await_partitions(admin, name, total)

    def delete_records(self, name: str, before: Mapping[int, int]) -> None:
        """Delete a topic's records before an offset: partition to the first offset that is kept."""
        from confluent_kafka import TopicPartition

        wanted = [TopicPartition(name, partition, offset) for partition, offset in before.items()]
        admin = self.admin()
        for done in admin.delete_records(wanted, operation_timeout=_ADMIN).values():
            done.result(_ADMIN)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_admins": {}}

    @property
    def _inner(self) -> str:
        return f"{HOST}:{self._inner_port}"

    def _settings(self) -> dict[str, str]:
        settings = server_properties(
            clients=self.bootstrap,
            inner=self._inner,
            controller=f"{HOST}:{self._controller_port}",
            data=self.directory / "data",
            secured=self.security is not None,
        )
        if self.security and self._certificates:
            settings |= security_properties(self.security, self._certificates)
        return settings | self._properties

    def _launch(self) -> Process:
        classpath = os.pathsep.join(str(jar) for jar in artifacts.resolve(artifacts.KAFKA_BROKER))
        config = self.directory / "server.properties"
        settings = self._settings()
        config.touch(mode=0o600)
        config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        log4j = self.directory / "log4j2.properties"
        log4j.write_text(LOG4J)
        java = [
            artifacts.java(),
            *shlex.split(os.environ.get("ONCELY_KAFKA_OPTS", "")),  # the JVM's own options
            f"-Dlog4j2.configurationFile={log4j.as_uri()}",
            "-cp",
            classpath,
        ]
        self._format(java, config)
        return Process(
            self.name,
            [java[0], f"-Xmx{self._heap}", *java[1:], "kafka.Kafka", str(config)],
            directory=self.directory,
            log=self.directory / "kafka.log",
            remove=self._delete_after,
        )

    def _format(self, java: list[str], config: Path) -> None:
        """Format the storage with a cluster id, once."""
        if (self.directory / "data" / "meta.properties").exists():
            return
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # An id must not begin with a dash: the tool would parse it as an option.
        quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        tool = ["kafka.tools.StorageTool", "format", "-t", f"o{cluster[1:]}", "-c", str(config)]
        command = [java[0], *quick, *java[1:], *tool]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"formatting Kafka's storage failed: {done.stdout}{done.stderr}")

    def _await_ready(self, process: Process) -> None:
        configs = [{"bootstrap.servers": self._inner}, self.client_config()]
        if self.security:
            self._await_login(process, configs[0])
            self._add_users(self.security.users)
            # A new user is available shortly after the response: it goes through the metadata log.
            configs = [self.client_config(user) for user in self.security.users]
        for config in configs:
            self._await_login(process, config)

    @staticmethod
    def _await_login(process: Process, config: Mapping[str, str]) -> None:
        what = f"it answered {config.get('sasl.username', 'a client')}"
        wait_until(lambda: _answers(config), process=process, timeout=_START, what=what)

    def _add_users(self, users: Mapping[str, str]) -> None:
        """Store the users by an admin request: the format tool accepts passwords as arguments only.

        Arguments are visible to all users of the machine while the tool runs.
        """
        from confluent_kafka import admin

        how = admin.ScramCredentialInfo(admin.ScramMechanism.SCRAM_SHA_512, _ITERATIONS)
        wanted = [
            admin.UserScramCredentialUpsertion(name, how, password.encode())
            for name, password in users.items()
        ]
        client = self.admin()  # a variable: its futures die with the client
        for done in client.alter_user_scram_credentials(wanted).values():
            done.result(_ADMIN)

    def _await_partitions(self, admin: AdminClient, name: str, partitions: int) -> None:
        from confluent_kafka import KafkaException, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        def ready() -> bool:
            topic = admin.list_topics(name, timeout=_ADMIN).topics[name]
            leaders: Iterable[int] = (p.leader for p in topic.partitions.values())
            if len(topic.partitions) != partitions or any(n < 0 for n in leaders):
                return False
            # A broker tells of a leader a moment before that leader answers.
            wanted = {TopicPartition(name, n): OffsetSpec.latest() for n in topic.partitions}
            try:
                for answer in admin.list_offsets(wanted, request_timeout=_ADMIN).values():
                    answer.result(_ADMIN)
            except KafkaException:
                return False
            return True

        self._await(ready, f"the partitions of {name} answer")

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, process=self._started(), timeout=_ADMIN, what=what)


def _answers(config: Mapping[str, str]) -> bool:
    """Request the cluster's metadata once, with a separate client."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    quiet = {"log_level": "0", "socket.connection.setup.timeout.ms": "1000"}
    client = AdminClient({**config, **quiet, "error_cb": _ignore})
    try:
        return bool(client.list_topics(timeout=1).brokers)
    except KafkaException:
        return False


def _ignore(_: KafkaException) -> None:
    """Ignore errors: the broker is not up yet, and the caller waits for that."""


# -- configuration --------------------------------------------------------------------------

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
