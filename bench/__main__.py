"""Run the benchmark: ``python -m bench [--records N] [--rounds N]``; ``make bench`` runs all."""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from rich.console import Console

from bench import audit, contenders, latency, memory, recorded, shapes, worker
from bench.contenders import Contest
from bench.files import match as files
from bench.kafka import match
from bench.measure import IN_BULK, Goal, Series, fetch_settings, measured, show, told
from bench.workload import TABLE, Workload, avro_record, publish
from oncely import native
from oncely.artifacts import POSTGRES_JDBC, resolve, spark_jars
from oncely.runtimes.spark import session
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUT = Path("build/bench/sql.json")
RESULTS = (OUT, match.OUT, files.OUT, audit.OUT, worker.OUT, shapes.OUT)
"""The result files whose ratios are compared with the recorded ones."""

SPARK_AVRO = "org.apache.spark:spark-avro_2.13:4.0.0"
ONLY = ("sql", "memory", "latency", "shapes", "kafka", "files", "audit", "worker", "worker-memory")
GOALS: tuple[Goal, ...] = (
    ("oncely / jdbc_rewrite", "oncely", "jdbc_rewrite", 1.6),
    ("oncely / jdbc_rewrite + fetch", "oncely", "jdbc_rewrite + fetch", 1.5),
    ("oncely / jdbc", "oncely", "jdbc", 4.0),
    ("oncely / limit", "oncely", "limit", 0.75),
    ("limit / jvm_read", "limit", "jvm_read", 0.5),
    ("oncely / copy", "oncely", "copy", 0.85),
    ("oncely avro / oncely", "oncely avro", "oncely", 0.95),
)
console = Console()


def main() -> int:
    """Measure everything; exit code 1 when a result was wrong, or a ratio fell."""
    given = _options().parse_args()
    began = time.time()
    if slower := native.absence():
        console.print(slower)
    jars = [jar for one in (POSTGRES_JDBC, SPARK_AVRO, spark_jars().kafka) for jar in resolve(one)]
    with Broker(properties=match.BROKER) as broker, ExitStack() as left:
        bucket, settings = None, {}
        if given.s3:
            from bench.files import on_s3

            bucket, more = left.enter_context(on_s3.serving())
            jars, settings = [*jars, *more], dict(bucket.spark_settings())
        settings["spark.jars"] = ",".join(map(str, jars))
        spark = session.start("bench", "local[2,4]", settings)
        if given.only in (None, "sql", "memory", "latency"):
            with Postgres() as postgres:
                _to_sql(given, spark, broker, postgres)
        if given.only in (None, "shapes"):
            with Postgres() as postgres:
                shapes.measure(
                    spark,
                    broker,
                    postgres.create_database("shapes"),
                    (broker.pid, postgres.pid),
                    console,
                    records=given.records or 300_000,
                    rounds=given.rounds or 2,
                )
        if given.only in (None, "kafka"):
            match.measure(
                spark,
                broker,
                console,
                records=given.records or 1_000_000,
                rounds=given.rounds or 3,
                batch=given.batch,
                only_peers=given.only_peers,
            )
        if given.only in (None, "files"):
            files.measure(
                spark,
                broker,
                console,
                records=given.records or 3_000_000,
                rounds=given.rounds or 3,
                batch=given.batch,
                bucket=bucket,
            )
        if given.only in (None, "audit"):
            with Postgres() as postgres:
                _audit(given, spark, broker, postgres)
        if given.only in (None, "worker", "worker-memory"):
            with Postgres() as postgres:
                _worker(given, spark, broker, postgres)
        spark.stop()
    results = [one for one in RESULTS if one.exists() and one.stat().st_mtime >= began]
    if given.record:
        recorded.record(results, console)
        return 0
    return recorded.compare(results, console)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="bench", description=__doc__)
    options.add_argument(
        "--records",
        type=int,
        help="SQL, files: 3,000,000; Kafka: 1,000,000; audit: 10,000,000; worker: 2,000,000;"
        " shapes: 300,000",
    )
    options.add_argument("--rounds", type=int, help="SQL: 5; shapes: 2; others: 3")
    options.add_argument("--batch", type=int, default=3_000_000, help="records of a batch")
    options.add_argument("--range", type=int, default=5_000_000, help="records of the memory test")
    options.add_argument("--only", choices=ONLY, default=None)
    options.add_argument("--minutes", type=float, default=30.0, help="of worker-memory")
    options.add_argument("--s3", action="store_true", help="files: into a local S3 server")
    options.add_argument("--record", action="store_true", help="keep the ratios of this run")
    options.add_argument("--only-peers", action="store_true", help="Kafka: without Oncely")
    return options


