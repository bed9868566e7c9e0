"""The Spark transform of the first wave's pipelines."""

from __future__ import annotations

from typing import Any


def shouted(rows: Any) -> Any:
    """Each row with its group in capitals."""
    from pyspark.sql import functions as F

    return rows.withColumn("grp", F.upper("grp"))
