"""The control: the answer that people find on the web, ``foreachBatch`` and Spark's JDBC writer.

It is written as its friends would write it: ``from_json``, a checkpoint directory that is kept
over restarts, ``reWriteBatchedInserts``, task retries, a SIGTERM handler that stops the query.
What ``from_json`` can't read is dropped, and so are texts with a NUL character, because the first
of them would stop the job for ever.

The trouble is not in these lines but between them: the rows of a batch become visible task by
task, and the checkpoint learns of it when all is over. Whatever stops the job in between makes
it write the batch again.

Run by the demo as ``python -m demo.control CHECKPOINT``, servers named by the environment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, from_json, udf

from oncely.artifacts import POSTGRES_JDBC, resolve, spark_jars

TABLE = "flights"
APPLICATION = "control"
SCHEMA = (
    "id BIGINT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING,"
    " time_hour TIMESTAMP, dep_delay DOUBLE, arr_delay DOUBLE, distance INT"
)
_RECORDS_A_BATCH = 20_000  # as in examples/flights.toml


def main() -> None:
    """Run until what was in the topic at the start is written, or until SIGTERM."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    spark = _session()
    is_late = udf(_is_late, "boolean")
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", os.environ["FLIGHTS_BROKERS"])
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", "flights")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", _RECORDS_A_BATCH)
        .load()
    )
    rows = (
        records.select(from_json(col("value").cast("string"), SCHEMA).alias("flight"))
        .select("flight.*")
        .where(col("id").isNotNull())
        .where(col("tailnum").isNull() | ~col("tailnum").contains("\0"))
        .withColumn("late", is_late("dep_delay"))
    )
    options = _jdbc_options(os.environ["FLIGHTS_POSTGRES_URL"])

    def write(batch: DataFrame, _: int) -> None:
        batch.write.format("jdbc").options(**options).mode("append").save()

    query = (
        rows.writeStream.foreachBatch(write)
        .option("checkpointLocation", Path(sys.argv[1]).absolute().as_uri())
        .trigger(availableNow=True)
        .start()
    )
    while not query.awaitTermination(0.2):
        if told.is_set():
            query.stop()
            break
    spark.stop()


def _is_late(delay: float | None) -> bool | None:
    return None if delay is None else delay > 15


def _session() -> SparkSession:
    jars = [*resolve(spark_jars().kafka), *resolve(POSTGRES_JDBC)]
    session: SparkSession = (
        SparkSession.builder.appName("control")
        .master("local[*,4]")
        .config("spark.jars", ",".join(map(str, jars)))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.pyspark.python", sys.executable)
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def _jdbc_options(url: str) -> dict[str, str]:
    """The JDBC writer's options for a libpq URL."""
    parts = urlsplit(url)
    where = f"//{parts.hostname}:{parts.port}{parts.path}"
    return {
        "url": f"jdbc:postgresql:{where}?reWriteBatchedInserts=true&ApplicationName={APPLICATION}",
        "driver": "org.postgresql.Driver",
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "dbtable": TABLE,
        "batchsize": "1000",
    }


if __name__ == "__main__":
    main()
