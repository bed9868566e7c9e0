"""Kafka to Kafka: each run has a fresh topic, whose records and stamps are read after it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQueryListener

from bench.kafka import child
from bench.kafka.check import Expected, committed, settle
from bench.kafka.clock import appended
from bench.kafka.workload import FILTER, JOBS, SCHEMA, Job, key
from bench.match import Contender, Contest, Match, Stage
from bench.measure import IN_BULK, NO_OPTIONS, Goal, Sample, Series
from bench.workload import PARTITIONS
from oncely.core import events
from oncely.errors import Unavailable, WrongInput
from oncely.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import DataStreamWriter

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
_READY, _FIRST = "ready in, s", "first record in, s"


def measure(stage: Stage) -> None:
    """Measure all, and show it."""
    records = stage.given.records or 1_000_000
    stage.publish(_INPUT, records, key=key)
    contests = {
        job: Passing(stage, _INPUT, records, stage.given.batch, Expected.of(job, records))
        for job in JOBS
    }
    with ExitStack() as left:
        place = Path(left.enter_context(tempfile.TemporaryDirectory(prefix="oncely-bench-")))
        children = _children(stage, place, left)
        ways = [
            Contender(f"{job}: {name}", contest, run, name in _WARM)
            for job, contest in contests.items()
            for name, run in contest.ways(children).items()
        ]
        names = {one.name for one in ways}
        goals: list[Goal] = [
            (f"{job}: {ours} / {peer}", f"{job}: {ours}", f"{job}: {peer}", goal)
            for job, ours, peer, goal in GOALS
            if {f"{job}: {ours}", f"{job}: {peer}"} <= names
        ]
        title = "Kafka to Kafka, records per second"
        match = Match(title, ways, goals, (stage.broker.pid,), (_READY,))
        series = match.play(stage.given.rounds or 3)
    detail = {
        job: {name.removeprefix(f"{job}: "): _detail(one)
              for name, one in series.items() if name.startswith(f"{job}: ")}
        for job in JOBS
    }  # fmt: skip
    stage.write("kafka", match.told(series, detail=detail))


def _children(stage: Stage, place: Path, left: ExitStack) -> dict[str, child.Ask]:
    """The contenders in processes of their own; one that can't be had is said aloud."""
    children: dict[str, child.Ask] = {}
    for name, start in child.STARTS.items():
        try:
            with stage.console.status(f"starting {name}"):
                one = start(stage.broker.bootstrap, place)
                left.enter_context(one)
                children[name] = one.ask
        except (WrongInput, Unavailable) as error:
            stage.console.print(f"[bold yellow]{name} is not measured: {error}")
    return children


def _detail(series: Series) -> dict[str, object]:
    """What stands beside the median."""
    return {
        "lowest": round(min(series.rates)),
        "highest": round(max(series.rates)),
        "ready_seconds": round(series.figure(_READY), 2),
        "first_record_seconds": round(series.figure(_FIRST), 2),
    }


