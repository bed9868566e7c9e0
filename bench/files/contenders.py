"""The two ways from a topic to partitioned Avro files, and how their results are read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import polars as pl

from bench.files.workload import PARTITION_BY, SCHEMA, Events
from oncely.config import parse
from oncely.files.table import table_of
from oncely.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = Iterator[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Contest:
    """What both share.

    Attributes:
        session: Spark, already warm when it counts.
        brokers: ``host:port``.
        events: the topic.
        batch: the most records of a micro-batch.
    """

    session: SparkSession
    brokers: str
    events: Events
    batch: int

    def pipeline(self, root: Path, layout: str = "per_partition") -> Pipeline:
        """Oncely's, into a root of its own."""
        return Pipeline(
            parse(
                {
                    "name": root.name,
                    "delivery": "exactly_once",
                    "source": {"brokers": self.brokers, "topics": [self.events.topic]},
                    "decode": {"format": "json", "schema": SCHEMA},
                    "sink": {
                        "kind": "files",
                        "url": root.as_uri(),
                        "partition_by": PARTITION_BY,
                        "layout": layout,
                        "manifest_topic": f"{root.name}.manifest",
                        "flush_interval": "0 seconds",
                    },
                    "spark": {"max_records_per_batch": self.batch},
                }
            )
        )

    def oncely(self, root: Path, layout: str = "per_partition") -> Rows:
        """Exactly once, as `oncely run --until latest` does it; what the manifest names."""
        pipeline = self.pipeline(root, layout)
        pipeline.run("latest", spark=self.session)
        return _named(pipeline, root)

    def spark_avro(self, root: Path) -> Rows:
        """What people do: ``from_json`` and Spark's partitioned Avro writer. At least once."""
        from pyspark.sql import functions as F

        def write(frame: DataFrame, _: int) -> None:
            value = F.from_json(F.col("value").cast("string"), SCHEMA).alias("v")
            rows = (
                frame.select(value)
                .select("v.*")
                .withColumn("name", F.col("carrier"))
                .withColumn("date", F.date_format("time_hour", "yyyy-MM-dd"))
                .withColumn("hour", F.date_format("time_hour", "HH"))
            )
            files = rows.write.partitionBy("name", "date", "hour").format("avro")
            files.option("compression", "snappy").mode("append").save(str(root))

        checkpoint = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
        try:
            query = (
                self.session.readStream.format("kafka")
                .option("kafka.bootstrap.servers", self.brokers)
                .option("subscribe", self.events.topic)
                .option("startingOffsets", "earliest")
                .option("kafka.isolation.level", "read_committed")
                .option("maxOffsetsPerTrigger", str(self.batch))
                .load()
                .select("value")
                .writeStream.option("checkpointLocation", checkpoint.as_uri())
                .foreachBatch(write)
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
        return _listed(root)


def _named(pipeline: Pipeline, root: Path) -> Rows:
    for path in table_of(pipeline).look().files:
        yield from _rows(root / path, path.rpartition("/")[0])


def _listed(root: Path) -> Rows:
    for path in root.rglob("*.avro"):
        directory = str(path.parent.relative_to(root)).replace("name=", "carrier=", 1)
        yield from _rows(path, unquote(directory))


def _rows(path: Path, directory: str) -> Rows:
    columns = ["id", "carrier", "flight", "dep_delay"]
    for row in pl.read_avro(path, columns=columns).iter_rows(named=True):
        yield directory, row
