"""What all tests share: one broker and one PostgreSQL for the whole run, names of one's own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from confluent_kafka import Producer

from oncely import artifacts
from oncely.clients.sql.session import close_all
from oncely.ledgers.stores.base import OffsetStore
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from tests import class_archives, s3tools, storetools
from tests.sinktools import KINDS, Place, postgres_place, sqlite_place

for _name, _options in class_archives.options().items():  # children inherit them
    os.environ.setdefault(_name, _options)

# Files that take minutes begin first, or one process would end them alone.
_LONGEST = (
    "test_kills_and_restarts.py",
    "test_semantics.py",
    "test_file_store.py",  # it builds a server, once
    "test_write_stream.py",
    "test_files_pipeline_kills.py",
    "test_cluster.py",
    "test_two_drivers.py",
    "test_kafka_pipeline_kills.py",
    "test_secrets_and_encryption.py",
    "test_cli_run.py",
    "test_local_spark_cluster.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Give every test the same start, however the suite was started."""
    # nohup and a shell's & ignore these signals, and children inherit that. A handler that does
    # nothing ignores them here alone. (xdist's workers inherit them, and do this themselves.)
    if not getattr(config.option, "numprocesses", None):
        for number in (signal.SIGHUP, signal.SIGINT):
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
    # Tests are shuffled, but `random` is left alone: processes side by side would draw the same.
    if hasattr(config.option, "randomly_reset_seed"):
        config.option.randomly_reset_seed = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first. pytest-randomly has shuffled files, and the tests of each file.

    The first lines of the output show the seed; ``--randomly-seed=N`` repeats an order, and
    ``-p no:randomly`` runs the tests as they are written.
    """
    place = {name: at for at, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


# `make test` tries the same examples every time: its verdict is about the code. `make long` goes on
# searching, and what it finds becomes a test of its own.
# How long an example takes says nothing on a busy machine.
_PATIENT: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("same", derandomize=True, **_PATIENT)
hypothesis.settings.register_profile("search", max_examples=1_000, **_PATIENT)
hypothesis.settings.load_profile("same")

Record = Sequence[object]  # (partition, key, value[, headers]); bytes, str or None
MakeTopic = Callable[..., str]


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """A plain Kafka broker. Do not stop it: other tests use it. Start your own for that."""
    with Broker() as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A plain PostgreSQL. Do not stop it: other tests use it. Start your own for that."""
    # Without vacuum no space is used again, and a table's rows stand in the order of insertion.
    with Postgres(settings={"autovacuum": "off"}) as running:
        yield running


@pytest.fixture(scope="session")
def redis_server() -> Iterator[storetools.RedisServer]:
    """A plain Redis. Do not stop it: other tests use it. Skips aloud where there is none."""
    with storetools.redis_or_skip() as running:
        yield running


@pytest.fixture(scope="session")
def zookeeper_server() -> Iterator[storetools.ZooKeeperServer]:
    """A plain ZooKeeper. Do not stop it: other tests use it."""
    with storetools.ZooKeeperServer() as running:
        yield running


@pytest.fixture(scope="session")
def s3_server() -> Iterator[s3tools.S3Server]:
    """A plain S3 server. Do not stop it: other tests use it. Skips aloud where there is none."""
    with s3tools.server_or_skip() as running:
        yield running


@pytest.fixture(scope="session")
def spark_jars() -> str:
    """The value of ``spark.jars`` for Spark's Kafka source."""
    return ",".join(str(jar) for jar in artifacts.resolve(artifacts.SPARK_KAFKA))


