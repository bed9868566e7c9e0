"""JVMs of tests start in half the time: classes come out of an archive (JEP 350, CDS).

A run starts some eighty JVMs of Spark's and as many brokers, most for seconds, and half of such a
life is reading and verifying the same classes. ``python -m tests.class_archives`` makes the
archives, once for each Java and each place of PySpark; where there is none, or it does not fit,
the JVM reads its jars as ever.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from oncely import artifacts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
"""What lives for seconds and is compiled best is compiled in vain."""
_ROOMY = "-XX:ReservedCodeCacheSize=240m -XX:MetaspaceSize=256m -Xmn300m"
"""A Spark of many tests: with one compiler the code cache is 48 MB by default, and what is thrown
out of a full one is compiled again; by default a metaspace of 21 MB starts a full collection."""
_SILENT = "-Xlog:disable -Xlog:all=error:stderr"
_SPARK, _KAFKA = "SPARK_SUBMIT_OPTS", "ONCELY_KAFKA_OPTS"


def options() -> dict[str, str]:
    """Environment variables for Spark's JVM and Kafka's."""
    return {_SPARK: f"{_using(_spark_archive())} {_ROOMY}", _KAFKA: _using(_kafka_archive())}


def _using(archive: Path) -> str:
    return f"{QUICK} -XX:SharedArchiveFile={archive}" if archive.exists() else QUICK


def _kafka_archive() -> Path:
    return _archive("kafka", artifacts.resolve(artifacts.KAFKA_BROKER)[0].parent)


def _spark_archive() -> Path:
    return _archive("spark", artifacts.spark_home() / "jars")


def _archive(name: str, jars: Path) -> Path:
    """An archive belongs to a Java, and to jars in a folder."""
    java = Path(artifacts.java()).resolve()
    told = f"{java} {java.stat().st_mtime_ns} {jars} {jars.stat().st_mtime_ns}"
    key = hashlib.sha256(told.encode()).hexdigest()[:12]
    return artifacts.cache_directory() / "classes" / f"{name}-{key}.jsa"


def make() -> None:
    """Make the archives that are missing."""
    wanted = {_spark_archive(): _SPARK, _kafka_archive(): _KAFKA}
    missing = {archive: variable for archive, variable in wanted.items() if not archive.exists()}
    if missing:
        print("Archiving classes, so that the tests' JVMs start in half the time (once)")
    for archive, variable in missing.items():
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
            made = Path(folder) / archive.name
            told = f"{QUICK} {_SILENT} -XX:ArchiveClassesAtExit={made}"
            life = [sys.executable, "-m", "tests.class_archives", variable]
            done = subprocess.run(
                life,
                env={**os.environ, variable: told},
                capture_output=True,
                text=True,
                check=False,
            )
            if made.exists():
                made.rename(archive)
            else:
                print(f"no archive of {archive.name}: {done.stdout}{done.stderr}"[:2000])


def _live_as_spark() -> None:
    """Load the classes that most tests need."""
    from oncely.runtimes.spark import session

    spark = session.start("archive", "local[2]", {})
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        lines.mkdir()
        (lines / "0.txt").write_text('{"a": 1}\n{"a": 2}\n')

        def take(frame: DataFrame, _: int) -> None:
            frame.groupBy("a").count().mapInArrow(lambda rows: rows, "a INT, n LONG").collect()

        (
            spark.readStream.text(str(lines))
            .selectExpr("from_json(value, 'a INT').a AS a")
            .writeStream.option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .foreachBatch(take)
            .start()
            .awaitTermination()
        )
    session.stop(spark, 120.0)


def _live_as_kafka() -> None:
    from confluent_kafka import Consumer, Producer

    from oncely.testing.servers.kafka import Broker

    with Broker() as broker:
        broker.create_topic("t", 2)
        producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "t"})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce("t", b"x")
        producer.commit_transaction()
        group = {"group.id": "g", "auto.offset.reset": "earliest"}
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, **group})
        consumer.subscribe(["t"])
        consumer.poll(20.0)
        consumer.close()
        broker.stop(120.0)


if __name__ == "__main__":
    if sys.argv[1:] == [_SPARK]:
        _live_as_spark()
    elif sys.argv[1:] == [_KAFKA]:
        _live_as_kafka()
    else:
        make()
