"""The match: contenders in turn, each into a fresh topic, the result checked after each run."""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.kafka import quix, streams
from bench.kafka.check import Expected, committed, settle
from bench.kafka.child import Child, Children
from bench.kafka.clock import appended
from bench.kafka.on_spark import OnSpark
from bench.kafka.workload import JOBS, Job, fill
from bench.measure import (
    IN_BULK,
    Goal,
    Sample,
    Series,
    fetch_settings,
    measured,
    show_goals,
    told,
)
from bench.workload import PARTITIONS
from oncely.errors import Unavailable, WrongInput
from oncely.testing.servers.kafka import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUT = Path("build/bench/kafka.json")
GOALS: tuple[tuple[Job, str, str, float], ...] = (
    ("bytes", "oncely", "spark", 1.2),
    ("json", "oncely", "spark", 1.2),
    ("bytes", "oncely", "spark + fetch", 1.1),
    ("json", "oncely", "spark + fetch", 1.1),
    ("bytes", "oncely", "quixstreams", 4.0),
    ("json", "oncely", "quixstreams", 2.0),
    ("bytes", "oncely", "quixstreams, 2 processes", 2.0),
    ("json", "oncely", "quixstreams, 2 processes", 1.0),
    ("bytes", "oncely", "kafka_streams", 0.8),
    ("json", "oncely", "kafka_streams", 0.8),
    ("bytes", "oncely worker", "quixstreams", 3.0),
    ("json", "oncely worker", "quixstreams", 3.0),
)
"""How many times as fast as each peer we mean to be; Kafka Streams never leaves the JVM."""

BROKER = {"group.initial.rebalance.delay.ms": "500"}
"""For the broker of the bench: both threads of Kafka Streams are there when the group begins.

The default is 3 s. Without any, the second thread's joining would disturb the first one's work.
"""

_INPUT = "flights"
_WARM = frozenset({"oncely", "spark", "spark + fetch", "kafka_streams"})
"""What runs in a JVM, and so also in the round that is not counted."""

Start = Callable[[str, Path], Child | Children]
Run = Callable[[Job, str], float]
"""Does a job into a topic; seconds since 1970 at which it was ready (see bench.kafka.clock)."""


@dataclass
class Runs:
    """The counted runs of one contender at one job.

    Attributes:
        series: from ready to the last visible record, and processor seconds from call to return.
        ready: seconds from the call until it was ready, run by run; not in the rate.
        first: seconds from ready to the first record in the output, run by run; in the rate.
    """

    series: Series
    ready: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)

    def detail(self) -> dict[str, object]:
        """What stands beside the median."""
        return {
            "lowest": round(min(self.series.rates)),
            "highest": round(max(self.series.rates)),
            "ready_seconds": round(statistics.median(self.ready), 2),
            "first_record_seconds": round(statistics.median(self.first), 2),
        }


Results = Mapping[Job, Mapping[str, Runs]]


@dataclass(frozen=True)
class Match:
    """What a run needs beside its contender."""

    broker: Broker
    records: int
    expected: Mapping[Job, Expected]
    console: Console

    def run(self, name: str, run: Run, job: Job, into: Runs | None) -> str:
        """One run into a topic of its own; its rate as a text. A wrong result ends the bench."""
        target = re.sub("[^a-z0-9]+", "-", f"{name}-{job}-{uuid.uuid4().hex[:8]}")
        stamps = {"message.timestamp.type": "LogAppendTime"}
        self.broker.create_topic(target, PARTITIONS, config=stamps)
        called = time.time()
        with measured((self.broker.pid,)) as whole:
            ready = run(job, target)
        settle(self.broker.bootstrap, target)
        wrong = self.expected[job].wrong(committed(self.broker.bootstrap, target))
        if wrong:
            self.console.print(f"[bold red]{name}, {job}: a wrong result scores nothing: {wrong}")
            sys.exit(1)
        first, last = appended(self.broker.directory / "data", target)
        self.broker.delete_topic(target)
        if into is not None:
            into.series.samples.append(Sample(last - ready, whole.cpu_seconds))
            into.ready.append(ready - called)
            into.first.append(first - ready)
        return f"{self.records / (last - ready):,.0f}/s"


