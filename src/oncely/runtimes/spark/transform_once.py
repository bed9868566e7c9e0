"""A Spark transform applied to a few rows that the driver holds already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from oncely.runtimes.spark.batch_commit import Transform

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def transform_rows(session: SparkSession, transform: Transform, rows: pa.Table) -> pa.Table:
    """Run the transform over ``rows`` as if they were a micro-batch; all columns are nullable."""
    from pyspark.sql.pandas.types import from_arrow_schema

    nullable = pa.schema([field.with_nullable(True) for field in rows.schema])
    frame = session.createDataFrame(rows.cast(nullable), from_arrow_schema(nullable))
    return transform(frame).toArrow()
