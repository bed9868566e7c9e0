"""``[offsets]``: each store's keys, what is refused, and nothing secret shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from oncely.config import OffsetsSettings, RedisOffsets, SqlOffsets
from oncely.config.base import Section
from oncely.config.problems import explain
from oncely.errors import ConfigError
from oncely.kafka.source import KafkaSource
from oncely.pipeline.stored_destination import store_of
from oncely.stores.offsets.file import FileStore
from oncely.stores.offsets.kafka import KafkaStore
from oncely.stores.offsets.redis import RedisStore
from oncely.stores.offsets.sql import SqlStore
from oncely.stores.offsets.zookeeper import ZooKeeperStore

SOURCE = KafkaSource("broker:9092", ["t"])
_ADAPTER: TypeAdapter[OffsetsSettings] = TypeAdapter(OffsetsSettings)


def settings(**raw: Any) -> OffsetsSettings:
    return _ADAPTER.validate_python(raw, context={"base": Path("/pipelines")})


def problem(**raw: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        settings(**raw)
    [error] = refused.value.errors()
    below = [p.below for p in error.get("ctx", {}).get("problems", ())]
    return f"{'.'.join([*map(str, error['loc']), *filter(None, below)])}: {error['msg']}"


def test_the_ledger_needs_no_store() -> None:
    assert store_of(settings(store="ledger"), "p", SOURCE) is None


def test_a_store_is_made_of_each_kind() -> None:
    def made(**raw: Any) -> Any:
        return store_of(settings(**raw), "p", SOURCE)

    kafka = made(store="kafka")
    assert isinstance(kafka, KafkaStore)
    assert (kafka.brokers, kafka.group) == ("broker:9092", "oncely-p")
    assert made(store="kafka", group="mine").group == "mine"
    file = made(store="file", path="positions")
    assert isinstance(file, FileStore)
    assert file.file == Path("/pipelines/positions/p.json"), "beside the pipeline file"
    sql = made(store="sql", url="postgresql://pat:secret@db/x", table="ops.positions")
    assert isinstance(sql, SqlStore)
    assert sql.where == "db:5432/x, table ops.positions"
    redis = made(store="redis", url="redis://:secret@cache:6379/3")
    assert isinstance(redis, RedisStore)
    assert redis.where == "Redis cache:6379/3, key oncely:offsets:p"
    zookeeper = made(store="zookeeper", hosts="a:2181, b:2181", path="/x/y")
    assert isinstance(zookeeper, ZooKeeperStore)
    assert zookeeper.where == "ZooKeeper a:2181,b:2181, path /x/y/p"


def test_the_sql_store_is_not_the_ledgers_table() -> None:
    one = settings(store="sql", url="sqlite:////x.db")
    assert isinstance(one, SqlOffsets)
    assert one.table.name == "oncely_offsets"


def test_some_stores_are_for_one_machine() -> None:
    assert settings(store="file", path="x").one_machine
    assert settings(store="sql", url="sqlite:////x.db").one_machine
    assert settings(store="redis", url="unix:///run/redis.sock").one_machine
    assert not settings(store="sql", url="postgresql://h/d").one_machine
    assert not settings(store="redis", url="redis://h").one_machine


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "store"),
        ({"store": "etcd"}, "etcd"),
        ({"store": "file"}, "file.path: Field required"),
        ({"store": "file", "path": "x", "url": "y"}, "file.url: Extra inputs"),
        ({"store": "file", "path": "/etc/passwd"}, "is a file"),
        ({"store": "kafka", "group": " "}, "is empty"),
        ({"store": "sql", "url": "mysql://h/d"}, "sql.url: not a URL of a database"),
        ({"store": "sql", "url": "sqlite:////x", "table": "a.b"}, "sql.table: SQLite has no"),
        ({"store": "redis", "url": "http://h"}, "redis.url: not a URL of Redis"),
        ({"store": "redis", "url": "redis://"}, "redis.url: not a URL of Redis"),
        ({"store": "redis", "url": "redis://h/db"}, "redis.url: not a URL of Redis"),
        ({"store": "redis", "url": "redis://u:p@ss@h"}, "redis.url: not a URL of Redis"),
        ({"store": "zookeeper", "hosts": "a"}, "zookeeper.hosts: found 'a'"),
        ({"store": "zookeeper", "hosts": "a:2181/x"}, "zookeeper.hosts: found 'a:2181/x'"),
        ({"store": "zookeeper", "hosts": "a:1", "path": "x"}, "zookeeper.path: found 'x'"),
        ({"store": "zookeeper", "hosts": "a:1", "path": "/x/"}, "zookeeper.path: found"),
        ({"store": "zookeeper", "hosts": "a:1", "path": "/x/../y"}, "zookeeper.path: found"),
        ({"store": "zookeeper", "hosts": "a:1", "path": "/zookeeper"}, "zookeeper.path: found"),
    ],
)
def test_what_can_not_work_is_refused(raw: dict[str, Any], said: str) -> None:
    assert said in problem(**raw)


class File(Section):
    """A file that has the section."""

    offsets: OffsetsSettings


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, "offsets.store: is missing\n  way out: add store ="),
        ({"store": "etcd"}, "offsets.store: found 'etcd'; allowed: ledger, kafka, file, sql"),
        ({"store": "file"}, "offsets.path: is missing\n  way out: add path"),
        ({"store": "redis"}, "offsets.url: is missing"),
        ({"store": "redis", "url": 6379}, "offsets.url: found a number; allowed: a text"),
        ({"store": "redis", "url": "http://h"}, "offsets.url: not a URL of Redis"),
        ({"store": "kafka", "groop": "x"}, "offsets.groop: unknown key; allowed here: group"),
        ({"store": "kafka", "hosts": "x"}, 'it belongs to store = "zookeeper"'),
    ],
)
def test_a_problem_names_its_key_and_the_way_out(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        File.model_validate({"offsets": raw})
    [error] = explain(refused.value, {"offsets": raw})
    assert said in str(error)


@pytest.mark.parametrize(
    ("store", "url"),
    [
        ("redis", "redis://pat:canary-17@cache:6379/0"),
        ("redis", "rediss://cache:6379/0?password=canary-17"),
        ("sql", "postgresql://pat:canary-17@db/x"),
    ],
)
def test_a_password_is_shown_nowhere(store: str, url: str) -> None:
    one = settings(store=store, url=url)
    assert isinstance(one, SqlOffsets | RedisOffsets)
    assert "canary-17" in one.url.get_secret_value()
    made = store_of(one, "p", SOURCE)
    assert made is not None
    texts = [repr(one), str(one), one.model_dump_json()]
    texts += [json.dumps(one.model_dump(mode="json")), repr(made), made.where]
    assert not [text for text in texts if "canary-17" in text]


@pytest.mark.parametrize(
    ("package", "raw"),
    [
        ("redis", {"store": "redis", "url": "redis://h"}),
        ("kazoo", {"store": "zookeeper", "hosts": "h:2181"}),
    ],
)
def test_a_missing_client_is_named_with_its_extra(
    package: str, raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"offsets.store: .* package {package}") as refused:
        store_of(settings(**raw), "p", SOURCE)
    assert refused.value.way_out == f"pip install 'oncely[{raw['store']}]'"