def measure(
    spark: SparkSession,
    broker: Broker,
    console: Console,
    *,
    records: int,
    rounds: int,
    batch: int,
    only_peers: bool = False,
) -> None:
    """Measure all, show it, and write :data:`OUT`; exit code 1 when a result was wrong."""
    with ExitStack() as left:
        place = Path(left.enter_context(tempfile.TemporaryDirectory(prefix="oncely-bench-")))
        on_spark = OnSpark(spark, broker.bootstrap, _INPUT, batch)
        runs = {} if only_peers else {"oncely": on_spark.oncely, "oncely worker": on_spark.worker}
        runs |= {
            "spark": on_spark.spark,
            "spark + fetch": lambda job, target: on_spark.spark(job, target, IN_BULK),
        }
        with console.status(f"publishing {records:,} records with keys"):
            fill(broker, _INPUT, records)
            expected = {job: Expected.of(job, records) for job in JOBS}
        runs |= _children(broker.bootstrap, place, left, console, records, expected)
        results = _rounds(Match(broker, records, expected, console), runs, rounds)
    _show(results, console)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(_told(results, records, batch), indent=2) + "\n")
    console.print(f"written: {OUT}")


def _children(
    brokers: str,
    place: Path,
    left: ExitStack,
    console: Console,
    records: int,
    expected: Mapping[Job, Expected],
) -> dict[str, Run]:
    """The contenders in processes of their own; one that can't be had is said aloud."""
    runs: dict[str, Run] = {}

    def asking(child: Child | Children, until: Callable[[Job], int]) -> Run:
        return lambda job, to: int(child.ask(job, _INPUT, to, until(job))) / 1000

    contenders: tuple[tuple[str, Start, Callable[[Job], int]], ...] = (
        ("quixstreams", quix.start, lambda job: len(expected[job].ids)),
        # How many records each process gets is not known: they end when nothing more comes.
        ("quixstreams, 2 processes", quix.start_two, lambda _: 0),
        ("kafka_streams", streams.start, lambda _: records),
    )
    for name, start, until in contenders:
        try:
            with console.status(f"starting {name}"):
                child = start(brokers, place)
                left.enter_context(child)
                runs[name] = asking(child, until)
        except (WrongInput, Unavailable) as error:
            console.print(f"[bold yellow]{name} is not measured: {error}")
    return runs


def _rounds(match: Match, runs: Mapping[str, Run], rounds: int) -> Results:
    results: dict[Job, dict[str, Runs]] = {
        job: {name: Runs(Series(match.records)) for name in runs} for job in JOBS
    }
    for number in range(rounds + 1):
        names = [name for name in runs if number or name in _WARM]
        for job, name in ((job, name) for job in JOBS for name in names):
            into = results[job][name] if number else None
            with match.console.status(f"round {number} of {rounds}: {job}, {name}"):
                rate = match.run(name, runs[name], job, into)
            match.console.print(f"round {number or 'to warm up'} {job:5} {name}: {rate}")
    return results


def _show(results: Results, console: Console) -> None:
    table = Table(title="Kafka to Kafka, records per second")
    for column in ("", "median", "lowest", "highest", "CPU s per million", "ready in, s"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for job, contenders in results.items():
        for name, runs in contenders.items():
            series = runs.series
            rates = [f"{x:,.0f}" for x in (series.rate, min(series.rates), max(series.rates))]
            ready = f"{statistics.median(runs.ready):.1f}"
            table.add_row(f"{job}: {name}", *rates, f"{series.cpu_per_million:.2f}", ready)
    console.print(table)
    show_goals(console, *_all(results))
    console.print(fetch_settings())


def _all(results: Results) -> tuple[dict[str, Series], list[Goal]]:
    """The series of both jobs by job and contender, and the goals whose contenders were there."""
    series = {
        f"{job}: {name}": one.series for job, runs in results.items() for name, one in runs.items()
    }
    goals = [
        (f"{job}: {ours} / {peer}", f"{job}: {ours}", f"{job}: {peer}", goal)
        for job, ours, peer, goal in GOALS
        if {ours, peer} <= results[job].keys()
    ]
    return series, goals


def _told(results: Results, records: int, batch: int) -> dict[str, object]:
    return {
        **told(*_all(results)),
        "detail": {
            job: {name: runs.detail() for name, runs in contenders.items()}
            for job, contenders in results.items()
        },
        "records": records,
        "records_per_batch": batch,
        "fetch": dict(IN_BULK),
    }
