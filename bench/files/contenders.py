"""The two ways from a topic to partitioned Avro files, and how their results are read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import polars as pl

from bench.files.workload import PARTITION_BY, SCHEMA, Events
from bench.measure import NO_OPTIONS
from oncely.config import parse
from oncely.files.table import table_of
from oncely.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Rows = Iterator[tuple[str, Mapping[str, Any]]]
_LEVELS = ("name", "date", "hour")


@dataclass(frozen=True)
class Target:
    """Where one run writes.

    Attributes:
        root: where the files can be read afterwards, also when they were written by S3.
        url: as a pipeline names it.
        spark_url: as Spark names it.
        s3: ``[sink.s3]`` of the pipeline.
    """

    root: Path
    url: str
    spark_url: str
    s3: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def folder(cls, root: Path) -> Target:
        """A folder of this machine."""
        return cls(root, root.as_uri(), str(root))


@dataclass(frozen=True)
class Contest:
    """What both share.

    Attributes:
        session: Spark, already warm when it counts.
        brokers: ``host:port``.
        events: the topic.
        batch: the most records of a batch.
    """

    session: SparkSession
    brokers: str
    events: Events
    batch: int

    def pipeline(self, target: Target, layout: str = "per_partition") -> Pipeline:
        """Oncely's, into a root of its own."""
        name = target.root.name
        return Pipeline(
            parse(
                {
                    "name": name,
                    "delivery": "exactly_once",
                    "source": {"brokers": self.brokers, "topics": [self.events.topic]},
                    "decode": {"format": "json", "schema": SCHEMA},
                    "sink": {
                        "kind": "files",
                        "url": target.url,
                        **({"s3": dict(target.s3)} if target.s3 else {}),
                        "partition_by": PARTITION_BY,
                        "layout": layout,
                        "manifest_topic": f"{name}.manifest",
                        "flush_interval": "0 seconds",
                    },
                    "spark": {"max_records_per_batch": self.batch},
                }
            )
        )

    def oncely(self, target: Target, layout: str = "per_partition") -> Rows:
        """Exactly once, as `oncely run --until latest` does it; what the manifest names."""
        pipeline = self.pipeline(target, layout)
        pipeline.run("latest", spark=self.session)
        return _named(pipeline, target.root)

    def spark_avro(
        self, target: Target, *, repartition: bool = False, fetch: Mapping[str, str] = NO_OPTIONS
    ) -> Rows:
        """What people do: ``from_json`` and Spark's partitioned Avro writer. At least once.

        Args:
            repartition: by the partition columns before the writer: a shuffle, and then one task
                writes all of a directory, as ``layout = "clustered"`` does.
            fetch: options of the Kafka reader beside Spark's defaults.
        """
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
            if repartition:
                rows = rows.repartition(*_LEVELS)
            files = rows.write.partitionBy(*_LEVELS).format("avro")
            files.option("compression", "snappy").mode("append").save(target.spark_url)

        checkpoint = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
        try:
            query = (
                self.session.readStream.format("kafka")
                .option("kafka.bootstrap.servers", self.brokers)
                .option("subscribe", self.events.topic)
                .option("startingOffsets", "earliest")
                .option("kafka.isolation.level", "read_committed")
                .option("maxOffsetsPerTrigger", str(self.batch))
                .options(**fetch)
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
        return _listed(target.root)


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
