"""Offset stores whose server is away, denies, or dies: the right error, and no secret in it."""

from __future__ import annotations

import fcntl
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from kazoo.security import make_acl, make_digest_acl

from oncely.core.ranges import TopicPartition
from oncely.errors import ConfigError, Stopped, Unavailable
from oncely.stores.offsets.base import OffsetStore
from oncely.stores.offsets.file import FileStore
from oncely.stores.offsets.kafka import KafkaStore
from oncely.stores.offsets.redis import RedisStore
from oncely.stores.offsets.sql import SqlStore
from oncely.stores.offsets.zookeeper import ZooKeeperStore
from oncely.stores.sql.connection import TableName
from oncely.testing.servers.kafka import Broker, Scram
from oncely.testing.servers.postgres import Postgres
from oncely.testing.servers.process import HOST, ChildServer, free_port
from tests.saver import Saver
from tests.sinktools import Place
from tests.storetools import Numbered, RedisServer, ZooKeeperServer, at, redis_or_skip, redis_url

pytestmark = pytest.mark.servers

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
NUMBERED = Numbered(("t",), 2)
CANARY = "canary-4f1c"


# -- away ----------------------------------------------------------------------------------

NOBODY: dict[str, Callable[[int], OffsetStore]] = {
    "postgresql": lambda port: SqlStore(f"postgresql://u:{CANARY}@{HOST}:{port}/d", "p"),
    "kafka": lambda port: KafkaStore(f"{HOST}:{port}", "g", "p", NUMBERED, timeout=1),
    "redis": lambda port: RedisStore(f"redis://:{CANARY}@{HOST}:{port}/0", "p", timeout=1),
    "zookeeper": lambda port: ZooKeeperStore(f"{HOST}:{port}", "p", timeout=1),
}


@pytest.mark.parametrize("kind", NOBODY)
def test_a_server_that_is_not_there_is_unavailable(kind: str) -> None:
    port = free_port()
    store = NOBODY[kind](port)
    for work in (store.load, lambda: store.save({T0: at(1)})):
        with pytest.raises(Unavailable) as away:
            work()
        assert str(port) in str(away.value), "it says who did not answer"
        assert away.value.way_out
        assert CANARY not in str(away.value)


def _redis(server: Any) -> OffsetStore:
    return RedisStore(redis_url(server), "p", timeout=2)


def _zookeeper(server: Any) -> OffsetStore:
    return ZooKeeperStore(server.address, "p", timeout=3)


def _postgres(server: Any) -> OffsetStore:
    return SqlStore(server.url(), "p")


def _kafka(server: Any) -> OffsetStore:
    if "t" not in server.admin().list_topics(timeout=60).topics:
        server.create_topic("t", 2)
    return KafkaStore(server.bootstrap, "g", "p", NUMBERED, timeout=3)


SERVERS: dict[str, tuple[Callable[[], ChildServer], Callable[[Any], OffsetStore]]] = {
    "redis": (redis_or_skip, _redis),
    "zookeeper": (ZooKeeperServer, _zookeeper),
    "postgresql": (Postgres, _postgres),
    "kafka": (Broker, _kafka),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.long] * (kind == "kafka")) for kind in SERVERS],
)
def test_a_server_that_crashes_keeps_what_was_saved(kind: str) -> None:
    """And the same store goes on when it is back."""
    make_server, make_store = SERVERS[kind]
    with make_server() as server, closing(make_store(server)) as store:
        _once_it_answers(lambda: store.save({T0: at(5), T1: at(6)}))
        server.kill()
        for work in (store.load, lambda: store.save({T0: at(7)})):
            with pytest.raises(Unavailable):
                work()
        server.start()
        assert _once_it_answers(store.load) == {T0: at(5), T1: at(6)}
        store.save({T0: at(8)})
        assert store.load() == {T0: at(8), T1: at(6)}


def _once_it_answers(work: Callable[[], Any]) -> Any:
    """A broker that has just started first has to make or load the topic of groups' offsets."""
    deadline = time.monotonic() + 180
    while True:
        try:
            return work()
        except Unavailable:
            assert time.monotonic() < deadline


# -- denied --------------------------------------------------------------------------------


def refused(store: OffsetStore, key: str, *works: Callable[[], object]) -> None:
    for work in works or (store.load, lambda: store.save({T0: at(1)})):
        with pytest.raises(ConfigError) as error:
            work()
        assert error.value.key == key
        assert error.value.way_out
        assert CANARY not in f"{error.value}{error.value!r}{store!r}{store.where}"


def test_a_wrong_password_of_postgresql(postgres: Postgres) -> None:
    refused(SqlStore(postgres.url(password=CANARY), "p"), "offsets.url")


