"""Partitioned Avro files: each run has a fresh folder, and every record is checked after it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import polars as pl
from pyspark.sql import functions as F

from bench.files.workload import PARTITION_BY, Events
from bench.match import Contender, Contest, Match, Stage, against, flights
from bench.measure import IN_BULK, NO_OPTIONS, Sample
from oncely.kinds.files.table import table_of
from oncely.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PEERS = ("spark_avro", "spark_avro + repartition", "spark_avro + repartition + fetch")
GOALS = against({("oncely", one): 1.5 for one in PEERS} | {("oncely_clustered", PEERS[-1]): 1.5})
OPEN = 10_000
LIMIT = 1_000_000_000  # bytes of a Python worker
_LEVELS = ("name", "date", "hour")

Rows = Iterator[tuple[str, Mapping[str, Any]]]


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


def measure(stage: Stage) -> None:
    """Rates and memory; into a bucket by S3 when there is one."""
    given, bucket = stage.given, stage.given.bucket
    target = Target.folder if bucket is None else bucket.target
    events = Events(given.records or 3_000_000)
    stage.publish("events", events.records, of=events.value, side_by_side=8)
    contest = Files(stage, "events", events.records, given.batch, events, target)
    fast = partial(contest.spark_avro, repartition=True, fetch=IN_BULK)
    ways = [
        Contender("oncely", contest, contest.oncely),
        Contender(PEERS[0], contest, contest.spark_avro),
        Contender(PEERS[1], contest, partial(contest.spark_avro, repartition=True)),
        Contender("oncely_clustered", contest, partial(contest.oncely, layout="clustered")),
        Contender(PEERS[2], contest, fast),
    ]
    where = "a folder" if bucket is None else "S3"
    title = f"Kafka to Avro in {where} by carrier, date and hour, records per second"
    match = Match(title, ways, GOALS, (stage.broker.pid,), ("files",))
    series = match.play(given.rounds or 3)

    wide = Events(100 * OPEN, OPEN)
    stage.publish("wide", wide.records, of=wide.value, partitions=1)
    one_task = Files(stage, "wide", wide.records, wide.records, wide, Target.folder)
    opened = Contender("wide", one_task, one_task.oncely)
    peak = opened.worker_memory(f"{OPEN:,} open partitions", LIMIT)
    told = match.told(
        series,
        target=where,
        worker_memory_mb=round(peak / 1e6),
        worker_memory_open_partitions=OPEN,
        files={name: one.samples[-1].figures["files"] for name, one in series.items()},
    )
    stage.write("files" if bucket is None else "files-s3", told)


@dataclass(frozen=True)
class Files(Contest):
    """A topic of events.

    Attributes:
        events: what it holds.
        target: where a run writes; given a folder of its own that is removed afterwards.
    """

    events: Events
    target: Callable[[Path], Target]

    @contextmanager
    def fresh(self, name: str) -> Iterator[Target]:
        """A folder or prefix."""
        with tempfile.TemporaryDirectory(prefix="bench-files-") as folder:
            to = self.target(Path(folder) / name)
            try:
                yield to
            finally:
                shutil.rmtree(to.root, ignore_errors=True)

    def wrong(self, place: Target, result: Rows, sample: Sample) -> str | None:
        """What is wrong with the rows, whose files are counted."""
        sample.figures["files"] = sum(1 for _ in place.root.rglob("*.avro"))
        return self.events.wrong(result)

    def oncely(self, target: Target, layout: str = "per_partition") -> Rows:
        """Exactly once, as `oncely run --until latest` does it; what the manifest names."""
        name = target.root.name
        sink = {
            "kind": "files",
            "url": target.url,
            **({"s3": dict(target.s3)} if target.s3 else {}),
            "partition_by": PARTITION_BY,
            "layout": layout,
            "manifest_topic": f"{name}.manifest",
            "flush_interval": "0 seconds",
        }
        pipeline = self.pipeline(name, sink=sink, spark={"max_records_per_batch": self.batch})
        pipeline.run("latest", spark=self.stage.session)
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

        def write(frame: DataFrame) -> None:
            rows = (
                flights(frame)
                .withColumn("name", F.col("carrier"))
                .withColumn("date", F.date_format("time_hour", "yyyy-MM-dd"))
                .withColumn("hour", F.date_format("time_hour", "HH"))
            )
            if repartition:
                rows = rows.repartition(*_LEVELS)
            files = rows.write.partitionBy(*_LEVELS).format("avro")
            files.option("compression", "snappy").mode("append").save(target.spark_url)

        self.drain_batches(write, fetch)
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
