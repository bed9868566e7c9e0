"""The ways through the same topic, each of which drains it once.

Peers are what people have: streaming queries with Spark's defaults; in one row the faster peer
fetches as much at once as the Java client is made for. The limit is our plan.

All read in batches of the same size with the same Spark session, and all that write have the
same table without an index and the same durability (PostgreSQL's default: fsync, synchronous
commit).
"""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import pgpq
import psycopg
import pyarrow as pa

from bench.counting import CountingSink
from bench.measure import NO_OPTIONS
from bench.workload import AVRO, SCHEMA, Workload, row
from oncely.commit.delivery import Delivery
from oncely.commit.path import Outcome
from oncely.config import parse
from oncely.core.budget import Budget
from oncely.core.claim import Fence
from oncely.pipeline import Pipeline
from oncely.runtimes.batches.plan import Ranges, plan_ranges, shares_of
from oncely.runtimes.batches.reading import Reading
from oncely.runtimes.batches.task import CommitPlan, commit_chunks
from oncely.runtimes.jobs.base import all_of
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.spark.jobs import SparkJobs
from oncely.sinks.base import CommitsChunks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_A_MESSAGE = 10_000
"""Of COPY alone; a message of about 600 KB."""


@dataclass(frozen=True)
class Contest:
    """What all contenders share."""

    session: SparkSession
    brokers: str
    url: str
    workload: Workload
    batch: int
    schema: str = SCHEMA

    def pipeline(self, name: str, table: str, decode: Mapping[str, str] = NO_OPTIONS) -> Pipeline:
        """Oncely's pipeline for the topic; records are JSON unless ``decode`` says otherwise."""
        return Pipeline(
            parse(
                {
                    "name": name,
                    "delivery": "exactly_once",
                    "source": {"brokers": self.brokers, "topics": [self.workload.topic]},
                    "decode": dict(decode) or {"format": "json", "schema": self.schema},
                    "sink": {
                        "kind": "sql",
                        "url": self.url,
                        "table": table,
                        "max_rejects": self.workload.records,
                    },
                    "spark": {"max_records_per_batch": self.batch, "trigger": "0 seconds"},
                }
            )
        )

    def drain(
        self,
        columns: list[str],
        on_batch: Callable[[DataFrame], object],
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Run a query over the whole topic with a function for each batch.

        ``more`` options are for the reader; without any it is what Spark's users have.
        """
        checkpoint = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
        try:
            query = (
                self.session.readStream.format("kafka")
                .option("kafka.bootstrap.servers", self.brokers)
                .option("subscribe", self.workload.topic)
                .option("startingOffsets", "earliest")
                .option("kafka.isolation.level", "read_committed")
                .option("maxOffsetsPerTrigger", str(self.batch))
                .options(**(more or {}))
                .load()
                .select(*columns)
                .writeStream.option("checkpointLocation", checkpoint.as_uri())
                .foreachBatch(lambda frame, _: on_batch(frame))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)


def oncely(contest: Contest, table: str) -> None:
    """Exactly once, as `oncely run --until latest` does it."""
    contest.pipeline(table, table).run("latest", spark=contest.session)


def oncely_avro(contest: Contest, table: str) -> None:
    """The same with records of Avro, without a registry."""
    with tempfile.NamedTemporaryFile("w", suffix=".avsc") as schema:
        json.dump(AVRO, schema)
        schema.flush()
        decode = {"format": "avro", "schema_file": schema.name}
        contest.pipeline(table, table, decode).run("latest", spark=contest.session)


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


def copy(contest: Contest, table: str, messages: list[bytes]) -> None:
    """COPY alone: rows that are encoded already, in one session and one transaction."""
    statement = f"COPY {table} FROM STDIN WITH (FORMAT binary)".encode()
    with psycopg.connect(contest.url) as database, database.cursor().copy(statement) as rows:
        for message in messages:
            rows.write(message)


def jdbc(
    contest: Contest, table: str, *, rewrite: bool, fetch: Mapping[str, str] = NO_OPTIONS
) -> None:
    """What people do: ``from_json`` and Spark's JDBC append. At least once.

    ``fetch``: options of the Kafka reader beside Spark's defaults.
    """
    from pyspark.sql import functions as F

    options = jdbc_options(contest.url) | {"dbtable": table}
    if rewrite:
        options["url"] += "?reWriteBatchedInserts=true"

    def write(frame: DataFrame) -> None:
        value = F.from_json(F.col("value").cast("string"), contest.schema).alias("v")
        rows = frame.select(value).select("v.*")
        rows.write.format("jdbc").options(**options).mode("append").save()

    contest.drain(["value"], write, more=fetch)


def jdbc_options(url: str) -> dict[str, str]:
    """Options of Spark's JDBC reader and writer for a PostgreSQL database."""
    parts = urlsplit(url)
    return {
        "url": f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}",
        "user": parts.username or "",
        "password": parts.password or "",
        "driver": "org.postgresql.Driver",
    }


def limit(contest: Contest) -> int:
    """Our own plan with only the commit replaced by counting; how many rows were counted."""
    pipeline = contest.pipeline("limit", "limit_")
    jobs = SparkJobs(contest.session, "limit")
    jobs.enter("bench: limit")
    counted = 0
    with pipeline.source as source:
        positions, ends = source.earliest(), source.stable_end()
        while ranges := plan_ranges(positions, ends, contest.batch):
            work = partial(commit_chunks, _counting(pipeline, ranges))
            outcomes = all_of(jobs.run(work, shares_of(ranges)), Outcome)
            counted += sum(one.counts.rows for one in outcomes)
            positions |= {tp: range_.end for tp, range_ in ranges.items()}
    return counted


def _counting(pipeline: Pipeline, ranges: Ranges) -> CommitPlan:
    """The plan of a batch that is counted; its decoder needs the value alone."""
    starts = {tp: range_.start for tp, range_ in ranges.items()}
    counting = CountingSink(uuid.uuid4().hex, starts)
    delivery = Delivery(cast("CommitsChunks", counting), counting)
    needs = pipeline.decoder.needs | {"value"}
    reading = Reading(pipeline.source, pipeline.decoder, Unchanged(), needs)
    return CommitPlan(delivery, Fence("limit", 1), Budget(), reading)


def jvm_read(contest: Contest) -> int:
    """Spark reads the topic and never leaves the JVM: how many records it has seen."""
    seen = 0

    def look(frame: DataFrame) -> None:
        nonlocal seen
        counted, _length = frame.selectExpr("count(value)", "sum(length(value))").collect()[0]
        seen += counted

    contest.drain(["value"], look)
    return seen
