"""Spark transforms of the scenarios."""

from __future__ import annotations

from typing import Any


def counted(rows: Any) -> Any:
    """How many rows each group has."""
    from pyspark.sql import functions as F

    groups = rows.groupBy("grp").agg(F.max("id").alias("id"), F.count(F.lit(1)).alias("n"))
    return groups.select("id", "grp", "n")


def fails(rows: Any) -> Any:
    """Names a column that is not there."""
    return rows.select("no_such_column")
