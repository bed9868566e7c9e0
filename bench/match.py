"""One match for all benchmarks: contenders in turn, each result checked, and a report.

A contest is a topic and one kind of place to move it to; a contender is one way of doing that.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from bench.measure import (
    IN_BULK,
    NO_OPTIONS,
    Goal,
    Sample,
    Series,
    measured,
    peak_worker_memory,
    ratio,
    told,
)
from bench.workload import SCHEMA, publish
from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

OUT = Path("build/bench")


@dataclass(frozen=True)
class Stage:
    """What all matches share: a Spark session, a broker, and the options of the command."""

    session: SparkSession
    broker: Broker
    console: Console
    given: argparse.Namespace

    def publish(self, topic: str, records: int, **options: Any) -> None:
        """Fill a topic, see :func:`bench.workload.publish`."""
        with self.console.status(f"publishing {records:,} records into {topic}"):
            publish(self.broker, topic, records, **options)

    @contextmanager
    def database(self, name: str) -> Iterator[tuple[str, int]]:
        """A new PostgreSQL server: the URL of an empty database, and its process."""
        with Postgres() as postgres:
            yield postgres.create_database(name), postgres.pid

    def passed(self, what: str, shown: str, goal: object, *, reached: bool) -> None:
        """Print a figure and whether its goal was reached."""
        verdict = "[green]reached" if reached else "[red]missed"
        self.console.print(f"{what}: {shown}   goal {goal}   {verdict}")

    def refuse(self, name: str, wrong: str | None) -> None:
        """End the bench when a result is wrong: a fast wrong run scores nothing."""
        if wrong:
            self.console.print(f"[bold red]{name}: a wrong result scores nothing: {wrong}")
            sys.exit(1)

    def write(self, name: str, result: Mapping[str, object]) -> None:
        """Write a result file."""
        path = OUT / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        self.console.print(f"written: {path}")


@dataclass(frozen=True)
class Contest:
    """A topic, and a kind of place to move it to.

    Attributes:
        stage: the servers.
        topic: its name.
        records: how many it holds; ids run from 0.
        batch: the most records of a batch.
    """

    stage: Stage
    topic: str
    records: int
    batch: int

    @property
    def brokers(self) -> str:
        """``host:port``."""
        return self.stage.broker.bootstrap

    def fresh(self, name: str) -> AbstractContextManager[Any]:
        """An empty place of that name, removed at the end of the context."""
        raise NotImplementedError

    def wrong(self, place: Any, result: Any, sample: Sample) -> str | None:
        """What is wrong with a place after a run that gave ``result``, or None.

        It adds to the sample what only the place tells.
        """
        raise NotImplementedError

    def pipeline(self, name: str, **parts: Mapping[str, object]) -> Pipeline:
        """Oncely's pipeline for the topic; records are JSON unless a part says otherwise."""
        return Pipeline(
            parse(
                {
                    "name": name,
                    "delivery": "exactly_once",
                    "source": {"brokers": self.brokers, "topics": [self.topic]},
                    "decode": {"format": "json", "schema": SCHEMA},
                    "spark": {"max_records_per_batch": self.batch, "trigger": "0 seconds"},
                    **parts,
                }
            )
        )

    def drain(
        self,
        to: Callable[[DataFrame], DataStreamWriter],
        fetch: Mapping[str, str] = NO_OPTIONS,
    ) -> None:
        """Run a query over the whole topic.

        ``fetch`` options are for the reader; without any it is what Spark's users have.
        """
        read = (
            self.stage.session.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.brokers)
            .option("subscribe", self.topic)
            .option("startingOffsets", "earliest")
            .option("kafka.isolation.level", "read_committed")
            .option("maxOffsetsPerTrigger", str(self.batch))
            .options(**fetch)
            .load()
        )
        prefix = "bench-checkpoint-"
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
            written = to(read).option("checkpointLocation", Path(folder).as_uri())
            written.trigger(availableNow=True).start().awaitTermination()

    def drain_batches(
        self, write: Callable[[DataFrame], object], fetch: Mapping[str, str] = NO_OPTIONS
    ) -> None:
        """The same with a function for the values of each batch."""
        self.drain(
            lambda read: read.select("value").writeStream.foreachBatch(lambda one, _: write(one)),
            fetch,
        )


def flights(frame: DataFrame, schema: str = SCHEMA) -> DataFrame:
    """The rows in the values of JSON, as Spark's users read them."""
    return frame.select(F.from_json(F.col("value").cast("string"), schema).alias("v")).select("v.*")