@pytest.fixture
def topic_name() -> str:
    """A topic name that nobody else uses; the topic is not created."""
    return f"topic-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def database(postgres: Postgres) -> Iterator[str]:
    """The URL of an empty database, dropped after the test with whoever is still connected."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield postgres.create_database(name)
    with contextlib.suppress(Exception):
        postgres.drop_database(name)


@pytest.fixture(scope="session")
def shared_database(postgres: Postgres) -> str:
    """The URL of one database, in which each test that uses a :class:`Place` has a schema."""
    return postgres.create_database("places")


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An empty place on each kind of database."""
    if request.param == "sqlite":
        with sqlite_place() as place:
            yield place
    else:
        yield postgres_place(request.getfixturevalue("shared_database"))
    close_all()


@pytest.fixture
def on_postgres(shared_database: str) -> Iterator[Place]:
    """An empty schema of PostgreSQL."""
    yield postgres_place(shared_database)
    close_all()


@pytest.fixture
def on_sqlite() -> Iterator[Place]:
    """A file of SQLite that is not there yet."""
    with sqlite_place() as place:
        yield place
    close_all()


@pytest.fixture(params=storetools.KINDS)
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[storetools.Shelf]:
    """An empty place for offset stores, of each kind; the stores are closed after the test."""
    empty = storetools.shelf(request.param, request.getfixturevalue, tmp_path)
    made: list[OffsetStore] = []

    def make(pipeline: str) -> OffsetStore:
        made.append(empty.make(pipeline))
        return made[-1]

    yield dataclasses.replace(empty, make=make)
    for store in made:
        store.close()


@pytest.fixture
def make_topic(broker: Broker) -> Iterator[MakeTopic]:
    """Create topics with records in them; they are deleted after the test.

    ``make_topic(partitions=2, records=[(0, b"key", b"value"), ...], name=None, config=None)``
    returns the name. Records of a partition keep their order.
    """
    made: list[str] = []

    def make(
        *,
        partitions: int = 1,
        records: Iterable[Record] = (),
        name: str | None = None,
        config: dict[str, str] | None = None,
    ) -> str:
        topic = broker.create_topic(name or f"topic-{uuid.uuid4().hex[:12]}", partitions, config)
        made.append(topic)
        produce(broker, topic, records)
        return topic

    yield make
    for topic in made:
        with contextlib.suppress(Exception):  # the test may have deleted it
            broker.delete_topic(topic)


def produce(broker: Broker, topic: str, records: Iterable[Record]) -> None:
    """Write records ``(partition, key, value[, headers])`` and wait for every acknowledgement."""
    problems: list[object] = []

    def acknowledged(error: object, _: object) -> None:
        if error is not None:
            problems.append(error)

    producer = Producer(
        {
            **broker.client_config(),
            "enable.idempotence": True,
            "linger.ms": 5,
            "message.max.bytes": 100_000_000,
        }
    )
    for partition, key, value, *headers in records:
        extra = {"headers": headers[0]} if headers else {}
        while True:
            try:
                producer.produce(
                    topic, value, key, partition=partition, on_delivery=acknowledged, **extra
                )
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    left = producer.flush(60)
    assert not left, f"{left} records were not acknowledged"
    assert not problems, problems[:3]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember which children are not ours to account for."""
    session.config.stash[_BEFORE] = {child.pid for child in psutil.Process().children()}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a child process has outlived the tests that started it."""
    before = session.config.stash[_BEFORE]
    children = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    _, left = psutil.wait_procs(children, timeout=10)
    # A Spark JVM belongs to the interpreter: it ends when its standard input does.
    left = [p for p in left if not _spark_gateway(p)]
    if left:
        lines = [f"  {p.pid} {' '.join(_command(p))[:150]}" for p in left]
        print("\nchild processes left behind:\n" + "\n".join(lines))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _spark_gateway(process: psutil.Process) -> bool:
    command = " ".join(_command(process))
    return "org.apache.spark.deploy.SparkSubmit" in command and "pyspark-shell" in command


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


_BEFORE: pytest.StashKey[set[int]] = pytest.StashKey()


def repository() -> Path:
    """Return the top directory of the project."""
    return Path(__file__).resolve().parent.parent
