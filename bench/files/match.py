"""The match: contenders in turn, each into a fresh folder, every record checked after each run."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.files.contenders import Contest, Rows, Target
from bench.files.on_s3 import Bucket
from bench.files.workload import Events, publish
from bench.measure import (
    IN_BULK,
    Goal,
    Sample,
    Series,
    fetch_settings,
    measured,
    peak_worker_memory,
    show_goals,
    told,
)
from oncely.testing.servers.kafka import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUT = Path("build/bench/files.json")
GOAL = 1.5
PEERS = ("spark_avro", "spark_avro + repartition", "spark_avro + repartition + fetch")
GOALS: tuple[Goal, ...] = (
    *((f"oncely / {peer}", "oncely", peer, GOAL) for peer in PEERS),
    ("oncely_clustered / " + PEERS[-1], "oncely_clustered", PEERS[-1], GOAL),
)
OPEN = 10_000
LIMIT = 1_000  # MB (10^6 bytes) for a Python worker


NewTarget = Callable[[Path], Target]
"""Where a run writes; given a folder of its own that is removed afterwards."""


def measure(
    spark: SparkSession,
    broker: Broker,
    console: Console,
    *,
    records: int,
    rounds: int,
    batch: int,
    bucket: Bucket | None = None,
) -> None:
    """Rates and memory; written to :data:`OUT`. Ends with exit code 1 when a result was wrong.

    Args:
        bucket: write into it by S3, not into a folder.
    """
    with console.status(f"publishing {records:,} events"):
        events = publish(broker, Events("events", records))
    contest = Contest(spark, broker.bootstrap, events, batch)
    runs = _contenders(contest)
    target = Target.folder if bucket is None else bucket.target
    series = {name: Series(records) for name in runs}
    files: dict[str, int] = {}
    for number in range(-1, rounds):  # the first round warms the JVM and is not counted
        for name, run in runs.items():
            with console.status(f"files, round {number + 1} of {rounds}: {name}"):
                one, files[name] = _run(broker, run, events, console, name, target)
            if number >= 0:
                series[name].samples.append(one)
                console.print(f"round {number + 1} {name}: {records / one.seconds:,.0f}/s")
    where = "a folder" if bucket is None else "S3"
    _show(console, series, files, where)
    peak = _memory(spark, broker, console)
    out = OUT if bucket is None else OUT.with_name("files-s3.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        **told(series, GOALS),
        "target": where,
        "fetch": dict(IN_BULK),
        "worker_memory_mb": peak,
        "worker_memory_open_partitions": OPEN,
        "files": files,
        "records": records,
        "records_per_batch": batch,
    }
    out.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written: {out}")


def _contenders(contest: Contest) -> dict[str, Callable[[Target], Rows]]:
    """The ways in the order of a round."""
    return {
        "oncely": contest.oncely,
        "spark_avro": contest.spark_avro,
        "spark_avro + repartition": lambda to: contest.spark_avro(to, repartition=True),
        "oncely_clustered": lambda to: contest.oncely(to, "clustered"),
        "spark_avro + repartition + fetch": lambda to: contest.spark_avro(
            to, repartition=True, fetch=IN_BULK
        ),
    }


def _run(
    broker: Broker,
    run: Callable[[Target], Rows],
    events: Events,
    console: Console,
    name: str,
    target: NewTarget,
) -> tuple[Sample, int]:
    """One run into a folder of its own; its sample, and how many files it made."""
    place = Path(tempfile.mkdtemp(prefix="bench-files-"))
    to = target(place / f"lake-{uuid.uuid4().hex[:8]}")
    try:
        with measured((broker.pid,)) as one:
            rows = run(to)
        wrong = events.wrong(rows)
        if wrong:
            console.print(f"[bold red]{name}: a wrong result scores nothing: {wrong}")
            sys.exit(1)
        return one, sum(1 for _ in to.root.rglob("*.avro"))
    finally:
        shutil.rmtree(to.root, ignore_errors=True)
        shutil.rmtree(place)


def _memory(spark: SparkSession, broker: Broker, console: Console) -> int:
    """The most that a Python worker held with :data:`OPEN` directories open, in MB."""
    with console.status(f"{OPEN:,} open partitions"):
        events = publish(broker, Events("wide", 100 * OPEN, OPEN), partitions=1)
        contest = Contest(spark, broker.bootstrap, events, events.records)
        peaks: list[int] = []
        with peak_worker_memory(peaks.append):
            _run(broker, contest.oncely, events, console, "10,000 partitions", Target.folder)
    peak = round(peaks[0] / 1e6)
    verdict = "[green]reached" if peak < LIMIT else "[red]missed"
    console.print(
        f"memory of a Python worker, {OPEN:,} open partitions, {events.records:,} records:"
        f" {peak:,} MB   goal {LIMIT:,}   {verdict}"
    )
    return peak


def _show(console: Console, series: dict[str, Series], files: dict[str, int], where: str) -> None:
    table = Table(title=f"Kafka to Avro in {where} by carrier, date and hour, records per second")
    for column in ("", "median", "lowest", "highest", "CPU s per million", "files"):
        table.add_column(column, justify="left" if not column else "right")
    for name, one in series.items():
        rates = [f"{rate:,.0f}" for rate in (one.rate, min(one.rates), max(one.rates))]
        table.add_row(name, *rates, f"{one.cpu_per_million:.2f}", f"{files[name]:,}")
    console.print(table)
    show_goals(console, series, GOALS)
    console.print(fetch_settings())
