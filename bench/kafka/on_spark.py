"""Oncely on Spark and as a worker, and Spark's own Kafka sink. One session, one batch size."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQueryListener

from bench.kafka.workload import FILTER, SCHEMA, Job
from bench.measure import NO_OPTIONS
from oncely.config import parse
from oncely.core import events
from oncely.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class OnSpark:
    """What both share.

    Attributes:
        session: Spark, already warm when it counts.
        brokers: ``host:port``.
        source: the input topic.
        batch: the most records of a batch.
    """

    session: SparkSession
    brokers: str
    source: str
    batch: int

    def oncely(self, job: Job, target: str) -> float:
        """Exactly once, as `oncely run --until latest` does it; when it had its positions."""
        opened: list[float] = []

        def listen(event: events.Event) -> None:
            if isinstance(event, events.PipelineOpened):
                opened.append(time.time())

        self._pipeline(job, target).run("latest", spark=self.session, listener=listen)
        return opened[0]

    def worker(self, job: Job, target: str) -> float:
        """Exactly once, as one `oncely work --until latest`; when its partitions were assigned."""
        assigned: list[float] = []

        def listen(event: events.Event) -> None:
            if isinstance(event, events.PartitionsChanged) and event.change == "assigned":
                assigned.append(time.time())

        self._pipeline(job, target).work("latest", listener=listen)
        return assigned[0]

    def _pipeline(self, job: Job, target: str) -> Pipeline:
        if job == "bytes":
            form: dict[str, object] = {
                "decode": {"format": "raw", "columns": ["key", "value"]},
                "sink": {"kind": "kafka", "topic": target, "key": "key", "value": "value"},
            }
        else:
            form = {
                "decode": {"format": "json", "schema": SCHEMA},
                "transform": {"sql": f"SELECT * FROM input WHERE {FILTER}"},
                "sink": {"kind": "kafka", "topic": target, "key": "flight", "value": "json"},
            }
        return Pipeline(
            parse(
                {
                    "name": target,
                    "delivery": "exactly_once",
                    "source": {"brokers": self.brokers, "topics": [self.source]},
                    "spark": {"max_records_per_batch": self.batch, "trigger": "0 seconds"},
                    **form,
                }
            )
        )

    def spark(self, job: Job, target: str, fetch: Mapping[str, str] = NO_OPTIONS) -> float:
        """What people do, with Spark's defaults. At least once; when its query started.

        ``fetch``: options of the Kafka reader beside the defaults.
        """
        checkpoint = Path(tempfile.mkdtemp(prefix="bench-checkpoint-"))
        read = (
            self.session.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.brokers)
            .option("subscribe", self.source)
            .option("startingOffsets", "earliest")
            .option("kafka.isolation.level", "read_committed")
            .option("maxOffsetsPerTrigger", str(self.batch))
            .options(**fetch)
            .load()
        )
        try:
            with _started(self.session) as started:
                (
                    (read if job == "bytes" else _late(read))
                    .select("key", "value")
                    .writeStream.format("kafka")
                    .option("kafka.bootstrap.servers", self.brokers)
                    .option("topic", target)
                    .option("checkpointLocation", checkpoint.as_uri())
                    .trigger(availableNow=True)
                    .start()
                    .awaitTermination()
                )
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
        return started.at


def _late(read: DataFrame) -> DataFrame:
    flight = F.from_json(F.col("value").cast("string"), SCHEMA).alias("flight")
    late = read.select("key", flight).where(f"flight.{FILTER}")
    return late.select("key", F.to_json("flight").alias("value"))


class _Started(StreamingQueryListener):  # type: ignore[misc]  # Spark is untyped here
    """When the session's first query started, by the clock of Spark's driver."""

    at = 0.0

    def onQueryStarted(self, event: StreamingQueryListener.QueryStartedEvent) -> None:
        self.at = self.at or datetime.fromisoformat(event.timestamp).timestamp()

    def onQueryProgress(self, event: StreamingQueryListener.QueryProgressEvent) -> None:
        pass

    def onQueryIdle(self, event: StreamingQueryListener.QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: StreamingQueryListener.QueryTerminatedEvent) -> None:
        pass


@contextmanager
def _started(session: SparkSession) -> Iterator[_Started]:
    """Listen to the session; Spark calls ``onQueryStarted`` before ``start`` returns."""
    listener = _Started()
    session.streams.addListener(listener)
    try:
        yield listener
    finally:
        session.streams.removeListener(listener)