@dataclass(frozen=True)
class Passing(Contest):
    """A topic and a job. A run answers when it was ready, in seconds since 1970.

    Attributes:
        expected: the output.
    """

    expected: Expected

    @contextmanager
    def fresh(self, name: str) -> Iterator[str]:
        """An output topic."""
        stamps = {"message.timestamp.type": "LogAppendTime"}
        self.stage.broker.create_topic(name, PARTITIONS, config=stamps)
        yield name
        self.stage.broker.delete_topic(name)

    def wrong(self, place: str, result: float, sample: Sample) -> str | None:
        """What is wrong with the topic. The clock is the broker's (see bench.kafka.clock).

        A sample is from ready to the last visible record, with the processor seconds from call to
        return. Its figures are the seconds from the call until it was ready, which are not in the
        rate, and those from ready to the first record, which are.
        """
        settle(self.brokers, place)
        if wrong := self.expected.wrong(committed(self.brokers, place)):
            return wrong
        first, last = appended(self.stage.broker.directory / "data", place)
        sample.figures |= {_READY: result - sample.called, _FIRST: first - result}
        sample.seconds = last - result
        return None

    def ways(self, children: Mapping[str, child.Ask]) -> dict[str, Callable[[str], float]]:
        """The contenders, in the order of a round."""
        ours = {"oncely": self.oncely, "oncely worker": self.worker}
        return {
            **({} if self.stage.given.only_peers else ours),
            "spark": self.spark,
            "spark + fetch": partial(self.spark, fetch=IN_BULK),
            **{name: partial(self.child, name, ask) for name, ask in children.items()},
        }

    def child(self, name: str, ask: child.Ask, target: str) -> float:
        """A process of its own."""
        # How many records each of two processes gets is not known: they end when nothing comes.
        until = {"kafka_streams": self.records, "quixstreams": len(self.expected.ids)}
        return int(ask(self.expected.job, self.topic, target, until.get(name, 0))) / 1000

    def oncely(self, target: str) -> float:
        """Exactly once, as `oncely run --until latest` does it; when it had its positions."""
        opened: list[float] = []

        def listen(event: events.Event) -> None:
            if isinstance(event, events.PipelineOpened):
                opened.append(time.time())

        self._into(target).run("latest", spark=self.stage.session, listener=listen)
        return opened[0]

    def worker(self, target: str) -> float:
        """Exactly once, as one `oncely work --until latest`; when its partitions were assigned."""
        assigned: list[float] = []

        def listen(event: events.Event) -> None:
            if isinstance(event, events.PartitionsChanged) and event.change == "assigned":
                assigned.append(time.time())

        self._into(target).work("latest", listener=listen)
        return assigned[0]

    def _into(self, target: str) -> Pipeline:
        sink = {"kind": "kafka", "topic": target}
        if self.expected.job == "bytes":
            decode = {"format": "raw", "columns": ["key", "value"]}
            return self.pipeline(
                target, decode=decode, sink=sink | {"key": "key", "value": "value"}
            )
        return self.pipeline(
            target,
            decode={"format": "json", "schema": SCHEMA},
            transform={"sql": f"SELECT * FROM input WHERE {FILTER}"},
            sink=sink | {"key": "flight", "value": "json"},
        )

    def spark(self, target: str, fetch: Mapping[str, str] = NO_OPTIONS) -> float:
        """What people do, with Spark's defaults. At least once; when its query started.

        ``fetch``: options of the Kafka reader beside the defaults.
        """

        def to(read: DataFrame) -> DataStreamWriter:
            if self.expected.job == "json":
                flight = F.from_json(F.col("value").cast("string"), SCHEMA).alias("flight")
                late = read.select("key", flight).where(f"flight.{FILTER}")
                read = late.select("key", F.to_json("flight").alias("value"))
            written = read.select("key", "value").writeStream.format("kafka")
            return written.option("kafka.bootstrap.servers", self.brokers).option("topic", target)

        started = _Started()
        self.stage.session.streams.addListener(started)
        try:
            self.drain(to, fetch)
        finally:
            self.stage.session.streams.removeListener(started)
        return started.at


class _Started(StreamingQueryListener):  # type: ignore[misc]  # Spark is untyped here
    """When the session's first query started, by the clock of Spark's driver.

    Spark calls ``onQueryStarted`` before ``start`` returns.
    """

    at = 0.0

    def onQueryStarted(self, event: StreamingQueryListener.QueryStartedEvent) -> None:
        self.at = self.at or datetime.fromisoformat(event.timestamp).timestamp()

    def onQueryProgress(self, event: StreamingQueryListener.QueryProgressEvent) -> None:
        pass

    def onQueryIdle(self, event: StreamingQueryListener.QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: StreamingQueryListener.QueryTerminatedEvent) -> None:
        pass
