"""From the last produce acknowledgement to visible rows, with a trigger of zero seconds."""

from __future__ import annotations

import statistics
import sys
import time
from threading import Thread
from typing import TYPE_CHECKING

import psycopg
from confluent_kafka import Producer
from rich.console import Console

from bench.contenders import Contest
from bench.workload import PARTITIONS, TABLE, Workload, record
from oncely.runtimes.stop import StopSignal
from oncely.testing.servers.kafka import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BURST = 1_000
BURSTS = 25
WARM = 5
GOAL_SECONDS = 0.7


def measure(spark: SparkSession, broker: Broker, url: str, console: Console) -> dict[str, object]:
    """Send bursts, one after the other is visible."""
    broker.create_topic("latency", PARTITIONS)
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(TABLE.format("latency").encode())
    contest = Contest(spark, broker.bootstrap, url, Workload("latency", 0), 500_000)
    stop = StopSignal()
    runner = Thread(
        target=lambda: contest.pipeline("latency", "latency").run(stop=stop, spark=spark)
    )
    runner.start()
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
    seconds = []
    with console.status("latency"), psycopg.connect(url, autocommit=True) as database:
        for burst in range(BURSTS + WARM):
            for i in range(burst * BURST, (burst + 1) * BURST):
                producer.produce("latency", record(i), partition=i % PARTITIONS)
            producer.flush()
            acknowledged = time.monotonic()
            if not _visible(database, (burst + 1) * BURST, acknowledged + 60):
                console.print("[bold red]latency: rows did not appear within a minute")
                sys.exit(1)
            seconds.append(time.monotonic() - acknowledged)
    stop.ask()
    runner.join()
    wrong = Workload("latency", (BURSTS + WARM) * BURST).wrong(url, "latency")
    if wrong:
        console.print(f"[bold red]{wrong}")
        sys.exit(1)
    seconds = sorted(seconds[WARM:])
    median, p95 = statistics.median(seconds), seconds[int(len(seconds) * 0.95)]
    verdict = "[green]reached" if median < GOAL_SECONDS else "[red]missed"
    console.print(
        f"{BURST:,} records from acknowledgement to visible rows: median {median:.3f} s,"
        f" 95% {p95:.3f} s   goal {GOAL_SECONDS}   {verdict}"
    )
    return {"latency_median_seconds": round(median, 3), "latency_p95_seconds": round(p95, 3)}


def _visible(database: psycopg.Connection[tuple[int]], rows: int, deadline: float) -> bool:
    """Poll until the table holds ``rows`` rows."""
    while time.monotonic() < deadline:
        found = database.execute("SELECT count(*) FROM latency").fetchone()
        if found is not None and found[0] >= rows:
            return True
        time.sleep(0.002)
    return False
