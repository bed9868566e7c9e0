"""What all tests share: one broker and one PostgreSQL for the whole run; names are their own."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import hypothesis
import psutil
import psycopg
import pytest
from confluent_kafka import Producer

from oncely import artifacts
from oncely.runtimes.spark import session
from oncely.stores.offsets.base import OffsetStore
from oncely.stores.sql.connection import close_all
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from oncely.testing.servers.process import ChildServer
from tests import class_archives, durations, s3tools, sharing, storetools
from tests.nativetools import need_native
from tests.sinktools import KINDS, Place, postgres_place, sqlite_place

for _name, _options in class_archives.options().items():  # children inherit them
    os.environ.setdefault(_name, _options)

# Files that take minutes begin first, or one process would end them alone.
_LONGEST = (
    "test_semantics.py",
    "test_cluster.py",
    "test_kills_and_restarts.py",
    "test_audit_pairs.py",
    "test_cli_run.py",
    "test_write_stream.py",
    "test_audit_by_identity.py",
    "test_audit.py",
    "test_file_store.py",  # it builds a server, once
    "test_files_pipeline_kills.py",
    "test_kafka_pipeline_kills.py",
    "test_secrets_and_encryption.py",
    "test_two_drivers.py",
    "test_readers_agree.py",
    "test_repair_live.py",
    "test_kafka_lost_frames.py",
    "test_kafka_broker.py",
    "test_local_kafka.py",
    "test_worker_outages.py",
    "test_worker_memory.py",
    "test_worker_group.py",
    "test_standby.py",
    "test_tortured_handlers.py",
    "test_wheel.py",
    "test_isolate_crashes.py",
    "test_cli_repair.py",
    "test_cli_rejects.py",
    "test_every_ledger.py",
    "test_partial_takeovers.py",
    "test_sink_half_takeovers.py",
    "test_files_readers.py",
)


# Files of long tests that share no fixture of the module: their tests are spread over processes.
_SPREAD = frozenset(
    {
        "test_semantics.py",
        "test_cli_repair.py",
        "test_cli_rejects.py",
        "test_cli_run.py",
        "test_files_pipeline_kills.py",
        "test_kafka_pipeline_drivers.py",
        "test_kafka_pipeline_kills.py",
        "test_kills_and_restarts.py",
        "test_readers_agree.py",
        "test_standby.py",
        "test_two_drivers.py",
        "test_worker_group.py",
        "test_worker_memory.py",
        "test_worker_outages.py",
        "test_commit_crash_points.py",
        "test_delta_crash_points.py",
        "test_files_crash_points.py",
        "test_kafka_batch_crash_points.py",
        "test_kafka_crash_points.py",
        "test_kafka_reset_crash_points.py",
        "test_opening_crash_points.py",
    }
)

_ON_SPARK = ("@spark", "@spark-long")

_NEEDS_A_SERVER = frozenset(
    {
        "shared_server",
        "own_server",
        "broker",
        "postgres",
        "redis_server",
        "zookeeper_server",
        "s3_server",
        "runtime",
        "spark",
    }
)
_SERVER_KINDS = {"postgresql", "kafka", "redis", "zookeeper", "files", "s3", "whole bucket"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the suite adds to pytest's options."""
    parser.addoption(
        "--no-servers", action="store_true", help="only tests that need no server: `make quick`"
    )
    parser.addoption(
        "--runtime",
        choices=["processes", "spark"],
        default="processes",
        help="where runs of tests that are marked `both` have their tasks: `make proof`: Spark",
    )
    parser.addoption(
        "--record-durations", action="store_true", help=f"write {durations.RECORD.name} anew"
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
    config.stash[_KEEPER] = sharing.Keeper(SHARED)
    config.pluginmanager.register(durations.Recorder(config), "durations")
    if config.getoption("--no-servers"):
        ChildServer.start = _refuse_a_server  # type: ignore[method-assign]


def _refuse_a_server(_: object) -> NoReturn:
    raise AssertionError("this test starts a server of its own: mark it `servers`")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist's workers ask this process for the servers that they share."""
    node.workerinput["servers"] = node.config.stash[_KEEPER].listen()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process runs a file at a time; of :data:`_SPREAD` a test at a time. One process runs all
    tests on Spark, and another one those that are long: a Spark that has just been started needs
    several times as long for a job.

    A process runs a test when it knows the next one, or that there is none. xdist gives the
    successor of a crashed process one unit; if this is one test, both wait for ever.
    """
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.endswith(_ON_SPARK):
                return nodeid.rpartition("@")[2]
            file = super()._split_scope(nodeid)
            return nodeid if Path(file).name in _SPREAD else file

        def _reschedule(self, node: Any) -> None:
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """With ``--runtime spark`` tests that are marked `both` have the fixture `spark`."""
    if item.config.getoption("--runtime") == "spark" and item.get_closest_marker("both"):
        item.fixturenames = ["spark", *item.fixturenames]  # type: ignore[attr-defined]


def _is_on_spark(item: pytest.Item) -> bool:
    return "spark" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on Spark first, then the longest files. pytest-randomly has shuffled files, and the
    tests of each file.

    The first lines of the output show the seed; ``--randomly-seed=N`` repeats an order, and
    ``-p no:randomly`` runs the tests as they are written.
    """
    place = {name: at for at, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: (not _is_on_spark(item), place.get(item.path.name, len(place))))
    if config.getoption("--no-servers"):
        left_out = [item for item in items if _needs_a_server(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _needs_a_server(item)]


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[None]:
    """The names that xdist's workers send to the scheduler tell which tests are on Spark.

    Tests and modules live to the end: full collections of garbage would traverse them all.
    """
    items = session.items
    if hasattr(session.config, "workerinput"):
        session.items = [SimpleNamespace(nodeid=_sent(one)) for one in items]  # type: ignore[misc]
    yield
    session.items = items
    gc.freeze()


def _sent(item: pytest.Item) -> str:
    is_long = item.get_closest_marker("long") is not None
    return item.nodeid + (_ON_SPARK[is_long] if _is_on_spark(item) else "")


def _needs_a_server(item: pytest.Item) -> bool:
    """By its fixtures, and by the kind of store that a parameter names."""
    if item.get_closest_marker("servers"):
        return True
    fixtures = {*item.fixturenames}
    params = getattr(getattr(item, "callspec", None), "params", {}).values()
    asked = "request" in fixtures and any(
        one.removesuffix("-member") in _SERVER_KINDS for one in params if type(one) is str
    )
    return asked or bool(_NEEDS_A_SERVER & fixtures)


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


def examples(usual: int) -> int:
    """The number of examples where one is costly: so many, but all when examples are searched."""
    wanted = hypothesis.settings.default.max_examples
    return wanted if wanted > 100 else usual


Record = Sequence[object]  # (partition, key, value[, headers]); bytes, str or None
MakeTopic = Callable[..., str]


SHARED: sharing.Makers = {
    # Many records have timestamps of years ago; by default the broker removes them after a while.
    # It is never killed; on a busy machine its heartbeats can be late by more than the two seconds
    # of brokers that are, and a fenced broker creates no topics.
    "broker": partial(
        Broker, properties={"log.retention.ms": "-1", "broker.session.timeout.ms": "30000"}
    ),
    # Without vacuum no space is used again, and a table's rows stand in the order of insertion.
    # Without fsync databases come and go in milliseconds; processes die here, not machines.
    # Test processes, their Spark workers and killed children keep sessions at the same time.
    "postgres": partial(
        Postgres,
        settings={
            "autovacuum": "off",
            "fsync": "off",
            "full_page_writes": "off",
            "wal_level": "minimal",
            "max_wal_senders": "0",
            "max_connections": "300",
        },
    ),
}


@pytest.fixture(params=["columns", "messages"])
def taken_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Readers take records as columns, by oncely-native, or as messages, without it."""
    if request.param == "columns":
        need_native(monkeypatch)
    else:
        monkeypatch.setenv("ONCELY_NATIVE", "off")
    return str(request.param)


@pytest.fixture(scope="session")
def shared_server(pytestconfig: pytest.Config) -> Callable[[str], Any]:
    """A server of the whole run, by its name in :data:`SHARED`."""
    worker = getattr(pytestconfig, "workerinput", None)
    if worker is not None:
        return partial(sharing.ask, worker["servers"])
    return pytestconfig.stash[_KEEPER].server


@pytest.fixture(scope="session")
def broker(shared_server: Callable[[str], Any]) -> Broker:
    """The run's Kafka broker; other processes use it, too. Start your own to stop one."""
    running: Broker = shared_server("broker")
    return running


@pytest.fixture(scope="session")
def postgres(shared_server: Callable[[str], Any]) -> Postgres:
    """The run's PostgreSQL; other processes use it, too. Start your own to stop one."""
    running: Postgres = shared_server("postgres")
    return running


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
    return ",".join(str(jar) for jar in artifacts.resolve(artifacts.spark_jars().kafka))


@pytest.fixture(scope="session")
def spark(spark_jars: str) -> Iterator[object]:
    """A Spark session that lives as long as the tests do."""
    drivers = ",".join(map(str, artifacts.resolve(artifacts.POSTGRES_JDBC)))
    # The connector is for `write_stream`, and for comparisons with Spark's own reader.
    conf = {
        "spark.driver.memory": "1g",
        "spark.jars": f"{spark_jars},{drivers}",
        "spark.sql.shuffle.partitions": "2",
    }
    running = session.start("tests", "local[2,4]", conf)
    yield running
    gateway = running.sparkContext._gateway
    running.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends with its standard input
    gateway.proc.wait(180)


@pytest.fixture
def topic_name() -> str:
    """A topic name that nobody else uses; the topic is not created."""
    return f"topic-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def database(postgres: Postgres) -> Iterator[str]:
    """The URL of an empty database, dropped after the test with whoever is still connected."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres.url(), autocommit=True) as session:
        # By default the template's pages go through the log, which takes six times as long.
        session.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY".encode())
    yield postgres.url(name)
    with contextlib.suppress(Exception):
        postgres.drop_database(name)


@pytest.fixture(scope="session")
def shared_database(postgres: Postgres) -> str:
    """The URL of one database, in which each test that uses a :class:`Place` has a schema."""
    return postgres.create_database(f"places_{uuid.uuid4().hex[:12]}")


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
    if not (records := list(records)):
        return
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
    left = producer.flush(180)
    assert not left, f"{left} records were not acknowledged"
    assert not problems, problems[:3]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember which children are not ours to account for."""
    session.config.stash[_BEFORE] = {child.pid for child in psutil.Process().children()}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a child process has outlived the tests that started it."""
    session.config.stash[_KEEPER].close()
    before = session.config.stash[_BEFORE]
    children = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    _, left = psutil.wait_procs([p for p in children if not _of_this_process(p)], timeout=25)
    if left:
        lines = [f"  {p.pid} {' '.join(_command(p))[:150]}" for p in left]
        print("\nchild processes left behind:\n" + "\n".join(lines))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _of_this_process(process: psutil.Process) -> bool:
    """True for a JVM of Spark and for servers of multiprocessing: each ends when a pipe from this
    process does. A process that such a server has forked has its command, and another parent."""
    command = " ".join(_command(process))
    if "org.apache.spark.deploy.SparkSubmit" in command and "pyspark-shell" in command:
        return True
    with contextlib.suppress(psutil.NoSuchProcess):
        server = re.search(r"multiprocessing\.(forkserver|resource_tracker)", command) is not None
        return server and process.ppid() == os.getpid()
    return True


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


_BEFORE: pytest.StashKey[set[int]] = pytest.StashKey()
_KEEPER: pytest.StashKey[sharing.Keeper] = pytest.StashKey()


def repository() -> Path:
    """Return the top directory of the project."""
    return Path(__file__).resolve().parent.parent
