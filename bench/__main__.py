"""Run the benchmark: ``python -m bench [--records N] [--rounds N]``; ``make bench`` runs all."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack

from rich.console import Console

from bench import audit, recorded, shapes, sql, worker
from bench.files import match as files
from bench.kafka import match as kafka
from bench.match import OUT, Stage
from oncely import extras
from oncely.artifacts import POSTGRES_JDBC, resolve, spark_jars
from oncely.runtimes.spark import session
from oncely.testing.servers.kafka import Broker

SPARK_AVRO = "org.apache.spark:spark-avro_2.13:4.0.0"
RESULTS = ("sql", "kafka", "files", "audit", "worker", "shapes")
"""The result files whose ratios are compared with the recorded ones."""

MATCHES = {
    sql.measure: ("sql", "memory", "latency"),
    shapes.measure: ("shapes",),
    kafka.measure: ("kafka",),
    files.measure: ("files",),
    audit.measure: ("audit",),
    worker.measure: ("worker", "worker-memory"),
}


def main() -> int:
    """Measure everything; exit code 1 when a result was wrong, or a ratio fell."""
    given = _options().parse_args()
    console, began = Console(), time.time()
    if slower := extras.absence():
        console.print(slower)
    jars = [jar for one in (POSTGRES_JDBC, SPARK_AVRO, spark_jars().kafka) for jar in resolve(one)]
    with Broker(properties=kafka.BROKER) as broker, ExitStack() as left:
        given.bucket, settings = None, {}
        if given.s3:
            from bench.files import on_s3

            given.bucket, more = left.enter_context(on_s3.serving())
            jars, settings = [*jars, *more], dict(given.bucket.spark_settings())
        settings["spark.jars"] = ",".join(map(str, jars))
        spark = session.start("bench", "local[2,4]", settings)
        for measure, names in MATCHES.items():
            if given.only in (None, *names):
                measure(Stage(spark, broker, console, given))
        spark.stop()
    paths = [OUT / f"{name}.json" for name in RESULTS]
    results = [one for one in paths if one.exists() and one.stat().st_mtime >= began]
    if given.record:
        recorded.record(results, console)
        return 0
    return recorded.compare(results, console)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="bench", description=__doc__)
    options.add_argument(
        "--records",
        type=int,
        help="SQL, files: 3,000,000; Kafka: 1,000,000; audit: 10,000,000; worker: 2,000,000;"
        " shapes: 300,000",
    )
    options.add_argument("--rounds", type=int, help="SQL: 5; shapes: 2; others: 3")
    options.add_argument("--batch", type=int, default=3_000_000, help="records of a batch")
    options.add_argument("--range", type=int, default=5_000_000, help="records of the memory test")
    only = [name for names in MATCHES.values() for name in names]
    options.add_argument("--only", choices=only, default=None)
    options.add_argument("--minutes", type=float, default=30.0, help="of worker-memory")
    options.add_argument("--s3", action="store_true", help="files: into a local S3 server")
    options.add_argument("--record", action="store_true", help="keep the ratios of this run")
    options.add_argument("--only-peers", action="store_true", help="Kafka: without Oncely")
    return options


if __name__ == "__main__":
    sys.exit(main())
