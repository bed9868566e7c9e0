"""Metrics of a run from its events. docs/metrics.md describes each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric

from oncely.core import events
from oncely.core.ranges import Position, TopicPartition
from oncely.phases import PHASES
from oncely.prometheus import gauge

T = TypeVar("T", Counter, Histogram)

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_OUTCOMES = ("written", "rejected", "filtered")
_RESULTS = ("committed", "replayed")
_PHASES = ("wait", "process", *PHASES)
_COUNTED = {
    "rows": "Rows that were made of records.",
    "rejects": "Records that became dead letters.",
    "filtered": "Records that were filtered out.",
    "failures": "Batches that have failed and were repeated.",
    "fenced": "Times that a newer run has taken over.",
    "repeated": "Records that the client has returned again, and that were passed over.",
    "gap_records": "Offsets that were deleted from the topic before they were read.",
}


@dataclass
class RunMetrics:
    """Counts and times of a run. The caller holds a lock.

    Attributes:
        pipeline: the value of the label ``pipeline``.
        clock: monotonic seconds.
        wall_clock: seconds since 1970.
        rejects_pending: number of dead letters; None if it is not known.
    """

    pipeline: str
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    rejects_pending: int | None = None
    _last_commit: float | None = None
    _idle_since: float | None = None
    _planned_at: float | None = None

    def __post_init__(self) -> None:
        self._registry = CollectorRegistry()
        told = "Records that have taken effect, by what became of them."
        self._outcomes = self._by(Counter, "records", told, "outcome", _OUTCOMES)
        told = "Ranges of offsets that have taken effect; replayed: they had before."
        self._results = self._by(Counter, "commits", told, "result", _RESULTS)
        self._counts = {
            name: self._metric(Counter, name, told).labels(self.pipeline)
            for name, told in _COUNTED.items()
        }
        told = "Seconds from a batch's plan to its last commit."
        self._commit_seconds = self._metric(
            Histogram, "commit_seconds", told, buckets=_SECONDS
        ).labels(self.pipeline)
        told = (
            "Seconds of a batch by phase: wait before its plan, process until its last commit,"
            " and in it plan, read, decode, write, commit."
        )
        self._phases = self._by(
            Histogram, "batch_seconds", told, "phase", _PHASES, buckets=_SECONDS
        )

    def _metric(self, kind: type[T], name: str, told: str, *labels: str, **more: Any) -> T:
        return kind(f"oncely_{name}", told, ["pipeline", *labels], registry=self._registry, **more)

    def _by(
        self, kind: type[T], name: str, told: str, label: str, values: Iterable[str], **more: Any
    ) -> dict[str, T]:
        metric = self._metric(kind, name, told, label, **more)
        return {one: metric.labels(self.pipeline, one) for one in values}

    def take(self, event: events.Event) -> None:
        """Count an event."""
        match event:
            case events.PipelineOpened():
                self._planned_at, self._idle_since = None, self.clock()
            case events.BatchPlanned():
                self._phase("wait", self._idle_since)
                self._planned_at, self._idle_since = self.clock(), None
            case events.RangeCommitted():
                self._committed(event)
            case events.BatchCommitted():
                self._commit_seconds.observe(event.seconds)
                self._phase("process", self._planned_at)
                for phase, seconds in event.phases.items():
                    self._phases[phase].observe(seconds)
                self._planned_at, self._idle_since = None, self.clock()
            case events.BatchFailed():
                self._counts["failures"].inc()
            case events.FencedOut():
                self._counts["fenced"].inc()
            case events.Polled():
                self._counts["repeated"].inc(event.repeated)

    def _phase(self, phase: str, since: float | None) -> None:
        if since is not None:
            self._phases[phase].observe(self.clock() - since)

    def _committed(self, event: events.RangeCommitted) -> None:
        self._results["replayed" if event.replayed else "committed"].inc()
        self._last_commit = self.wall_clock()
        if event.kind == "gap":
            self._counts["gap_records"].inc(event.range.end - event.range.start)
        self._outcomes["rejected"].inc(event.rejects)
        self._outcomes["filtered"].inc(event.filtered)
        # A counter raises for a negative number, and a listener ends no run.
        self._outcomes["written"].inc(max(0, event.records - event.rejects - event.filtered))
        for name in ("rows", "rejects", "filtered"):
            self._counts[name].inc(getattr(event, name))

    def metrics(self, epoch: int, *, running: bool) -> Iterator[Metric]:
        """All metrics without a partition."""
        yield from self._registry.collect()
        for name, told, value in (
            ("epoch", "The epoch of the run.", epoch),
            ("running", "1 while it holds the ledger.", int(running)),
            ("rejects_pending", "Dead letters that were not replayed yet.", self.rejects_pending),
            (
                "last_commit_timestamp_seconds",
                "Unix time of the last commit of this process.",
                self._last_commit,
            ),
        ):
            samples = [] if value is None else [([self.pipeline], value)]
            yield gauge(f"oncely_{name}", told, ["pipeline"], samples)


@dataclass(frozen=True)
class PartitionGauges:
    """Positions and lags of the partitions of a run.

    Attributes:
        positions: the next offset to read.
        ends: the last stable offset; unknown ones are absent.
        lag: offsets that are left to read; absent if there are none.
        ages: age of the next record to read, in seconds; unknown ones are absent.
    """

    positions: Mapping[TopicPartition, Position]
    ends: Mapping[TopicPartition, Position]
    lag: Mapping[TopicPartition, int]
    ages: Mapping[TopicPartition, float]

    def metrics(self, pipeline: str, group: str) -> Iterator[Metric]:
        """The metrics of each partition, also by the names of kafka_exporter."""
        lag = {tp: self.lag.get(tp, 0) for tp in self.positions if tp in self.ends}
        ends = {tp: self.ends[tp] for tp in lag}
        ages = {tp: self.ages[tp] if many else 0.0
                for tp, many in lag.items() if not many or tp in self.ages}  # fmt: skip
        shown, own = ("consumergroup", group), ("pipeline", pipeline)
        for name, told, (label, of), values in (
            ("kafka_consumergroup_current_offset", "The next offset to read.", shown,
             self.positions),
            ("kafka_consumergroup_lag", "Offsets that are left to read.", shown, lag),
            ("oncely_position", "The position in the ledger.", own, self.positions),
            ("oncely_end_offset", "The last stable offset of the topic.", own, ends),
            ("oncely_lag_records", "Offsets that are left to read.", own, lag),
            ("oncely_lag_seconds", "Age of the next record to read.", own, ages),
        ):  # fmt: skip
            samples = [((of, tp.topic, str(tp.partition)), at) for tp, at in sorted(values.items())]
            yield gauge(name, told, (label, "topic", "partition"), samples)
