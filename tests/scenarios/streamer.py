"""A program that plugs the sink into a streaming DataFrame of its own, to be killed.

``python -m tests.scenarios.streamer ORDER.json``
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from oncely import OncelyError, write_stream
from oncely.artifacts import resolve, spark_jars
from oncely.pipeline import streaming
from oncely.runtimes.spark import session
from oncely.stores.sql.connection import connect
from oncely.testing.faults import KillAt


def frame_of(spark: Any, order: dict[str, Any]) -> Any:
    """Records as rows; with ``stateful`` counted in windows of ten seconds of event time."""
    from pyspark.sql import functions as F

    reader = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", order["brokers"])
        .option("subscribe", order["topic"])
        .option("startingOffsets", order.get("starting", "earliest"))
        .option("maxOffsetsPerTrigger", order.get("max_offsets", 100))
    )
    value = F.from_json(F.col("value").cast("string"), "id BIGINT, at BIGINT")
    rows = (
        reader.load()
        .select(value.alias("v"), "partition", "offset")
        .select("v.id", F.timestamp_seconds("v.at").alias("at"), "partition", "offset")
    )
    if not order.get("stateful"):
        return rows.select("id", "partition", "offset")
    counted = rows.withWatermark("at", "5 seconds").groupBy(F.window("at", "10 seconds")).count()
    return counted.select(F.col("window.start").cast("bigint").alias("start"), "count")


def start(
    order: dict[str, Any], spark: Any, trigger: dict[str, Any], frame: Any | None = None
) -> Any:
    """Start the query."""
    kill = order.get("kill")
    streaming.connect = KillAt(**kill) if kill else connect
    return write_stream(
        frame_of(spark, order) if frame is None else frame,
        name=order["name"],
        url=order["url"],
        table=order["table"],
        checkpoint=order["checkpoint"],
        trigger=trigger,
        brokers=order["brokers"] if order.get("identity", True) else None,
    )


def run(order: dict[str, Any], spark: Any) -> None:
    """Run the query until nothing is left, or until it dies."""
    start(order, spark, {"availableNow": True}).awaitTermination()


def stop_in_batch(order: dict[str, Any], spark: Any) -> None:
    """Stop the query while a task of its first batch runs.

    Raises:
        StreamingQueryException: the query takes the stop for a failure.
    """
    from pyspark.sql import functions as F

    ours = order["checkpoint"] + ".begun"

    @F.udf("bigint")
    def slow(value: int) -> int:
        Path(ours).touch()
        time.sleep(600)
        return value

    frame = frame_of(spark, order).withColumn("id", slow("id"))
    query = start(order, spark, {"processingTime": "0 seconds"}, frame)
    while not Path(ours).exists():
        query.awaitTermination(0.05)
    query.stop()
    if query.exception() is not None:
        raise query.exception()


def main(path: str) -> int:
    """Run the order; an error of ours is told by its exit code."""
    order = json.loads(Path(path).read_text())
    jars = ",".join(map(str, resolve(spark_jars().kafka)))
    conf = {"spark.sql.shuffle.partitions": "2", "spark.jars": jars}
    spark = session.start("streamer", "local[2]", conf)
    try:
        (stop_in_batch if order.get("stop_in_batch") else run)(order, spark)
    except OncelyError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
