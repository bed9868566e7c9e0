"""What a run refuses, `plan` refuses before: both make one list of checks."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)
from deltalake import DeltaTable

from oncely.config import parse
from oncely.core.claim import Takeover
from oncely.errors import WrongInput
from oncely.kafka.client import KafkaAdmin
from oncely.kinds.data_file import encode
from oncely.kinds.files.records import schema_key
from oncely.pipeline import Pipeline
from oncely.stores.topic import cluster
from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker, Scram
from tests.conftest import produce
from tests.laketools import scope_schema

Settings = dict[str, Any]
COLUMNS = "id INT, user STRING, at STRUCT<place: STRING>"


@pytest.fixture
def settings(broker: Broker, tmp_path: Path) -> Callable[..., Settings]:
    """A pipeline's settings; the same name and topics each time."""
    name = uuid.uuid4().hex[:12]
    broker.create_topic(name, 1)

    def made(schema: str = COLUMNS, **sink: Any) -> Settings:
        if sink["kind"] == "files":
            sink = {"url": f"{tmp_path.as_uri()}/root", "manifest_topic": f"{name}.manifest"} | sink
        if sink["kind"] in ("kafka", "files"):
            sink |= {"ledger_topic": f"{name}.ledger"}
        return {
            "name": name,
            "source": {"brokers": broker.bootstrap, "topics": [name]},
            "decode": {"format": "json", "schema": schema},
            "sink": sink,
        }

    return made


def opened(settings: Settings) -> None:
    """What a run does before its first batch."""
    pipeline = Pipeline(parse(settings))
    source = pipeline.source
    sink = pipeline.sink(pipeline.row_schema())
    try:
        start = source.resolve_start("earliest")
        sink.open(Takeover(source.identity(), lambda: start, start))
    finally:
        sink.close()


def refused(settings: Settings, key: str, said: str) -> None:
    """By `plan`, before Spark is started, and by the opening itself."""
    pipeline = Pipeline(parse(settings))
    problems = {one.key: one.message for one in pipeline.plan(use_spark=False).problems}
    assert said in problems.get(key, ""), problems
    with pytest.raises(WrongInput):
        pipeline.preflight()
    with pytest.raises(WrongInput):
        opened(settings)


def fine(settings: Settings) -> None:
    assert Pipeline(parse(settings)).plan(use_spark=False).problems == ()
    Pipeline(parse(settings)).preflight()
    opened(settings)
    assert Pipeline(parse(settings)).plan(use_spark=False).problems == ()


