"""Kafka to PostgreSQL: Oncely, the peers, and the limits; its memory and its latency.

Peers are what people have: streaming queries with Spark's defaults; in one row the faster peer
fetches as much at once as the Java client is made for. The limit is our plan.

All read in batches of the same size with the same Spark session, and all that write have the
same table without an index and the same durability (PostgreSQL's default: fsync, synchronous
commit).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import pgpq
import psycopg
import pyarrow as pa
from confluent_kafka import Producer

from bench.counting import CountingSink
from bench.match import Contender, Contest, Match, Stage, against, flights
from bench.measure import IN_BULK, NO_OPTIONS, Sample
from bench.workload import AVRO, COLUMNS, PARTITIONS, SCHEMA, avro_record, record, row, wrong_table
from oncely.commit.path import Delivery
from oncely.core.claim import Budget, Fence
from oncely.kinds.base import CommitsChunks
from oncely.pipeline import Pipeline
from oncely.runtimes.batches.commit import (
    TaskResult,
    commit_chunks,
    plan_ranges,
    shares_of,
)
from oncely.runtimes.chunks import RangeReader, Ranges
from oncely.runtimes.jobs import Task, all_of
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.spark.jobs import SparkJobs
from oncely.threads import StopSignal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

GOALS = against(
    {
        ("oncely", "jdbc_rewrite"): 1.6,
        ("oncely", "jdbc_rewrite + fetch"): 1.5,
        ("oncely", "jdbc"): 4.0,
        ("oncely", "limit"): 0.75,
        ("limit", "jvm_read"): 0.5,
        ("oncely", "copy"): 0.85,
        ("oncely avro", "oncely"): 0.95,
    }
)
ROWS_A_MESSAGE = 10_000
"""Of COPY alone; a message of about 600 KB."""

_MEMORY = 600 << 20  # of a Python worker with one very long range
_BURST, _BURSTS, _WARM = 1_000, 25, 5  # of the latency's records
_GOAL_SECONDS = 0.7


def measure(stage: Stage) -> None:
    """Rates, memory and latency."""
    given, result = stage.given, dict[str, object]()
    with stage.database("bench") as (url, postgres):
        if given.only in (None, "sql"):
            records = given.records or 3_000_000
            stage.publish("bench", records)
            stage.publish("bench-avro", records, of=avro_record)
            contest = Sql(stage, "bench", records, given.batch, url)
            servers = (stage.broker.pid, postgres)
            match = Match("Kafka to PostgreSQL, records per second", ways(contest), GOALS, servers)
            result |= match.told(match.play(given.rounds or 5))
        if given.only in (None, "memory"):
            stage.publish("long", given.range, partitions=1)
            long = Sql(stage, "long", given.range, given.range, url)
            peak = Contender("long", long, long.oncely).worker_memory("one range", _MEMORY)
            result["worker_memory_mib"] = round(peak / 2**20)
            result["worker_memory_records"] = given.range
        if given.only in (None, "latency"):
            result |= _latency(Sql(stage, "latency", _BURST * (_BURSTS + _WARM), 500_000, url))
    stage.write("sql", result)


def ways(contest: Sql) -> list[Contender]:
    """The contenders, in the order of a round."""
    bulk = partial(contest.jdbc, rewrite=True, fetch=IN_BULK)
    avro = replace(contest, topic="bench-avro")
    return [
        Contender("oncely", contest, contest.oncely),
        Contender("jdbc_rewrite", contest, partial(contest.jdbc, rewrite=True)),
        Contender("jdbc_rewrite + fetch", contest, bulk),
        Contender("limit", contest, contest.limit),
        Contender("jdbc", contest, partial(contest.jdbc, rewrite=False)),
        Contender("jvm_read", contest, contest.jvm_read),
        Contender("oncely avro", avro, avro.oncely_avro),
        Contender("copy", contest, partial(contest.copy, messages=encoded(contest.records))),
    ]


@dataclass(frozen=True)
class Sql(Contest):
    """A topic and a database.

    Attributes:
        url: of the database.
        schema: of the records, as Spark's DDL.
        columns: of each run's table.
    """

    url: str
    schema: str = SCHEMA
    columns: str = COLUMNS

    @contextmanager
    def fresh(self, name: str) -> Iterator[str]:
        """An empty table."""
        with psycopg.connect(self.url, autocommit=True) as database:
            database.execute(f"CREATE TABLE {name} ({self.columns})".encode())
            database.execute("CHECKPOINT")
            yield name
            database.execute(f"DROP TABLE {name}".encode())

    def wrong(self, place: str, result: int | None, sample: Sample) -> str | None:
        """What is wrong with the table, or with the number that a run without a table counted."""
        del sample
        if result is None:
            return wrong_table(self.url, place, self.records)
        return None if result == self.records else f"{result} records of {self.records}"

    def into(self, table: str, decode: Mapping[str, str] = NO_OPTIONS) -> Pipeline:
        """Oncely's pipeline into a table."""
        return self.pipeline(
            table,
            decode=dict(decode) or {"format": "json", "schema": self.schema},
            sink={"kind": "sql", "url": self.url, "table": table, "max_rejects": self.records},
        )

    def oncely(self, table: str) -> None:
        """Exactly once, as `oncely run --until latest` does it."""
        self.into(table).run("latest", spark=self.stage.session)

    def oncely_avro(self, table: str) -> None:
        """The same with records of Avro, without a registry."""
        with tempfile.NamedTemporaryFile("w", suffix=".avsc") as schema:
            json.dump(AVRO, schema)
            schema.flush()
            decode = {"format": "avro", "schema_file": schema.name}
            self.into(table, decode).run("latest", spark=self.stage.session)

    def copy(self, table: str, messages: list[bytes]) -> None:
        """COPY alone: rows that are encoded already, in one session and one transaction."""
        statement = f"COPY {table} FROM STDIN WITH (FORMAT binary)".encode()
        with psycopg.connect(self.url) as database, database.cursor().copy(statement) as rows:
            for message in messages:
                rows.write(message)

    def jdbc(self, table: str, *, rewrite: bool, fetch: Mapping[str, str] = NO_OPTIONS) -> None:
        """What people do: ``from_json`` and Spark's JDBC append. At least once.

        ``fetch``: options of the Kafka reader beside Spark's defaults.
        """
        options = jdbc_options(self.url) | {"dbtable": table}
        if rewrite:
            options["url"] += "?reWriteBatchedInserts=true"

        def write(frame: DataFrame) -> None:
            rows = flights(frame, self.schema)
            rows.write.format("jdbc").options(**options).mode("append").save()

        self.drain_batches(write, fetch)

    def limit(self, _: str) -> int:
        """Our own plan with only the commit replaced by counting; how many rows were counted."""
        pipeline = self.into("limit_")
        jobs = SparkJobs(self.stage.session, "limit")
        jobs.enter("bench: limit")
        counted = 0
        with pipeline.source as source:
            positions, ends = source.earliest(), source.stable_end()
            while ranges := plan_ranges(positions, ends, self.batch):
                answers = all_of(jobs.run(_counting(pipeline, ranges), shares_of(ranges)))
                counted += sum(one.outcome.counts.rows for one in answers if one.outcome)
                positions |= {tp: range_.end for tp, range_ in ranges.items()}
        return counted

    def jvm_read(self, _: str) -> int:
        """Spark reads the topic and never leaves the JVM: how many records it has seen."""
        seen = [0]

        def look(frame: DataFrame) -> None:
            counted, _length = frame.selectExpr("count(value)", "sum(length(value))").collect()[0]
            seen[0] += counted

        self.drain_batches(look)
        return seen[0]


