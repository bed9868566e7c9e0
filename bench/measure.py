"""Seconds of the clock and of the processors that a run took, everything it used counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from types import MappingProxyType

import psutil
from rich.console import Console
from rich.table import Table

Goal = tuple[str, str, str, float]
"""A label, the names of two series, and the least ratio of their rates."""

NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
"""A Kafka reader as Spark's users have it."""

_WORKERS = {"pyspark.daemon", "pyspark.worker"}  # python -m ...; the JVM's words hold paths only


@dataclass
class Sample:
    """One run: its clock and processor seconds, and what it answered."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


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


def fetch_settings(ours: Mapping[str, str]) -> str:
    """A line below a table: how our Kafka reader is set, which peers without "+ fetch" are not."""
    shown = ", ".join(f"{key.removeprefix('kafka.')}={value}" for key, value in ours.items())
    return (
        f"Oncely reads Kafka with {shown}. Peers have Spark's defaults;"
        " in rows with '+ fetch' they have the same settings."
    )


def ratio(ours: Series, theirs: Series) -> float:
    """The median of the ratios round by round: both met the same noise."""
    return statistics.median(a / b for a, b in zip(ours.rates, theirs.rates, strict=True))


def show(console: Console, title: str, series: Mapping[str, Series], goals: Sequence[Goal]) -> None:
    """Print the rates, and whether the goals were reached."""
    table = Table(title=title)
    for column in ("", "median", "lowest", "highest", "CPU s per million"):
        table.add_column(column, justify="left" if not column else "right")
    for name, one in series.items():
        rates = [f"{rate:,.0f}" for rate in (one.rate, min(one.rates), max(one.rates))]
        table.add_row(name, *rates, f"{one.cpu_per_million:.2f}")
    console.print(table)
    for label, ours, theirs, goal in goals:
        found = ratio(series[ours], series[theirs])
        verdict = "[green]reached" if found >= goal else "[red]missed"
        console.print(f"{label:30} {found:5.2f}   goal {goal:.2f}   {verdict}")


@contextmanager
def measured(servers: Sequence[int]) -> Iterator[Sample]:
    """Measure the block: this process, its children (JVM, workers) and the servers' trees."""
    sample = Sample()
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


@contextmanager
def peak_worker_memory(answer: Callable[[int], None]) -> Iterator[None]:
    """Watch the resident memory of this process's Python workers; the highest, in bytes."""
    done, peak = Event(), 0

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                try:
                    if _WORKERS & set(process.cmdline()):
                        peak = max(peak, process.memory_info().rss)
                except psutil.Error:
                    continue

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        answer(peak)