def _to_sql(
    given: argparse.Namespace, spark: SparkSession, broker: Broker, postgres: Postgres
) -> None:
    """Kafka to PostgreSQL: rate, memory, latency; written to :data:`OUT`."""
    result: dict[str, object] = {}
    url = postgres.create_database("bench")
    if given.only in (None, "sql"):
        records = given.records or 3_000_000
        with console.status(f"publishing {records:,} records"):
            workload = publish(broker, "bench", records)
            avro = publish(broker, "bench-avro", records, of=avro_record)
        contest = Contest(spark, broker.bootstrap, url, workload, given.batch)
        result |= sql(contest, avro, (broker.pid, postgres.pid), given.rounds or 5)
    if given.only in (None, "memory"):
        result |= memory.measure(spark, broker, url, given.range, console)
    if given.only in (None, "latency"):
        result |= latency.measure(spark, broker, url, console)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written: {OUT}")


def _audit(
    given: argparse.Namespace, spark: SparkSession, broker: Broker, postgres: Postgres
) -> None:
    """The audit of a table, against a full outer join."""
    records = given.records or 10_000_000
    with console.status(f"publishing {records:,} records"):
        workload = publish(broker, "audit", records)
    url = postgres.create_database("audit")
    contest = Contest(spark, broker.bootstrap, url, workload, audit.BATCH)
    audit.measure(contest, (broker.pid, postgres.pid), console, given.rounds or 3)


def _worker(
    given: argparse.Namespace, spark: SparkSession, broker: Broker, postgres: Postgres
) -> None:
    """The worker, against `oncely run`, the consumer alone and Spark's JDBC sink; or its memory."""
    url = postgres.create_database("worker")
    if given.only == "worker-memory":
        contest = Contest(spark, broker.bootstrap, url, Workload(worker.TOPIC, 0), given.batch)
        worker.memory(contest, broker, console, given.minutes)
        return
    records = given.records or 2_000_000
    with console.status(f"publishing {records:,} records"):
        workload = publish(broker, "worker", records)
    contest = Contest(spark, broker.bootstrap, url, workload, given.batch)
    worker.measure(contest, broker, (broker.pid, postgres.pid), console, given.rounds or 3)


def sql(
    contest: Contest, avro: Workload, servers: tuple[int, int], rounds: int
) -> dict[str, object]:
    """Kafka to PostgreSQL: ours, the peers, and the limits, one after the other in each round.

    ``avro``: the same records in another format.
    """
    messages = contenders.encoded(contest.workload.records)
    runs: dict[str, Callable[[str], int | None]] = {
        "oncely": lambda table: contenders.oncely(contest, table),
        "jdbc_rewrite": lambda table: contenders.jdbc(contest, table, rewrite=True),
        "jdbc_rewrite + fetch": lambda table: contenders.jdbc(
            contest, table, rewrite=True, fetch=IN_BULK
        ),
        "limit": lambda _: contenders.limit(contest),
        "jdbc": lambda table: contenders.jdbc(contest, table, rewrite=False),
        "jvm_read": lambda _: contenders.jvm_read(contest),
        "oncely avro": lambda table: contenders.oncely_avro(replace(contest, workload=avro), table),
        "copy": lambda table: contenders.copy(contest, table, messages),
    }
    series = {name: Series(contest.workload.records) for name in runs}
    for number in range(-1, rounds):  # the first round warms the JVM and is not counted
        for name, run in runs.items():
            table = f"t_{uuid.uuid4().hex[:8]}"
            _fresh(contest.url, table)
            status = console.status(f"round {number + 1} of {rounds}: {name}")
            with status, measured(servers) as one:
                counted = run(table)
            wrong = _wrong(contest, table, counted)
            _drop(contest.url, table)
            if wrong:
                console.print(f"[bold red]{name}: a wrong result scores nothing: {wrong}")
                sys.exit(1)
            rate = contest.workload.records / one.seconds
            console.print(f"round {number + 1} {name}: {rate:,.0f}/s")
            if number >= 0:
                series[name].samples.append(one)
    show(console, "Kafka to PostgreSQL, records per second", series, GOALS)
    console.print(fetch_settings())
    return {
        **told(series, GOALS),
        "records": contest.workload.records,
        "records_per_batch": contest.batch,
        "fetch": dict(IN_BULK),
    }


def _wrong(contest: Contest, table: str, counted: int | None) -> str | None:
    """What is wrong with a run: its table, or the number that it counted."""
    if counted is None:
        return contest.workload.wrong(contest.url, table)
    expected = contest.workload.records
    return None if counted == expected else f"{counted} records of {expected}"


def _fresh(url: str, table: str) -> None:
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(TABLE.format(table).encode())
        database.execute("CHECKPOINT")


def _drop(url: str, table: str) -> None:
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(f"DROP TABLE {table}".encode())


if __name__ == "__main__":
    sys.exit(main())