def encoded(records: int) -> list[bytes]:
    """All rows as messages of a binary COPY."""
    types = [pa.int64(), pa.string(), pa.int32(), pa.timestamp("us", "UTC"), pa.float64()]
    schema = pa.schema(list(zip(row(0), types, strict=True)))
    encoder = pgpq.ArrowToPostgresBinaryEncoder(schema)
    messages = [encoder.write_header()]
    for at in range(0, records, ROWS_A_MESSAGE):
        some = [row(i) for i in range(at, min(at + ROWS_A_MESSAGE, records))]
        messages.append(encoder.write_batch(pa.RecordBatch.from_pylist(some, schema=schema)))
    return [*messages, encoder.finish()]


def jdbc_options(url: str) -> dict[str, str]:
    """Options of Spark's JDBC reader and writer for a PostgreSQL database."""
    parts = urlsplit(url)
    return {
        "url": f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}",
        "user": parts.username or "",
        "password": parts.password or "",
        "driver": "org.postgresql.Driver",
    }


def _counting(pipeline: Pipeline, ranges: Ranges) -> Task[Ranges, TaskResult]:
    """The task of a batch that is counted; its decoder needs the value alone."""
    starts = {tp: range_.start for tp, range_ in ranges.items()}
    counting = CountingSink(uuid.uuid4().hex, starts)
    delivery = Delivery(cast("CommitsChunks", counting), counting)
    needs = pipeline.decoder.needs | {"value"}
    reading = RangeReader(pipeline.source, pipeline.decoder, Unchanged(), needs)
    return partial(commit_chunks, delivery, Fence("limit", 1), Budget(), reading)


def _latency(contest: Sql) -> dict[str, object]:
    """From the last produce acknowledgement to visible rows, with a trigger of zero seconds."""
    stage, seconds, stop = contest.stage, list[float](), StopSignal()
    stage.broker.create_topic(contest.topic, PARTITIONS)
    producer = Producer({"bootstrap.servers": contest.brokers, "linger.ms": 0})
    with contest.fresh("latency") as table, psycopg.connect(contest.url, autocommit=True) as looker:
        run = partial(contest.into(table).run, stop=stop, spark=stage.session)
        runner = Thread(target=run)
        runner.start()
        for burst in range(0, contest.records, _BURST):
            for i in range(burst, burst + _BURST):
                producer.produce(contest.topic, record(i), partition=i % PARTITIONS)
            producer.flush()
            acknowledged = time.monotonic()
            if not _visible(looker, burst + _BURST, acknowledged + 60):
                stage.console.print("[bold red]latency: rows did not appear within a minute")
                sys.exit(1)
            seconds.append(time.monotonic() - acknowledged)
        stop.ask()
        runner.join()
        stage.refuse("latency", wrong_table(contest.url, table, contest.records))
    seconds = sorted(seconds[_WARM:])
    median, p95 = statistics.median(seconds), seconds[int(len(seconds) * 0.95)]
    stage.passed(
        f"{_BURST:,} records from acknowledgement to visible rows",
        f"median {median:.3f} s, 95% {p95:.3f} s", _GOAL_SECONDS, reached=median < _GOAL_SECONDS,
    )  # fmt: skip
    return {"latency_median_seconds": round(median, 3), "latency_p95_seconds": round(p95, 3)}


def _visible(database: psycopg.Connection[tuple[int]], rows: int, deadline: float) -> bool:
    """Poll until the table holds ``rows`` rows."""
    while time.monotonic() < deadline:
        found = database.execute("SELECT count(*) FROM latency").fetchone()
        if found is not None and found[0] >= rows:
            return True
        time.sleep(0.002)
    return False
