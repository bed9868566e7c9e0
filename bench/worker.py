"""The worker: Kafka to PostgreSQL with a primary key in one process, and its latency.

``consume`` is what one process can take from the broker at most: ``consume()`` and ``value()`` of
the same client, into nothing, with the worker's pause when its queue is full (librdkafka's default
of a second makes it half as fast). ``run`` is the same pipeline as `oncely run` on Spark.
``jdbc_rewrite`` is Spark's JDBC sink with batched inserts into the same table, on all cores.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path
from threading import Event, Thread

import numpy as np
import numpy.typing as npt
import psutil
import psycopg
import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition, cimpl

from bench.match import Contender, Match, Stage, against
from bench.sql import Sql
from bench.workload import COLUMNS, PARTITIONS, SCHEMA, record
from oncely.kafka.client import handle_of, native
from oncely.testing.processes import await_that, child
from oncely.testing.readers import ends

GOALS = against(
    {("oncely", "run"): 0.9, ("oncely", "consume"): 0.5, ("oncely", "jdbc_rewrite"): 1.5}
)
_FILE = """
name = "{topic}"

[source]
brokers = "{brokers}"
topics = ["{topic}"]

[decode]
format = "json"
schema = "{schema}"

[sink]
kind = "sql"
url = "{url}"
table = "{table}"
keep_source = false
"""
_LOADS = (10_000.0, 50_000.0, 100_000.0)  # records a second, beside half of our rate
_SECONDS = 30.0  # of the latency's load
_WARM = 5.0
_FIRST, _PROBES = 1_000_000_000, 5_000_000_000  # ids; those of the records whose time is taken
_STEADY = 10_000.0  # records a second of the memory's load
_GROWTH = 16 << 20
_LOOK = 5.0  # seconds between two looks at the memory
_EVERY = 0.01  # seconds between two probes
_P50, _P99 = 20.0, 100.0  # milliseconds


def measure(stage: Stage) -> None:
    """Rates, then the latency at half of our rate, and at lower ones; or the worker's memory."""
    given = stage.given
    columns = f"{COLUMNS}, PRIMARY KEY (id)"
    with stage.database("worker") as (url, postgres):
        records = given.records or 2_000_000
        contest = Worker(stage, "worker", records, given.batch, url, columns=columns)
        if given.only == "worker-memory":
            contest.memory(given.minutes)
            return
        stage.publish("worker", records)
        ways = [
            Contender("oncely", contest, contest.work),
            Contender("run", contest, contest.oncely),
            Contender("consume", contest, contest.consume),
            Contender("jdbc_rewrite", contest, partial(contest.jdbc, rewrite=True)),
        ]
        title = "Worker, one process: Kafka to PostgreSQL with a primary key"
        match = Match(title, ways, GOALS, (stage.broker.pid, postgres))
        series = match.play(given.rounds or 3)
        half = series["oncely"].rate / 2
        found = {rate: contest.latency(rate) for rate in (*_LOADS, half)}
        by_load = {round(rate): one for rate, one in found.items()}
        told = {"latency_ms": found[half], "latency_load": round(half), "latency_by_load": by_load}
        stage.write("worker", match.told(series, **told))


