"""Delta's own library on Spark as an outsider: reads a table, rewrites, vacuums and appends to it.

A program of its own, ``python -m tests.scenarios.delta_spark TABLE``: its Spark has Delta's jars.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from oncely import artifacts

_JARS = ("delta-spark", "delta-storage")


def worked_on(root: Path) -> dict[str, Any]:
    """What Spark has found before it worked on the table, and after."""
    artifacts.resolve(artifacts.spark_jars().delta or "")
    done = subprocess.run(
        [sys.executable, "-m", "tests.scenarios.delta_spark", str(root)],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main(root: str) -> None:
    from pyspark.sql import SparkSession

    jars = [
        str(jar)
        for jar in artifacts.resolve(artifacts.spark_jars().delta or "")
        if jar.name.startswith(_JARS)
    ]
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", ",".join(jars))
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.databricks.delta.snapshotPartitions", "2")  # by default 50 tasks a snapshot
        # By default 10,000 tasks of VACUUM list the table.
        .config("spark.sql.sources.parallelPartitionDiscovery.parallelism", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
        .config("spark.databricks.delta.retentionDurationCheck.enabled", "false")
        .getOrCreate()
    )
    table = f"delta.`{root}`"

    def rows() -> list[list[Any]]:
        return [
            list(row) for row in spark.sql(f"SELECT id, name FROM {table} ORDER BY id").collect()
        ]

    found: dict[str, Any] = {"before": rows()}
    where = "name = 'a b'"
    found["pruned"] = spark.sql(f"SELECT id FROM {table} WHERE {where}").count()
    spark.sql(f"OPTIMIZE {table}").collect()
    spark.sql(f"VACUUM {table} RETAIN 0 HOURS").collect()
    spark.sql(f"INSERT INTO {table} (id, name) VALUES (1000, 'foreign')")
    found["after"] = rows()
    found["told"] = spark.sql(f"DESCRIBE HISTORY {table}").count()
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    _main(sys.argv[1])
