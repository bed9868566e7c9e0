"""Python workers of a session of ours are those of our daemon."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession


def test_tasks_read_from_connections_that_acknowledge_at_once(spark: SparkSession) -> None:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import daemon

        for _ in batches:
            main: Any = sys.modules["__main__"]
            told = [main.__spec__.name, type(daemon.os).__name__]
            yield pa.RecordBatch.from_pydict({"told": told})

    rows = spark.range(1).mapInArrow(task, "told string").collect()
    assert [row.told for row in rows] == ["oncely.runtimes.spark.daemon", "_Os"]
