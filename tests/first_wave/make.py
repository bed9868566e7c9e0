"""Runs the first wave's pipelines with the first wave's code, and keeps what they left.

The imports of ``oncely`` are those of commit 2014185 and stay as they are: this file is never run
with later code. See README.md.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import ConfigResource, ConfigSource, OffsetSpec, ResourceType

from tests.first_wave.cases import CASES, FIRST, PARTITIONS, SECOND, Case, key, value

COMMIT = "2014185"
TABLE = """CREATE TABLE appended (id bigint NOT NULL, k integer, grp text, kafka_topic text,
    kafka_partition integer, kafka_offset bigint)"""


# -- the parent: servers, records, and what is kept ------------------------------------------


def main(out: Path) -> None:
    """Make everything below ``out`` anew."""
    from oncely.local.kafka import Broker
    from oncely.local.postgres import Postgres

    shutil.rmtree(out, ignore_errors=True)
    work = out.with_name("work")
    shutil.rmtree(work, ignore_errors=True)
    (out / "files").mkdir(parents=True)
    (work / "files").mkdir(parents=True)
    with Broker() as broker, Postgres() as postgres:
        known = {
            "brokers": broker.bootstrap,
            "postgres": postgres.create_database("wave1"),
            "sqlite": f"sqlite:///{work}/wave1.db",
            "files": (work / "files").as_uri(),
        }
        with psycopg.connect(known["postgres"], autocommit=True) as database:
            database.execute(TABLE)
        for case in CASES:
            broker.create_topic(case.topic, PARTITIONS)
            publish(broker, case, FIRST)
        child({"known": known, "clean": [case.name for case in CASES], "first": True}, 0)
        for case in CASES:
            if case.grows:
                broker.add_partitions(case.topic, PARTITIONS + 1)
            publish(broker, case, SECOND)
        clean = [case.name for case in CASES if not case.dies]
        for case in CASES:
            if case.dies:
                child({"known": known, "clean": clean, "dies": case.name}, -signal.SIGKILL)
                clean = []
        keep_postgres(known["postgres"], out / "postgres.sql")
        keep_sqlite(work / "wave1.db", out / "sqlite.sql")
        keep_kafka(broker, known, out)
    for file in sorted((work / "files").rglob("*")):
        if file.is_file():
            kept = out / "files" / file.relative_to(work / "files")
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, kept)
    shutil.rmtree(work)


def publish(broker: Any, case: Case, numbers: Iterable[int]) -> None:
    """Records by number, round robin; a partition that was added gets its share."""
    producer = Producer(broker.client_config())
    of = case.partitions if numbers is SECOND else PARTITIONS
    for i in numbers:
        producer.produce(case.topic, value(i), key(i), partition=i % of, headers=[("h", b"1")])
    assert producer.flush(60) == 0


def child(job: dict[str, Any], expected: int) -> None:
    """Do a job in a process that may die."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.first_wave.make", "--job", json.dumps(job)], check=False
    )
    assert done.returncode == expected, done.returncode


