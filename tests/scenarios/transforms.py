"""Spark transforms of the scenarios."""

from __future__ import annotations

import sys
from typing import Any


def counted(rows: Any) -> Any:
    """How many rows each group has."""
    from pyspark.sql import functions as F

    groups = rows.groupBy("grp").agg(F.max("id").alias("id"), F.count(F.lit(1)).alias("n"))
    return groups.select("id", "grp", "n")


def fails(rows: Any) -> Any:
    """Names a column that is not there."""
    return rows.select("no_such_column")


def prints(rows: Any) -> Any:
    """Writes to standard output, and changes nothing."""
    print("a batch of", rows.num_rows)
    return rows


def exits_in_a_worker(rows: Any) -> Any:
    """Ends the process, though not when the driver tries it on no rows."""
    if rows.num_rows:
        sys.exit(3)
    return rows


def exits_in_a_batch(rows: Any) -> Any:
    """The same of a Spark transform: ends the driver when there are rows."""
    if not rows.isEmpty():
        sys.exit(3)
    return rows


def exits_in_a_function(rows: Any) -> Any:
    """A function of Spark's that ends the Python worker."""
    from pyspark.sql import functions as F

    return rows.withColumn("id", F.udf(lambda _: sys.exit(3), "bigint")("id"))


def unchanged(rows: Any) -> Any:
    """Changes nothing."""
    return rows


def by_parity(rows: Any) -> Any:
    """Names the topic of each row, after a shuffle."""
    from pyspark.sql import functions as F

    even = F.col("id") % 2 == 0
    goes = F.when(even, "even").otherwise("odd").alias("goes")
    return rows.repartition("id").select("id", "grp", goes)