def test_a_table_that_this_user_may_not_touch(postgres: Postgres, database: str) -> None:
    SqlStore(database, "p").save({T0: at(1)})
    role = f"guest_{database.rpartition('_')[2]}"
    with psycopg.connect(database, autocommit=True) as session:
        session.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{CANARY}'".encode())
    url = postgres.url(database.rpartition("/")[2], role, CANARY)
    refused(SqlStore(url, "p"), "offsets.table")


def test_a_schema_that_is_not_there(database: str) -> None:
    store = SqlStore(database, "p", TableName("nowhere", "positions"))
    assert store.load() == {}
    refused(store, "offsets.table", lambda: store.save({T0: at(1)}))


def test_a_url_of_no_database() -> None:
    with pytest.raises(ConfigError, match=r"offsets\.url"):
        SqlStore(f"mysql://u:{CANARY}@h/d", "p")


def test_sqlite_where_it_can_not_be(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/nowhere/x.db", "p")
    refused(store, "offsets.url", lambda: store.save({T0: at(1)}))
    (tmp_path / "x.db").write_text("no database" * 100)
    refused(SqlStore(f"sqlite:///{tmp_path}/x.db", "p"), "offsets.url")


def test_sqlite_that_another_writer_holds(on_sqlite: Place) -> None:
    store = SqlStore(on_sqlite.url, "p", timeout=0.2)
    store.save({T0: at(1)})
    with closing(on_sqlite.session()) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="locked"):
            store.save({T0: at(2)})
        other.execute("ROLLBACK")
    store.save({T0: at(3)})
    assert store.load() == {T0: at(3)}


def test_files_where_they_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    refused(FileStore(tmp_path / "a-file", "p"), "offsets.path")
    refused(FileStore(tmp_path / "a-file" / "below", "p"), "offsets.path")


@pytest.fixture
def closed_redis() -> Iterator[RedisServer]:
    """Only two users may enter: one of them may not write."""
    with redis_or_skip(
        "user default off", f"user ann on >{CANARY} ~* +@all", f"user bob on >{CANARY} ~* +hgetall"
    ) as server:
        yield server


def test_redis_lets_in_whom_it_knows(closed_redis: RedisServer) -> None:
    store = RedisStore(redis_url(closed_redis, f"ann:{CANARY}@"), "p")
    store.save({T0: at(1)})
    assert store.load() == {T0: at(1)}
    refused(RedisStore(redis_url(closed_redis, f"ann:{CANARY}-wrong@"), "p"), "offsets.url")
    refused(RedisStore(redis_url(closed_redis), "p"), "offsets.url")
    guest = RedisStore(redis_url(closed_redis, f"bob:{CANARY}@"), "p")
    assert guest.load() == {T0: at(1)}
    assert guest.warning() == "", "CONFIG is denied"
    refused(guest, "offsets.url", lambda: guest.save({T0: at(2)}))


def test_redis_without_a_log_warns() -> None:
    with redis_or_skip("appendonly no") as server, closing(_redis(server)) as store:
        assert "appendonly no" in store.warning()
        assert redis_url(server).split("/")[2] in store.warning()


def test_redis_with_something_else_at_the_key(redis_server: RedisServer) -> None:
    store = RedisStore(redis_url(redis_server), "a-text")
    with redis_server.client() as client:
        client.set(store.key, "17")
        for work in (store.load, lambda: store.save({T0: at(1)})):
            with pytest.raises(Stopped, match="it is no hash"):
                work()
        assert client.get(store.key) == b"17"


def test_zookeeper_nodes_of_somebody_else(zookeeper_server: ZooKeeperServer) -> None:
    mine = make_digest_acl("somebody", "else", all=True)
    everyone_reads = make_acl("world", "anyone", read=True)
    with zookeeper_server.client(auth_data=[("digest", "somebody:else")]) as client:
        client.create("/readable", acl=[mine, everyone_reads])
        client.create("/hidden/p", makepath=True, acl=[mine])
    store = ZooKeeperStore(zookeeper_server.address, "p", "/readable")
    assert store.load() == {}
    refused(store, "offsets.path", lambda: store.save({T0: at(1)}))
    refused(ZooKeeperStore(zookeeper_server.address, "p", "/hidden"), "offsets.path")


def test_zookeeper_with_another_node_among_ours(zookeeper_server: ZooKeeperServer) -> None:
    with zookeeper_server.client() as client:
        client.create("/among/p/t/leader", makepath=True)
    with pytest.raises(Stopped, match="t/leader"):
        ZooKeeperStore(zookeeper_server.address, "p", "/among").load()