@dataclass(frozen=True)
class Contender:
    """One way of moving a topic.

    Attributes:
        name: of its series.
        contest: prepares its place and checks its result.
        run: moves everything into the place; it is measured. Its answer is for the check.
        warm: whether it also takes part in the round that is not counted, as JVMs must.
    """

    name: str
    contest: Contest
    run: Callable[[Any], Any]
    warm: bool = True

    def once(self, servers: Sequence[int]) -> Sample:
        """One checked run in a place of its own."""
        stage = self.contest.stage
        slug = re.sub("[^a-z0-9]+", "_", self.name)
        with self.contest.fresh(f"{slug}_{uuid.uuid4().hex[:8]}") as place:
            with measured(servers) as sample:
                result = self.run(place)
            wrong = self.contest.wrong(place, result, sample)
        stage.refuse(self.name, wrong)
        return sample

    def worker_memory(self, what: str, limit: int) -> int:
        """The most bytes that a Python worker of Spark held in one run."""
        console = self.contest.stage.console
        with console.status(what), peak_worker_memory() as peak:
            self.once(())
        self.contest.stage.passed(
            f"memory of a Python worker, {what}, {self.contest.records:,} records",
            f"{peak.bytes / 1e6:,.0f} MB", f"{limit / 1e6:,.0f}", reached=peak.bytes < limit,
        )  # fmt: skip
        return peak.bytes


@dataclass(frozen=True)
class Match:
    """Contenders that are compared.

    Attributes:
        title: above the table.
        contenders: in the order of a round.
        goals: for ratios of their rates.
        servers: processes that work for them, beside this one's children.
        figures: names of further figures in the samples.
    """

    title: str
    contenders: Sequence[Contender]
    goals: Sequence[Goal]
    servers: Sequence[int]
    figures: Sequence[str] = field(default_factory=tuple)

    def play(self, rounds: int, *, warm_up: bool = True) -> dict[str, Series]:
        """All rounds; the series by contender. The first round warms the JVM and isn't counted."""
        console = self.contenders[0].contest.stage.console
        series = {one.name: Series(one.contest.records) for one in self.contenders}
        for number in range(0 if warm_up else 1, rounds + 1):
            for one in self.contenders:
                if number or one.warm:
                    with console.status(f"round {number} of {rounds}: {one.name}"):
                        sample = one.once(self.servers)
                    rate = one.contest.records / sample.seconds
                    console.print(f"round {number or 'to warm up'} {one.name}: {rate:,.0f}/s")
                    if number:
                        series[one.name].samples.append(sample)
        self._show(console, series)
        return series

    def told(self, series: Mapping[str, Series], **more: object) -> dict[str, object]:
        """The content of a result file."""
        contest = self.contenders[0].contest
        return {
            **told(series, self.goals),
            "records": contest.records,
            "records_per_batch": contest.batch,
            **({"fetch": dict(IN_BULK)} if _in_bulk(series) else {}),
            **more,
        }

    def _show(self, console: Console, series: Mapping[str, Series]) -> None:
        table = Table(title=self.title)
        for column in ("", "median", "lowest", "highest", "CPU s per million", *self.figures):
            table.add_column(column, justify="right" if column else "left", no_wrap=not column)
        for name, one in series.items():
            rates = [f"{rate:,.0f}" for rate in (one.rate, min(one.rates), max(one.rates))]
            figures = [f"{round(one.figure(key), 1):,}" for key in self.figures]
            table.add_row(name, *rates, f"{one.cpu_per_million:.2f}", *figures)
        console.print(table)
        for label, ours, theirs, goal in self.goals:
            found = ratio(series[ours], series[theirs])
            verdict = "[green]reached" if found >= goal else "[red]missed"
            console.print(f"{label:52} {found:5.2f}   goal {goal:.2f}   {verdict}")
        if _in_bulk(series):
            told = ", ".join(f"{key.removeprefix('kafka.')}={one}" for key, one in IN_BULK.items())
            console.print(
                f"Peers read Kafka with Spark's defaults; in rows with '+ fetch' with {told}."
            )


def _in_bulk(names: Iterable[str]) -> bool:
    return any("+ fetch" in name for name in names)


def against(pairs: Mapping[tuple[str, str], float]) -> list[Goal]:
    """Goals by the names of two series."""
    return [(f"{ours} / {theirs}", ours, theirs, goal) for (ours, theirs), goal in pairs.items()]
