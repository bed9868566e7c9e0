"""Seconds of the clock and of the processors that a run took, everything it used counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from types import MappingProxyType

import psutil

Goal = tuple[str, str, str, float]
"""A label, the names of two series, and the least ratio of their rates."""

NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
"""A Kafka reader as Spark's users have it."""

IN_BULK: Mapping[str, str] = MappingProxyType(
    {
        # The Java client's defaults (500 records a poll, 1 MB a fetch) are for consumers with much
        # work per record; Spark only copies it.
        "kafka.max.poll.records": "10000",
        "kafka.max.partition.fetch.bytes": str(4 << 20),
        "kafka.receive.buffer.bytes": "-1",  # the system's own choice; the default is 64 KB at most
        # At the end of a partition the client requests more, and the broker answers nothing else
        # on that connection until this time is over: half a second by default.
        "kafka.fetch.max.wait.ms": "10",
    }
)
"""Fetch settings of peers in rows with "+ fetch": what an experienced user of Spark would set."""

_WORKERS = {"pyspark.daemon", "pyspark.worker"}  # python -m ...; the JVM's words hold paths only


@dataclass
class Sample:
    """One run: its clock and processor seconds, and further figures of its match."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    called: float = 0.0  # when, in seconds since 1970
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class Series:
    """The runs of one contender."""

    records: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Records per second, run by run."""
        return [self.records / one.seconds for one in self.samples]

    @property
    def rate(self) -> float:
        """The median rate."""
        return statistics.median(self.rates)

    @property
    def cpu_per_million(self) -> float:
        """Processor seconds per million records, the median."""
        return statistics.median(s.cpu_seconds for s in self.samples) / self.records * 1e6

    def figure(self, name: str) -> float:
        """The median of a further figure."""
        return statistics.median(one.figures[name] for one in self.samples)


def ratios(ours: Series, theirs: Series) -> list[float]:
    """How many times as fast in each round: both met the same noise."""
    return [a / b for a, b in zip(ours.rates, theirs.rates, strict=True)]


def ratio(ours: Series, theirs: Series) -> float:
    """The median of the ratios round by round."""
    return statistics.median(ratios(ours, theirs))


def told(series: Mapping[str, Series], goals: Sequence[Goal]) -> dict[str, object]:
    """Rates and ratios for a result file, see :mod:`bench.recorded`."""
    rounds = {label: ratios(series[ours], series[theirs]) for label, ours, theirs, _ in goals}
    return {
        **{name: round(one.rate) for name, one in series.items()},
        "ratios": {label: round(statistics.median(one), 3) for label, one in rounds.items()},
        "ratio_rounds": {label: [round(x, 3) for x in one] for label, one in rounds.items()},
        "cpu_seconds_per_million": {n: round(s.cpu_per_million, 2) for n, s in series.items()},
        "rounds": {name: [round(rate) for rate in one.rates] for name, one in series.items()},
    }


@contextmanager
def measured(servers: Sequence[int]) -> Iterator[Sample]:
    """Measure the block: this process, its children (JVM, workers) and the servers' trees."""
    sample = Sample(called=time.time())
    cpu, began = _cpu_seconds(servers), time.monotonic()
    yield sample
    sample.seconds = time.monotonic() - began
    sample.cpu_seconds = _cpu_seconds(servers) - cpu


def _cpu_seconds(servers: Sequence[int]) -> float:
    roots = [psutil.Process(), *(psutil.Process(pid) for pid in servers)]
    processes = {p.pid: p for root in roots for p in (root, *root.children(recursive=True))}
    total = 0.0
    for process in processes.values():
        try:
            total += sum(process.cpu_times()[:4])  # own and those of children that have ended
        except psutil.NoSuchProcess:
            continue
    return total


@dataclass
class Peak:
    """The most resident memory of one process, in bytes."""

    bytes: int = 0


@contextmanager
def peak_worker_memory() -> Iterator[Peak]:
    """Watch this process's Python workers of Spark; the peak is whole after the block."""
    done, peak = Event(), Peak()

    def watch() -> None:
        while not done.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                try:
                    if _WORKERS & set(process.cmdline()):
                        peak.bytes = max(peak.bytes, process.memory_info().rss)
                except psutil.Error:
                    continue

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