def test_kafka_lets_in_whom_it_knows() -> None:
    """A password, and a group that this user may not touch."""
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:ann",
    }
    scram = Scram({"ann": CANARY, "bob": CANARY})
    with Broker(security=scram, properties=properties) as broker:
        broker.create_topic("t", 2)

        def store(user: str, **more: str) -> KafkaStore:
            config = broker.client_config(user) | more
            brokers = config.pop("bootstrap.servers")
            return KafkaStore(brokers, "g", "p", NUMBERED, config, timeout=3)

        with closing(store("ann")) as known:
            _once_it_answers(lambda: known.save({T0: at(1)}))
            assert known.load() == {T0: at(1)}
        with closing(store("ann", **{"sasl.password": f"{CANARY}-wrong"})) as wrong:
            refused(wrong, "source.kafka")
        with closing(store("bob")) as guest:
            refused(guest, "offsets.group")


# -- Kafka's own ---------------------------------------------------------------------------


def test_a_group_with_members_is_not_taken(broker: Broker, topic_name: str) -> None:
    """Committed from outside, offsets would be taken from under a running program."""
    import confluent_kafka as ck

    broker.create_topic(topic_name, 1)
    group = {"group.id": topic_name, "enable.auto.commit": False}
    member = ck.Consumer({**broker.client_config(), **group, "auto.offset.reset": "earliest"})
    try:
        member.subscribe([topic_name])
        deadline = time.monotonic() + 180
        while not member.assignment():
            member.poll(0.1)
            assert time.monotonic() < deadline
        tp = TopicPartition(topic_name, 0)
        with closing(KafkaStore(broker.bootstrap, topic_name, "p", lambda: [tp])) as store:
            refused(store, "offsets.group", lambda: store.save({tp: at(1)}))
    finally:
        member.close()
        broker.delete_topic(topic_name)


def test_a_group_of_another_pipeline_is_not_taken(broker: Broker, topic_name: str) -> None:
    broker.create_topic(topic_name, 1)
    tp = TopicPartition(topic_name, 0)
    with closing(KafkaStore(broker.bootstrap, topic_name, "p", lambda: [tp])) as ours:
        ours.save({tp: at(1)})
        with closing(KafkaStore(broker.bootstrap, topic_name, "q", lambda: [tp])) as theirs:
            refused(theirs, "offsets.group", theirs.load)
        assert ours.load() == {tp: at(1)}
    broker.delete_topic(topic_name)


# -- files ---------------------------------------------------------------------------------


def test_a_lock_that_is_held_too_long_is_unavailable(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "p", timeout=0.05)
    store.save({T0: at(1)})
    with (tmp_path / "p.json.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match=r"p\.json.*held its lock"):
            store.save({T0: at(2)})
        assert store.load() == {T0: at(1)}, "who reads waits for nobody"
    store.save({T0: at(2)})
    assert store.load() == {T0: at(2)}


def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    """And what was reported as saved is there, in all kills."""
    store = FileStore(tmp_path, "p")
    others = {TopicPartition("u", n): at(n) for n in range(500)}
    store.save(others)
    chance = random.Random(17)
    writers = [Saver(store, T0, first=round * 10**6, times=10**6) for round in range(8)]
    for writer in writers:
        writer.ready()
        writer.go()
        said = [writer.saved()]
        time.sleep(chance.uniform(0, 0.03))  # a random moment is the point
        said += writer.kill()
        found = store.load()
        assert {tp: one for tp, one in found.items() if tp != T0} == others
        assert found[T0].position in (said[-1], said[-1] + 1), "the last one said, or one more"
    left = {file.name for file in tmp_path.iterdir()}
    assert left <= {"p.json", "p.json.lock", "p.json.new"}
    store.save({T0: at(1)})
    assert store.load() == {**others, T0: at(1)}
    assert not (tmp_path / "p.json.new").exists()


def test_a_file_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    FileStore(tmp_path, "p").save({T0: at(1)})
    (tmp_path / "p.json").rename(tmp_path / "q.json")
    with pytest.raises(Stopped, match="belongs to 'p'"):
        FileStore(tmp_path, "q").load()


def test_a_file_can_be_read_by_a_person(tmp_path: Path) -> None:
    FileStore(tmp_path, "p").save({T0: at(17)})
    assert (
        (tmp_path / "p.json").read_text()
        == """{
  "written_by": "oncely",
  "pipeline": "p",
  "positions": {
    "t": {
      "0": {
        "position": 17,
        "epoch": 1,
        "cluster_id": "cluster-1",
        "topic_id": "id-of-t"
      }
    }
  }
}
"""
    )
