"""The resident memory of a Python worker while it commits one very long range."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import psycopg
from rich.console import Console

from bench import contenders
from bench.contenders import Contest
from bench.measure import peak_worker_memory
from bench.workload import TABLE, publish
from oncely.testing.servers.kafka import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIMIT = 600 << 20


def measure(
    spark: SparkSession, broker: Broker, url: str, records: int, console: Console
) -> dict[str, object]:
    """Drain one partition in one batch, so that one task has all of it."""
    with console.status(f"publishing one partition of {records:,} records"):
        workload = publish(broker, "long", records, partitions=1)
    with psycopg.connect(url, autocommit=True) as database:
        database.execute(TABLE.format("long").encode())
    peak = 0

    def found(highest: int) -> None:
        nonlocal peak
        peak = highest

    contest = Contest(spark, broker.bootstrap, url, workload, records)
    with console.status("one range"), peak_worker_memory(found):
        contenders.oncely(contest, "long")
    wrong = workload.wrong(url, "long")
    if wrong:
        console.print(f"[bold red]{wrong}")
        sys.exit(1)
    verdict = "[green]reached" if peak < LIMIT else "[red]missed"
    console.print(
        f"memory of a Python worker, {records:,} records in one range:"
        f" {peak / 2**20:,.0f} MiB   goal {LIMIT >> 20}   {verdict}"
    )
    return {"worker_memory_mib": round(peak / 2**20), "worker_memory_records": records}
