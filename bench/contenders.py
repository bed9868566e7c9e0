"""The ways through the same topic, each as one streaming query that drains it.

Peers are what people have: Spark's defaults. What we set otherwise (how much the Kafka client
fetches at once) is a part of ours, and of the limit, which is our plan; one row gives it to the
faster peer.

All read in the same micro-batches with the same Spark session, and all that write have the
same table without an index and the same durability (PostgreSQL's default: fsync, synchronous
commit).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from bench.counting import CountingSink
from bench.measure import NO_OPTIONS
from bench.workload import SCHEMA, Workload
from oncely.commit.delivery import Delivery
from oncely.commit.path import Outcome
from oncely.config import parse
from oncely.core.budget import Budget
from oncely.core.claim import Fence
from oncely.pipeline import Pipeline
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.spark.offset_log import batch_ranges
from oncely.runtimes.spark.options import IN_BULK
from oncely.runtimes.spark.reading import Reading
from oncely.runtimes.spark.task import CommitPlan, collect_all, commit_chunks
from oncely.sinks.base import CommitsChunks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Contest:
    """What all contenders share."""

    session: SparkSession
    brokers: str
    url: str
    workload: Workload
    batch: int

    def pipeline(self, name: str, table: str) -> Pipeline:
        """Oncely's pipeline for the topic."""
        return Pipeline(
            parse(
                {
                    "name": name,
                    "delivery": "exactly_once",
                    "source": {"brokers": self.brokers, "topics": [self.workload.topic]},
                    "decode": {"format": "json", "schema": SCHEMA},
                    "sink": {"kind": "sql", "url": self.url, "table": table},
                    "spark": {"max_records_per_batch": self.batch, "trigger": "0 seconds"},
                }
            )
        )

    def drain(
        self,
        columns: list[str],
        on_batch: Callable[[DataFrame, int, Path], object],
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
                .foreachBatch(lambda frame, number: on_batch(frame, number, checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)


def oncely(contest: Contest, table: str) -> None:
    """Exactly once, as `oncely run --until latest` does it."""
    contest.pipeline(table, table).run("latest", spark=contest.session)


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

    def write(frame: DataFrame, _: int, __: Path) -> None:
        value = F.from_json(F.col("value").cast("string"), SCHEMA).alias("v")
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
    counted = 0

    def count(frame: DataFrame, number: int, checkpoint: Path) -> None:
        nonlocal counted
        beginning = {tp: 0 for tp in pipeline.source.partitions()}
        ranges = batch_ranges(checkpoint, number, beginning)
        starts = {tp: range_.start for tp, range_ in ranges.items()}
        counting = CountingSink(f"{checkpoint.name}/{number}", starts)
        delivery = Delivery(cast("CommitsChunks", counting), counting)
        topic = contest.workload.topic
        reading = Reading(pipeline.source, pipeline.decoder, Unchanged(), starts, topic)
        plan = CommitPlan(delivery, Fence("limit", 1), Budget(), reading)
        counted += sum(one.counts.rows for one in collect_all(frame, commit_chunks, plan, Outcome))

    # The same plan, so it also reads as ours does.
    contest.drain(["partition", "offset", "value"], count, more=IN_BULK)
    return counted


def jvm_read(contest: Contest) -> int:
    """Spark reads the topic and never leaves the JVM: how many records it has seen."""
    seen = 0

    def look(frame: DataFrame, _: int, __: Path) -> None:
        nonlocal seen
        counted, _length = frame.selectExpr("count(value)", "sum(length(value))").collect()[0]
        seen += counted

    contest.drain(["value"], look)
    return seen