def keep_postgres(url: str, file: Path) -> None:
    """As a script of plain statements."""
    from oncely.local import pginstall

    dumped = subprocess.run(
        [pginstall.programs() / "pg_dump", url, "--inserts", "--no-owner", "--no-privileges"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [one for one in dumped.splitlines() if one and not one.startswith(("--", "\\"))]
    file.write_text("\n".join(lines) + "\n")


def keep_sqlite(file: Path, kept: Path) -> None:
    """The same of SQLite's file; opening it undoes what was under way."""
    with sqlite3.connect(file) as database:
        kept.write_text("\n".join(database.iterdump()) + "\n")


def keep_kafka(broker: Any, known: dict[str, str], out: Path) -> None:
    """Topics with the offsets of their records, and the offsets of groups."""
    admin = broker.admin()
    names = sorted(n for n in admin.list_topics(timeout=60).topics if not n.startswith("__"))
    described = admin.describe_topics(TopicCollection(names))
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    configs = {r.name: f.result(120) for r, f in admin.describe_configs(resources).items()}
    topics = {}
    for name in names:
        found = described[name].result(120)
        ends = settled_ends(admin, name, len(found.partitions))
        config = {
            key: one.value
            for key, one in configs[name].items()
            if one.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        }
        topics[name] = {"id": str(found.topic_id), "config": config, "ends": ends}
    groups = {}
    for one in admin.list_consumer_groups().result(120).valid:
        asked = [ConsumerGroupTopicPartitions(one.group_id)]
        answer = admin.list_consumer_group_offsets(asked)[one.group_id].result(120)
        groups[one.group_id] = sorted(
            [tp.topic, tp.partition, tp.offset, tp.metadata] for tp in answer.topic_partitions
        )
    cluster = admin.describe_cluster().result(120).cluster_id
    kept = {
        "commit": COMMIT, "cluster": cluster, "files": known["files"],
        "topics": topics, "groups": groups,
    }  # fmt: skip
    (out / "kafka.json").write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    lines = [json.dumps(one) for name in names for one in records(broker, name, topics[name])]
    (out / "records.jsonl").write_text("\n".join(lines) + "\n")


def settled_ends(admin: Any, topic: str, partitions: int) -> list[int]:
    """The ends, when no open transaction hides anything."""
    asked = {TopicPartition(topic, n): OffsetSpec.latest() for n in range(partitions)}
    while True:
        seen = []
        for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED):
            answers = admin.list_offsets(dict(asked), isolation_level=level)
            seen.append([answers[one].result(120).offset for one in asked])
        if seen[0] == seen[1]:
            return seen[0]
        time.sleep(0.5)


def records(broker: Any, topic: str, about: dict[str, Any]) -> list[list[Any]]:
    """Topic, partition, offset, timestamp, key, value, headers."""
    consumer = Consumer(
        {**broker.client_config(), "group.id": "keeper", "isolation.level": "read_committed",
         "enable.partition.eof": True, "enable.auto.commit": False}
    )  # fmt: skip
    left = set(range(len(about["ends"])))
    consumer.assign([TopicPartition(topic, n, 0) for n in left])
    found = []
    while left:
        for message in consumer.consume(1000, 1):
            if message.error():
                left.discard(message.partition())
                continue
            headers = [[k, text(v)] for k, v in message.headers() or ()]
            at = [topic, message.partition(), message.offset(), message.timestamp()[1]]
            found.append([*at, text(message.key()), text(message.value()), headers])
    consumer.close()
    return sorted(found, key=lambda one: one[1:3])


def text(data: bytes | None) -> str | None:
    """Base64."""
    return None if data is None else base64.b64encode(data).decode()


# -- the children: the first wave's code -----------------------------------------------------


def work(job: dict[str, Any]) -> None:
    """Some runs that end in order, and perhaps one that does not."""
    from oncely.config import parse
    from oncely.files import table_of
    from oncely.files.compact import compact
    from oncely.pipeline import Pipeline
    from oncely.runtimes import session

    known, by_name = job["known"], {case.name: case for case in CASES}
    dies = by_name.get(job.get("dies", ""))
    if dies is not None and dies.dies == "opening" and not job["clean"]:
        die_opening(dies, known)
    spark = session.start("wave1", "local[2,4]", {})
    for case in (by_name[name] for name in job["clean"]):
        pipeline = Pipeline(parse(case.settings(known, wide=False)))
        assert pipeline.run("latest", spark=spark)
        if case.replays and job.get("first"):
            moved, kept = Pipeline(parse(case.settings(known, wide=True))).replay(spark=spark)
            assert moved, kept
        if case.compacts and job.get("first"):
            assert compact(table_of(pipeline)).outputs
    if dies is None:
        session.stop(spark)
    elif dies.dies == "opening":
        die_opening(dies, known)
    else:
        die_running(dies, known, spark)


def die_running(case: Case, known: dict[str, str], spark: Any) -> None:
    """Run until the third micro-batch is at the point where it dies."""
    from oncely.semantics.victim import _arming, _dying

    from oncely.runtimes import session

    order = {"run": case.settings(known, wide=False), "point": case.dies, "files": 6}
    java = session.java_process()
    pipeline, killer = _dying(order, java.pid if java else 0)
    pipeline.run("latest", spark=spark, listener=_arming(killer))


def die_opening(case: Case, known: dict[str, str]) -> None:
    """Take the next epoch and die before a position is taken."""
    from oncely.sinks.sql.connection import connect
    from oncely.sources.clients import make

    from oncely.config import parse
    from oncely.pipeline import Pipeline

    class Session:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def execute(self, sql: str, params: Any = (), **how: Any) -> int:
            if sql.startswith("UPDATE") and "oncely_positions" in sql:
                os.kill(os.getpid(), signal.SIGKILL)
            return self._inner.execute(sql, params, **how)  # type: ignore[no-any-return]

    class Writer:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def begin_transaction(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    def clients(kind: Any, *args: Any, **own: Any) -> Any:
        made = make(kind, *args, **own)
        takes_positions = not own.get("transactional.id", "/").endswith("/")
        return Writer(made) if takes_positions else made

    pipeline = Pipeline(
        parse(case.settings(known, wide=False)),
        lambda dialect, application: Session(connect(dialect, application)),  # type: ignore[arg-type, return-value]
        clients,
    )
    source = pipeline.source
    sink = pipeline.sink(pipeline.row_schema())
    sink.open(source.identity(), source.earliest, source.earliest())


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        work(json.loads(sys.argv[2]))
    else:
        main(Path(sys.argv[1]).absolute())