class Worker(Sql):
    """A table with a primary key, and loads of topics of their own."""

    def work(self, table: str) -> None:
        """As `oncely work --until latest` does it."""
        self.into(table).work("latest")

    def consume(self, _: str) -> int:
        """The number of records that were taken, and thrown away."""
        reader = Consumer(
            {
                "bootstrap.servers": self.brokers,
                "group.id": f"bench-{uuid.uuid4().hex}",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.queue.backoff.ms": 5,
            }
        )
        left = ends(self.brokers, self.topic)
        reader.assign([TopicPartition(self.topic, number, 0) for number in left])
        seen = 0
        while seen < sum(left.values()):
            seen += sum(one.value() is not None for one in reader.consume(10_000, 1.0))
        reader.close()
        return seen

    def latency(self, rate: float) -> dict[str, float]:
        """Milliseconds from produce to visible in the table, of one record each hundredth of a
        second under a steady load."""
        load, _ = self._under_load(rate, _SECONDS)
        found = load.quantiles()
        self.stage.passed(
            f"latency at {load.sent / _SECONDS:,.0f} records/s ({rate:,.0f} wanted),"
            f" {len(load.milliseconds):,} probes", str(found), f"p50 {_P50:.0f}, p99 {_P99:.0f}",
            reached=found["p50"] < _P50 and found["p99"] < _P99,
        )  # fmt: skip
        return found

    def memory(self, minutes: float) -> None:
        """The resident memory of a worker under a steady load."""
        load, sizes = self._under_load(_STEADY, minutes * 60)
        tenth = max(1, len(sizes) // 10)
        early, late = max(sizes[tenth : 2 * tenth]), max(sizes[-tenth:])
        self.stage.passed(
            f"memory of a worker, {load.sent:,} records in {minutes:g} minutes",
            f"{early >> 20} MiB in the second tenth, {late >> 20} MiB in the last one",
            f"+{_GROWTH >> 20}", reached=late - early < _GROWTH,
        )  # fmt: skip
        result = {"minutes": minutes, "records": load.sent, "mib": [one >> 20 for one in sizes]}
        self.stage.write("worker-memory", result | {"latency_ms": load.quantiles()})

    def _under_load(self, rate: float, seconds: float) -> tuple[_Load, list[int]]:
        """A worker that is given records at a rate; and its resident memory, in bytes, in time."""
        name = f"worker-latency-{rate:.0f}"
        self.stage.broker.create_topic(name, PARTITIONS)
        done, load, sizes = Event(), _Load(self.brokers, name, rate), list[int]()
        with (
            tempfile.TemporaryDirectory() as folder,
            self.stage.console.status(f"a load of {rate:,.0f}/s"),
            self.fresh(name.replace("-", "_")) as table,
        ):
            looker = Thread(target=load.look, args=(self.url, table, done))
            file = Path(folder) / "latency.toml"
            file.touch(mode=0o600)  # it contains a URL with a password
            file.write_text(_FILE.format(brokers=self.brokers, url=self.url, schema=SCHEMA,
                                         topic=name, table=table))  # fmt: skip
            with child(["oncely.cli", "work", str(file)], file.with_suffix(".log")) as one:
                sampler = Thread(target=_resident, args=(one.pid, sizes, done))
                sys.setswitchinterval(0.0005)  # producing must not delay looking
                looker.start()
                load.begin()
                sampler.start()
                load.run(seconds)
                end = time.monotonic() + 60
                while load.waiting and time.monotonic() < end:
                    time.sleep(0.05)
                done.set()
                looker.join()
                sampler.join()
        if load.waiting:
            lost = len(load.waiting)
            self.stage.console.print(
                f"[bold red]latency: {lost} records did not appear in a minute"
            )
            sys.exit(1)
        return load, sizes


def _resident(pid: int, sizes: list[int], done: Event) -> None:
    process = psutil.Process(pid)
    while not done.wait(_LOOK):
        sizes.append(int(process.memory_info().rss))


class _Load:
    """A steady load, and the time of each probe from its call of produce to its row.

    It shares the processors with what it measures, so it gives librdkafka whole arrays of records,
    which differ in their ids.
    """

    def __init__(self, brokers: str, topic: str, rate: float) -> None:
        self._producer = Producer(
            {"bootstrap.servers": brokers, "queue.buffering.max.messages": 500_000}
        )
        found = native()
        if found is None:
            sys.exit("latency: the load is produced by oncely-native: make native")
        self._native, self._topic, self._rate = found, topic, rate
        self._template = np.frombuffer(record(_FIRST), np.uint8)
        self.waiting: dict[int, float] = {}
        self.milliseconds: list[float] = []
        self.sent = 0

    def begin(self) -> None:
        """Wait until the worker has written a record."""
        self.waiting[_PROBES - 1] = time.monotonic()
        self._producer.produce(self._topic, record(_PROBES - 1), partition=0)
        self._producer.flush()
        await_that(lambda: not self.waiting, "the first row", 120.0)
        self.milliseconds.clear()

    def quantiles(self) -> dict[str, float]:
        """Median, 99 of 100, and highest time, in milliseconds."""
        seen = sorted(self.milliseconds)
        return {
            "p50": round(statistics.median(seen), 1),
            "p99": round(seen[int(len(seen) * 0.99)], 1),
            "max": round(seen[-1], 1),
        }

    def run(self, seconds: float) -> None:
        """Produce for so many seconds, after some that are not counted."""
        began = time.monotonic()
        probe, next_probe = _PROBES, began + _WARM
        while (now := time.monotonic()) < began + _WARM + seconds:
            wanted = int((now - began) * self._rate)
            self._send(np.arange(_FIRST + self.sent, _FIRST + wanted))
            self.sent = wanted
            if now >= next_probe:
                self.waiting[probe] = time.monotonic()
                self._producer.produce(self._topic, record(probe), partition=probe % PARTITIONS)
                probe, next_probe = probe + 1, next_probe + _EVERY
            self._producer.poll(0)
            time.sleep(0.001)
        self._producer.flush()
        self.sent = int(self.sent * seconds / (_WARM + seconds))

    def _send(self, ids: npt.NDArray[np.int64]) -> None:
        """Records like the template, with ids of as many digits."""
        rows = np.tile(self._template, (len(ids), 1))
        at = len('{"id":')
        for place in range(len(str(_FIRST))):
            rows[:, at + place] = ord("0") + ids // (_FIRST // 10**place) % 10
        values = pa.array(rows.view(f"S{rows.shape[1]}")[:, 0], pa.large_binary())
        errors = self._native.produce_batch(
            cimpl.__file__,
            handle_of(self._producer),
            self._topic,
            pa.nulls(len(ids), pa.large_binary()),
            values,
        )
        if any(errors):
            sys.exit("latency: the producer's queue is full: the load is not steady")

    def look(self, url: str, table: str, done: Event) -> None:
        """Look for probes in the table again and again."""
        with psycopg.connect(url, autocommit=True) as database:
            wanted = f"SELECT id FROM {table} WHERE id >= %s".encode()
            while not done.is_set():
                oldest = min(list(self.waiting), default=2 * _PROBES)
                found = database.execute(wanted, (oldest,)).fetchall()
                now = time.monotonic()
                for (id_,) in found:
                    if (sent := self.waiting.pop(id_, None)) is not None:
                        self.milliseconds.append((now - sent) * 1000)
                time.sleep(0.002)
