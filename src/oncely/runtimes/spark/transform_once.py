"""A Spark transform applied to a few rows that the driver holds already."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from oncely.runtimes.jobs.base import Attempt, all_of
from oncely.runtimes.spark.batch_commit import Transform
from oncely.runtimes.spark.frames import arrow_schema, spark_schema
from oncely.runtimes.spark.jobs import answered, collected
from oncely.secrets import carried

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def transform_rows(session: SparkSession, transform: Transform, rows: pa.Table) -> pa.Table:
    """Run the transform over ``rows`` as if they were a batch; all columns are nullable."""
    nullable = pa.schema([field.with_nullable(True) for field in rows.schema])
    given = carried(partial(_given, rows.cast(nullable)))
    made = transform(session.range(0, 1, 1, 1).mapInArrow(given, spark_schema(nullable)))
    empty = arrow_schema(made.schema).empty_table()
    parts = all_of(collected(answered(made, _tables)), pa.Table)
    return pa.concat_tables([empty, *(part.cast(empty.schema) for part in parts)])


def _given(rows: pa.Table, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in numbers:
        yield from rows.to_batches()


def _tables(batches: Iterable[pa.RecordBatch], attempt: Attempt) -> Generator[pa.Table, None, None]:
    del attempt
    yield from (pa.Table.from_batches([batch]) for batch in batches)