def test_a_property_that_only_a_consumer_refuses(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    given = settings("id INT", kind="sql", url=f"sqlite:///{tmp_path}/rows.db", table="one")
    given["source"]["kafka"] = {"fetch.max.bytes": 0}
    (problem,) = Pipeline(parse(given)).plan(use_spark=False).problems
    assert problem.key == "source.kafka.fetch.max.bytes"
    with pytest.raises(WrongInput, match=r"fetch\.max\.bytes"):
        Pipeline(parse(given)).preflight()


@pytest.mark.parametrize("name", ["a\0b", "_oncely_a"])
def test_a_name_that_no_column_may_have(
    settings: Callable[..., Settings], tmp_path: Path, name: str
) -> None:
    sql = {"kind": "sql", "url": f"sqlite:///{tmp_path}/rows.db", "table": "one"}
    refused(settings(f"`{name}` INT", **sql), "sink.table", repr(name))


def test_names_that_postgresql_truncates(settings: Callable[..., Settings], database: str) -> None:
    columns = f"{'c' * 63}1 INT, {'c' * 63}2 INT"
    sql = {"kind": "sql", "url": database, "table": "one"}
    refused(settings(columns, **sql), "sink.table", "truncates it")


def test_another_table(settings: Callable[..., Settings], tmp_path: Path) -> None:
    sql = {"kind": "sql", "url": f"sqlite:///{tmp_path}/rows.db"}
    fine(settings("id INT", **sql, table="one"))
    refused(settings("id INT", **sql, table="two"), "sink.table", "has written to 'one'")


def test_a_folder_that_can_hold_no_database(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    sql = {"kind": "sql", "url": f"sqlite:///{tmp_path}/missing/rows.db", "table": "rows"}
    refused(settings("id INT", **sql), "sink.url", "there is no directory")
    (tmp_path / "missing").touch()
    refused(settings("id INT", **sql), "sink.url", "there is no directory")


def test_a_start_in_the_future(settings: Callable[..., Settings], tmp_path: Path) -> None:
    """It would begin at the end of the topics, as `latest` does; a later start has a position."""
    made = settings("id INT", kind="sql", url=f"sqlite:///{tmp_path}/rows.db", table="rows")
    later = made | {"source": made["source"] | {"start": "2999-01-01"}}
    pipeline = Pipeline(parse(later))
    (problem,) = pipeline.plan(use_spark=False).problems
    assert (problem.key, "is in the future" in problem.message) == ("source.start", True)
    with pytest.raises(WrongInput, match="is in the future"):
        pipeline.preflight()
    assert not (tmp_path / "rows.db").exists(), "nothing was created"
    opened(made)
    pipeline.preflight()
    assert pipeline.plan(use_spark=False).problems == ()


def test_a_url_that_leads_to_a_broker(broker: Broker, settings: Callable[..., Settings]) -> None:
    """The broker waits for the rest of a request, and libpq for an answer."""
    url = f"postgresql://u:p@{broker.bootstrap.replace('127.0.0.1', '127.1')}/d"
    sink = {"kind": "sql", "url": url, "table": "t", "connect_timeout": "2 seconds"}
    pipeline = Pipeline(parse(settings("id INT", **sink)))
    (problem,) = pipeline.plan(use_spark=False).problems
    assert problem.key == "sink.url"
    assert "is a broker of Kafka, and no PostgreSQL" in problem.message
    with pytest.raises(WrongInput, match="is a broker of Kafka"):
        pipeline.preflight()


def test_another_output_topic(broker: Broker, settings: Callable[..., Settings]) -> None:
    one, two = f"one-{uuid.uuid4().hex[:8]}", f"two-{uuid.uuid4().hex[:8]}"
    fine(settings(kind="kafka", topic=one))
    refused(settings(kind="kafka", topic=two), "sink.topic", f"has written to '{one}'")


def test_another_root(settings: Callable[..., Settings], tmp_path: Path) -> None:
    fine(settings(kind="files"))
    other = settings(kind="files", url=f"{tmp_path.as_uri()}/other")
    refused(other, "sink.url", "has written to")
    # A manifest of its own does not make it another pipeline.
    refused(other | {"sink": other["sink"] | {"manifest_topic": f"{uuid.uuid4().hex}.manifest"}},
            "sink.url", "has written to")  # fmt: skip


def test_a_manifest_of_another_pipeline(settings: Callable[..., Settings], tmp_path: Path) -> None:
    fine(settings(kind="files"))
    copied = settings(kind="files", url=f"{tmp_path.as_uri()}/other") | {"name": "copied"}
    refused(copied, "sink.manifest_topic", "belongs to pipeline")


def test_columns_that_earlier_files_do_not_resolve_to(
    broker: Broker, settings: Callable[..., Settings]
) -> None:
    before = settings("id INT", kind="files")
    fine(before)
    page = scope_schema(pa.schema([("id", pa.int64())]))
    topic = before["sink"]["manifest_topic"].replace(".manifest", ".schema")
    produce(broker, topic, [(0, schema_key(()), encode(page))])
    fine(before)
    now = settings("id STRING", kind="files")
    refused(now, "decode.schema", "id: it is BIGINT, found STRING")
    assert Pipeline(parse(now)).plan(use_spark=False, sample=1).sample is not None


def test_a_manifest_topic_that_is_unfit(broker: Broker, settings: Callable[..., Settings]) -> None:
    wide = f"{uuid.uuid4().hex}.manifest"
    broker.create_topic(wide, 3, {"cleanup.policy": "compact"})
    refused(settings(kind="files", manifest_topic=wide), "sink.manifest_topic", "3 partitions")


def test_a_delta_table_that_lets_positions_expire(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    delta = {"kind": "delta", "url": f"{tmp_path.as_uri()}/table"}
    fine(settings("id INT", **delta))
    fine(settings("id INT, user STRING", **delta))
    refused(settings("id STRING", **delta), "sink.url", "column 'id' is int32")
    expiry = {"delta.setTransactionRetentionDuration": "interval 7 days"}
    DeltaTable(tmp_path / "table").alter.set_table_properties(expiry)
    refused(settings("id INT", **delta), "sink.url", "the pipeline's positions would expire")


@pytest.mark.parametrize("column", ["at", "at.place", "date(at)"])
def test_a_partition_column_that_is_nested(settings: Callable[..., Settings], column: str) -> None:
    refused(settings(kind="files", partition_by=[column]), "sink.partition_by", "'at")


DEAD = "127.0.0.1:9"


@pytest.mark.parametrize(
    ("section", "sink", "key"),
    [
        ("sink", {"kind": "kafka", "topic": "out", "brokers": DEAD}, "sink.brokers"),
        ("source", {"kind": "kafka", "topic": "out"}, "source.brokers"),
        ("source", {"kind": "files", "format": "avro"}, "source.brokers"),
    ],
)
def test_a_cluster_that_does_not_answer_is_one_problem(
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    sink: Settings,
    key: str,
) -> None:
    def impatient(brokers: str, kafka: Any, _: float) -> KafkaAdmin:
        return KafkaAdmin(brokers, kafka, 1.0)

    monkeypatch.setattr(cluster, "KafkaAdmin", impatient)
    given = settings("id INT", **sink)
    given[section]["brokers"] = DEAD
    pipeline = Pipeline(parse(given))
    pipeline.source.timeout = 3.0
    found = pipeline.plan(use_spark=False)
    (problem,) = found.problems
    assert (problem.key, found.exit_code) == (key, 1)
    assert key in problem.way_out


@pytest.mark.servers
def test_the_permissions_that_it_prints_suffice(tmp_path: Path) -> None:
    """For topics that exist, and for those that the first start creates; also those that it prints
    while it may not see whether they exist."""
    authorizer = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:ann",
    }
    compact = {"cleanup.policy": "compact"}
    with Broker(security=Scram({"ann": "a", "bob": "b"}), properties=authorizer) as broker:
        broker.create_topic("in", 1)
        for kind, there in itertools.product(("kafka", "files"), (True, False)):
            out = f"{kind}-{there}"
            for topic in (out, f"{out}.rejects") if there else ():
                broker.create_topic(topic, 1)
            for name, count in (("manifest", 1), ("schema", 1), ("ledger", 16)) if there else ():
                broker.create_topic(f"{out}.{name}", count, compact)
            sink = {"kind": kind, "ledger_topic": f"{out}.ledger"}
            own = {"url": f"{tmp_path.as_uri()}/{out}", "manifest_topic": f"{out}.manifest"}
            sink |= {"topic": out} if kind == "kafka" else own
            kafka = broker.client_config("bob")
            brokers = kafka.pop("bootstrap.servers")
            given = {
                "name": out,
                "source": {"brokers": brokers, "topics": ["in"], "kafka": kafka},
                "decode": {"format": "json", "schema": "id INT"},
                "sink": sink,
            }
            for command in Pipeline(parse(given)).plan(use_spark=False).acls:
                permit(broker, "bob", command)
            await_that(
                lambda: Pipeline(parse(given)).plan(use_spark=False).problems == (),  # noqa: B023
                "the ACLs",
            )
            opened(given)


def permit(broker: Broker, user: str, command: str) -> None:
    """Do what a ``kafka-acls`` command does."""
    option, name = re.findall(r"--(topic|group|transactional-id) (\S+)", command)[0]
    kind = ResourceType[option.replace("-", "_").upper()]
    pattern = ResourcePatternType["PREFIXED" if "prefixed" in command else "LITERAL"]
    operations = [
        AclOperation[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", one).upper()]
        for one in re.findall(r"--operation (\w+)", command)
    ]
    allow = AclPermissionType.ALLOW
    wanted = [AclBinding(kind, name, pattern, f"User:{user}", "*", o, allow) for o in operations]
    admin = broker.admin()
    for done in admin.create_acls(wanted).values():
        done.result(60)
