"""The worker: Kafka to PostgreSQL with a primary key in one process, and its latency.

``consume`` is what one process can take from the broker at most: ``consume()`` and ``value()`` of
the same client, into nothing, with the worker's pause when its queue is full (librdkafka's default
of a second makes it half as fast). ``run`` is the same pipeline as `oncely run` on Spark.
``jdbc_rewrite`` is Spark's JDBC sink with batched inserts into the same table, on all cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import numpy as np
import numpy.typing as npt
import psutil
import psycopg
import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition, cimpl
from rich.console import Console

from bench import contenders
from bench.contenders import Contest, jdbc
from bench.measure import Goal, Series, measured, show, told
from bench.workload import PARTITIONS, SCHEMA, TABLE, record
from oncely.clients.kafka.librdkafka import handle_of, native
from oncely.testing.processes import await_that, child
from oncely.testing.readers import ends
from oncely.testing.servers.kafka import Broker

OUT = Path("build/bench/worker.json")
MEMORY = Path("build/bench/worker-memory.json")
TOPIC = "worker-latency"
GOALS: tuple[Goal, ...] = (
    ("oncely / run", "oncely", "run", 0.9),
    ("oncely / consume", "oncely", "consume", 0.5),
    ("oncely / jdbc_rewrite", "oncely", "jdbc_rewrite", 1.5),
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


def measure(
    contest: Contest, broker: Broker, servers: tuple[int, int], console: Console, rounds: int
) -> None:
    """Rates, then the latency at half of our rate, and at lower ones; written to :data:`OUT`."""
    series = _rates(contest, servers, console, rounds)
    half = series["oncely"].rate / 2
    found = {rate: _latency(contest, broker, rate, console) for rate in (*_LOADS, half)}
    result = {
        **told(series, GOALS),
        "records": contest.workload.records,
        "latency_ms": found[half],
        "latency_load": round(half),
        "latency_by_load": {round(rate): one for rate, one in found.items()},
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written: {OUT}")


def _rates(
    contest: Contest, servers: tuple[int, int], console: Console, rounds: int
) -> dict[str, Series]:
    runs: dict[str, Callable[[str], int | None]] = {
        "oncely": lambda table: _work(contest, table),
        "run": lambda table: contenders.oncely(contest, table),
        "consume": lambda _: _consume(contest),
        "jdbc_rewrite": lambda table: jdbc(contest, table, rewrite=True),
    }
    series = {name: Series(contest.workload.records) for name in runs}
    for number in range(-1, rounds):  # the first round warms up and is not counted
        for name, run in runs.items():
            table = f"w_{uuid.uuid4().hex[:8]}"
            _execute(contest.url, TABLE.format(table), f"ALTER TABLE {table} ADD PRIMARY KEY (id)",
                     "CHECKPOINT")  # fmt: skip
            status = console.status(f"round {number + 1} of {rounds}: {name}")
            with status, measured(servers) as one:
                counted = run(table)
            wrong = _wrong(contest, table, counted)
            _execute(contest.url, f"DROP TABLE {table}")
            if wrong:
                console.print(f"[bold red]{name}: a wrong result scores nothing: {wrong}")
                sys.exit(1)
            console.print(
                f"round {number + 1} {name}: {contest.workload.records / one.seconds:,.0f}/s"
            )
            if number >= 0:
                series[name].samples.append(one)
    show(console, "Worker, one process: Kafka to PostgreSQL with a primary key", series, GOALS)
    return series


def _work(contest: Contest, table: str) -> None:
    """As `oncely work --until latest` does it."""
    contest.pipeline(table, table).work("latest")


def _consume(contest: Contest) -> int:
    """The number of records that were taken, and thrown away."""
    reader = Consumer(
        {
            "bootstrap.servers": contest.brokers,
            "group.id": f"bench-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.queue.backoff.ms": 5,
        }
    )
    left = ends(contest.brokers, contest.workload.topic)
    reader.assign([TopicPartition(contest.workload.topic, number, 0) for number in left])
    seen = 0
    while seen < sum(left.values()):
        seen += sum(one.value() is not None for one in reader.consume(10_000, 1.0))
    reader.close()
    return seen


def _wrong(contest: Contest, table: str, counted: int | None) -> str | None:
    if counted is None:
        return contest.workload.wrong(contest.url, table)
    expected = contest.workload.records
    return None if counted == expected else f"{counted} records of {expected}"


def _execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as database:
        for statement in statements:
            database.execute(statement.encode())


# -- latency -------------------------------------------------------------------------------


def _latency(contest: Contest, broker: Broker, rate: float, console: Console) -> dict[str, float]:
    """Milliseconds from produce to visible in the table, of one record each hundredth of a second
    under a steady load."""
    load, _ = _under_load(contest, broker, rate, console, _SECONDS)
    return _shown(load, rate, console)


def memory(contest: Contest, broker: Broker, console: Console, minutes: float) -> None:
    """The resident memory of a worker under a steady load; written to :data:`MEMORY`."""
    load, sizes = _under_load(contest, broker, _STEADY, console, minutes * 60)
    tenth = max(1, len(sizes) // 10)
    early, late = max(sizes[tenth : 2 * tenth]), max(sizes[-tenth:])
    verdict = "[green]reached" if late - early < _GROWTH else "[red]missed"
    console.print(
        f"memory of a worker, {load.sent:,} records in {minutes:g} minutes: {early >> 20} MiB in"
        f" the second tenth, {late >> 20} MiB in the last one   goal +{_GROWTH >> 20}   {verdict}"
    )
    result = {"minutes": minutes, "records": load.sent, "mib": [one >> 20 for one in sizes]}
    MEMORY.parent.mkdir(parents=True, exist_ok=True)
    MEMORY.write_text(json.dumps(result | {"latency_ms": load.quantiles()}, indent=2) + "\n")
    console.print(f"written: {MEMORY}")


def _under_load(
    contest: Contest, broker: Broker, rate: float, console: Console, seconds: float
) -> tuple[_Load, list[int]]:
    """A worker that is given records at a rate; and its resident memory, in bytes, in time."""
    name = f"{TOPIC}-{rate:.0f}"
    broker.create_topic(name, PARTITIONS)
    table = name.replace("-", "_")
    _execute(contest.url, TABLE.format(table), f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
    done, load = Event(), _Load(broker.bootstrap, name, rate)
    looker = Thread(target=load.look, args=(contest.url, table, done))
    sizes: list[int] = []
    with tempfile.TemporaryDirectory() as folder, console.status(f"a load of {rate:,.0f}/s"):
        file = Path(folder) / "latency.toml"
        file.touch(mode=0o600)  # it contains a URL with a password
        file.write_text(_FILE.format(brokers=contest.brokers, url=contest.url, schema=SCHEMA,
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
        console.print(f"[bold red]latency: {len(load.waiting)} records did not appear in a minute")
        sys.exit(1)
    return load, sizes


def _resident(pid: int, sizes: list[int], done: Event) -> None:
    process = psutil.Process(pid)
    while not done.wait(_LOOK):
        sizes.append(int(process.memory_info().rss))


def _shown(load: _Load, rate: float, console: Console) -> dict[str, float]:
    found = load.quantiles()
    verdict = found["p50"] < _P50 and found["p99"] < _P99
    console.print(
        f"latency at {load.sent / _SECONDS:,.0f} records/s ({rate:,.0f} wanted),"
        f" {len(load.milliseconds):,} probes: {found}   goals p50 {_P50:.0f}, p99 {_P99:.0f}  "
        f" {'[green]reached' if verdict else '[red]missed'}"
    )
    return found


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
