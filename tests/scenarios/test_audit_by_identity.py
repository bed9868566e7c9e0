"""``oncely audit FILE --id --by``: ids of a pipeline's records and of its destination, by group."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import confluent_kafka as ck
import deltalake
import pytest

from oncely.audit import by_identity
from oncely.audit.by_identity import audit_by_id
from oncely.audit.of_pipeline import log_of
from oncely.audit.report import Report
from oncely.cli.audits import views_of
from oncely.config import parse
from oncely.errors import ConfigError, OncelyError
from oncely.pipeline import Pipeline
from tests.scenarios.commands import oncely
from tests.scenarios.delta_world import DeltaWorld
from tests.scenarios.files_world import FilesWorld
from tests.scenarios.world import World, produce

DECODE = {"schema": "id BIGINT NOT NULL, ts TIMESTAMP, note STRING"}


def record(n: int, **more: Any) -> bytes:
    at = f"2026-01-02T{n % 3:02}:30:00Z"
    return json.dumps({"id": n, "ts": at, **more}).encode()


def send(world: World, *ids: int, **more: Any) -> None:
    produce(world.brokers, world.topic, ((n % 4, None, record(n, **more)) for n in ids))


def run(world: World, spark: Any, **sections: Any) -> Callable[..., Report]:
    """Run the pipeline, without Spark; returns its audit, on Spark."""
    sections = {"decode": DECODE, **sections}
    pipeline = Pipeline(parse(world.settings(**sections)))
    assert pipeline.work("latest")

    def audit(id_: str = "id", by: str | None = "hour(ts)", **more: Any) -> Report:
        views = views_of(pipeline, spark, log_of(pipeline.settings))
        return audit_by_id(spark, views, id_, id_, by, **more)

    return audit


def found(report: Report) -> dict[str, int]:
    return {kind: number for kind, number in report.found.items() if number}


def test_each_hour_and_each_kind_of_damage(spark: Any, make_world: Callable[..., World]) -> None:
    world = make_world()
    send(world, *range(60))
    produce(world.brokers, world.topic, [(0, None, b"no json"), (1, None, None)])
    sql = "SELECT * FROM input WHERE id <> 59"
    audit = run(world, spark, transform={"sql": sql}, sink={"max_rejects": "100%"})
    clean = audit()
    assert clean.verdict == "clean", clean.as_json()
    assert [(h.group, h.topic, h.sink) for h in clean.hours] == [
        ("2026-01-02 00:00:00", 20, 20), ("2026-01-02 01:00:00", 20, 20),
        ("2026-01-02 02:00:00", 19, 19),  # one is filtered
    ]  # fmt: skip
    assert (clean.records, clean.accounted, clean.proof) == (59, 59, "content")

    world.sql("DELETE FROM rows WHERE id IN (4, 5)")
    world.sql("INSERT INTO rows (id, ts) SELECT id, ts FROM rows WHERE id = 9")
    world.sql("INSERT INTO rows (id, ts) VALUES (1000, '2026-01-02T01:00:00Z')")
    damaged = audit()
    assert found(damaged) == {"lost": 2, "duplicated": 1, "unexpected": 1}
    lost = [one for one in damaged.findings if one.kind == "lost"]
    assert [(one.partition.partition, one.offset, one.detail) for one in lost] == [  # type: ignore[union-attr]
        (0, 1, "id 4: 1 record, no row"), (1, 1, "id 5: 1 record, no row"),
    ]  # fmt: skip
    assert [(h.missing, h.duplicated, h.unexpected) for h in damaged.hours] == [
        (0, 1, 0), (1, 0, 1), (1, 0, 0),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--id-"):
        audit("nowhere")


def test_records_that_a_reset_passed_over_are_not_lost(
    spark: Any, make_world: Callable[..., World]
) -> None:
    world = make_world()
    send(world, *range(20))
    run(world, spark)
    send(world, *range(20, 30))
    oncely("offsets", "reset", world.file(decode=DECODE), "--to-latest", "--execute")
    send(world, *range(30, 40))
    audit = run(world, spark)
    world.sql("INSERT INTO rows (id, ts) VALUES (20, '2026-01-02T02:30:00Z')")  # it is not compared
    clean = audit()
    assert (clean.verdict, clean.records, clean.holes) == ("clean", 30, 0), clean.as_json()
    assert len(clean.limits) == 4
    assert all("was passed over by a reset" in one for one in clean.limits)
    world.sql("DELETE FROM rows WHERE id IN (3, 33)")
    assert found(audit()) == {"lost": 2}


def test_rows_that_the_table_refuses_are_dead_letters_and_not_lost(
    spark: Any, make_world: Callable[..., World]
) -> None:
    world = make_world()
    world.sql("CREATE TABLE rows (id bigint CHECK (id <> 7), ts timestamptz, note text)")
    send(world, *range(20))
    sink = {"max_rejects": "100%", "keep_source": False}
    audit = run(world, spark, sink=sink)
    assert world.count() == 19
    assert audit().verdict == "clean", audit().as_json()
    world.sql("DELETE FROM oncely_rejects")
    assert found(audit()) == {"lost": 1}


def test_a_pipeline_that_runs_meanwhile_is_no_damage(
    spark: Any, make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    send(world, *range(20))
    audit = run(world, spark)
    inner = by_identity.right_side

    def later(*args: Any) -> Any:
        send(world, *range(5, 30))  # some ids again
        assert Pipeline(parse(world.settings(decode=DECODE))).work("latest")
        world.sql("INSERT INTO rows (id) VALUES (777)")
        return inner(*args)

    monkeypatch.setattr(by_identity, "right_side", later)
    report = audit()
    assert report.records == 20
    assert [one.detail for one in report.findings] == ["id 777: 1 row, no record"]


def test_upserts_and_tombstones(spark: Any, make_world: Callable[..., World]) -> None:
    world = make_world()
    key = partial(json.dumps)

    def put(*ids: int) -> None:
        records = ((n % 4, key({"id": n}).encode(), record(n)) for n in ids)
        produce(world.brokers, world.topic, records)

    def delete(*ids: int) -> None:
        produce(world.brokers, world.topic, ((n % 4, key({"id": n}).encode(), None) for n in ids))

    put(*range(20), *range(10))  # ten ids twice
    delete(3, 4, 5)
    put(5)  # and back again
    world.sql("CREATE TABLE rows (id bigint PRIMARY KEY, ts timestamptz, note text)")
    audit = run(
        world, spark,
        decode={"schema": "id BIGINT, ts TIMESTAMP, note STRING",
                "key": {"format": "json", "schema": "id BIGINT"}},
        sink={"mode": "upsert", "keys": ["id"], "keep_source": False},
    )  # fmt: skip
    assert world.count() == 18
    clean = audit()
    assert clean.verdict == "clean", clean.as_json()
    world.sql("DELETE FROM rows WHERE id IN (2, 5)")
    world.sql("INSERT INTO rows (id) VALUES (4)")  # was deleted
    assert found(audit()) == {"lost": 2, "unexpected": 1}


def test_deleted_records_prove_nothing(spark: Any, make_world: Callable[..., World]) -> None:
    world = make_world()
    send(world, *range(40))
    audit = run(world, spark)
    admin = ck.admin.AdminClient({"bootstrap.servers": world.brokers})
    for done in admin.delete_records([ck.TopicPartition(world.topic, 1, 5)]).values():
        done.result(120)
    report = audit()
    assert report.verdict == "unknown"
    assert not report.findings
    assert "deleted from the topic" in "".join(one.reason for one in report.undecided)


def test_files(spark: Any, make_files_world: Callable[..., FilesWorld]) -> None:
    world = make_files_world()
    world.publish(40)
    world.run(spark)
    pipeline = Pipeline(parse(world.settings()))
    views = views_of(pipeline, spark, log_of(pipeline.settings))
    clean = audit_by_id(spark, views, "id", "id", "user")
    assert clean.verdict == "clean", clean.as_json()
    assert clean.records == 40
    assert sum(hour.sink for hour in clean.hours) == 40
    world.publish(5, first=40)  # not committed yet
    assert audit_by_id(spark, views, "id", "id", None).verdict == "clean"


def test_the_password_of_the_database_is_in_no_text(
    spark: Any, make_world: Callable[..., World]
) -> None:
    world = make_world()
    send(world, 1)
    audit = run(world, spark)
    password = unquote(urlsplit(world.url).password or "")
    assert password
    assert password not in json.dumps(audit().as_json())
    world.sql("DROP TABLE rows CASCADE")
    with pytest.raises(OncelyError, match="there is no table rows") as refused:
        audit()
    assert password not in str(refused.value)


@pytest.mark.long
def test_a_delta_table(spark: Any, make_delta_world: Callable[..., DeltaWorld]) -> None:
    world = make_delta_world()
    records = [(str(n), json.loads(record(n))) for n in range(20)]
    world.publish_keyed([*records, ("3", {"id": 3, "note": "newer"}), ("4", None)])
    sections = {
        "decode": {"key": {"format": "string", "column": "k"}},
        "sink": {"mode": "upsert", "keys": ["k"]},
    }
    world.run(spark, **sections)
    # The reader of Delta tables needs a Spark with its jars.
    command = ["audit", world.file(**sections), "--id", "k", "--by", "hour(ts)"]
    deltalake.DeltaTable(str(world.root)).delete("k = '7'")
    damaged = json.loads(oncely(*command, "--json", alone=True, expect=1).stdout)
    assert [one["detail"] for one in damaged["lost"]] == ["id 7: 1 record, no row"]
    assert damaged["records"] == 20


class IntoTopic(World):
    """A pipeline into a topic."""

    def settings(self, **sections: Any) -> dict[str, Any]:
        whole = super().settings(**sections)
        return {**whole, "sink": sections["sink"]}


def damaged_output(world: World, topic: str) -> None:
    """Id 9 is there twice, and id 1000 is of no record; a message of another writer."""
    source = json.dumps([world.topic, 1, 2]).encode()
    producer = ck.Producer({"bootstrap.servers": world.brokers})
    for value, headers in (
        (record(9), {"oncely.source": source}),
        (record(1000), {"oncely.source": source}),
        (record(5000), {}),
    ):
        producer.produce(topic, value, headers=headers)
    assert producer.flush(120) == 0


def test_an_output_topic(spark: Any, make_world: Callable[..., World]) -> None:
    world = IntoTopic(**vars(make_world()))
    output = f"{world.topic}.out"
    sink = {
        "kind": "kafka", "topic": output, "keep_source": True,
        "rejects_topic": f"{output}.rejects", "ledger_topic": f"{output}.ledger",
        "max_rejects": "100%",
    }  # fmt: skip
    send(world, *range(30))
    produce(world.brokers, world.topic, [(0, None, b"no json")])
    audit = run(world, spark, sink=sink)
    report = audit()
    assert (report.verdict, report.records) == ("clean", 30), report.as_json()
    assert [(h.topic, h.sink) for h in report.hours] == [(10, 10)] * 3
    damaged_output(world, output)
    assert found(audit()) == {"duplicated": 1, "unexpected": 1}


def test_a_table_in_sqlite(
    spark: Any, make_world: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_identity, "_AT_ONCE", 7)
    world = make_world()
    sink = {"url": f"sqlite:///{tmp_path}/rows.db", "max_rejects": "100%"}
    send(world, *range(30))
    produce(world.brokers, world.topic, [(0, None, b"no json")])
    audit = run(world, spark, sink=sink)
    report = audit()
    assert (report.verdict, report.records) == ("clean", 30), report.as_json()
    assert [(h.topic, h.sink) for h in report.hours] == [(10, 10)] * 3
    with closing(sqlite3.connect(tmp_path / "rows.db")) as database, database:
        database.execute("DELETE FROM rows WHERE id IN (4, 5)")
        database.execute("INSERT INTO rows (id, ts) SELECT id, ts FROM rows WHERE id = 9")
    assert found(audit()) == {"lost": 2, "duplicated": 1}
