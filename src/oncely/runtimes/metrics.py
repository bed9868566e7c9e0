"""Metrics of a run from its events. docs/metrics.md describes each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from oncely.core import events
from oncely.core.prometheus import Histogram, Metric, Sample
from oncely.core.topics import Position, TopicPartition
from oncely.phases import PHASES

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
    _counts: Counter[str] = field(default_factory=Counter)
    _outcomes: Counter[str] = field(default_factory=Counter)
    _results: Counter[str] = field(default_factory=Counter)
    _last_commit: float | None = None
    _idle_since: float | None = None
    _planned_at: float | None = None

    def __post_init__(self) -> None:
        self._commit_seconds = Histogram(_SECONDS)
        self._phases = {phase: Histogram(_SECONDS) for phase in _PHASES}

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
                self._counts["failures"] += 1
            case events.FencedOut():
                self._counts["fenced"] += 1

    def _phase(self, phase: str, since: float | None) -> None:
        if since is not None:
            self._phases[phase].observe(self.clock() - since)

    def _committed(self, event: events.RangeCommitted) -> None:
        self._results["replayed" if event.replayed else "committed"] += 1
        self._last_commit = self.wall_clock()
        if event.kind == "gap":
            self._counts["gap_records"] += event.range.end - event.range.start
        self._outcomes["rejected"] += event.rejects
        self._outcomes["filtered"] += event.filtered
        self._outcomes["written"] += event.records - event.rejects - event.filtered
        for name in ("rows", "rejects", "filtered"):
            self._counts[name] += getattr(event, name)

    def metrics(self, epoch: int, *, running: bool) -> Iterator[Metric]:
        """All metrics without a partition."""
        own = {"pipeline": self.pipeline}
        yield self._by("records", "outcome", _OUTCOMES, self._outcomes)._replace(
            told="Records that have taken effect, by what became of them."
        )
        yield self._by("commits", "result", _RESULTS, self._results)._replace(
            told="Ranges of offsets that have taken effect; replayed: they had before."
        )
        for name, told in _COUNTED.items():
            sample = Sample(own, self._counts[name])
            yield Metric(f"oncely_{name}_total", told, [sample], "counter")
        yield Metric("oncely_epoch", "The epoch of the run.", [Sample(own, epoch)])
        yield Metric("oncely_running", "1 while it holds the ledger.", [Sample(own, int(running))])
        for name, told, value in (
            ("rejects_pending", "Dead letters that were not replayed yet.", self.rejects_pending),
            (
                "last_commit_timestamp_seconds",
                "Unix time of the last commit of this process.",
                self._last_commit,
            ),
        ):
            yield Metric(f"oncely_{name}", told, [] if value is None else [Sample(own, value)])
        yield from self._times(own)

    def _by(
        self, name: str, label: str, values: tuple[str, ...], counts: Mapping[str, int]
    ) -> Metric:
        samples = [Sample({"pipeline": self.pipeline, label: one}, counts[one]) for one in values]
        return Metric(f"oncely_{name}_total", "", samples, "counter")

    def _times(self, own: Mapping[str, str]) -> Iterator[Metric]:
        yield Metric(
            "oncely_commit_seconds",
            "Seconds from a batch's plan to its last commit.",
            self._commit_seconds.samples(own),
            "histogram",
        )
        yield Metric(
            "oncely_batch_seconds",
            "Seconds of a batch by phase: wait before its plan, process until its last commit,"
            " and in it plan, read, decode, write, commit.",
            [
                sample
                for phase, seconds in self._phases.items()
                for sample in seconds.samples({**own, "phase": phase})
            ],
            "histogram",
        )


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
        shown, own = {"consumergroup": group}, {"pipeline": pipeline}
        for name, told, labels, values in (
            ("kafka_consumergroup_current_offset", "The next offset to read.", shown,
             self.positions),
            ("kafka_consumergroup_lag", "Offsets that are left to read.", shown, lag),
            ("oncely_position", "The position in the ledger.", own, self.positions),
            ("oncely_end_offset", "The last stable offset of the topic.", own, ends),
            ("oncely_lag_records", "Offsets that are left to read.", own, lag),
            ("oncely_lag_seconds", "Age of the next record to read.", own, ages),
        ):  # fmt: skip
            yield Metric(name, told, list(_samples(labels, values)))


def _samples(labels: Mapping[str, str], values: Mapping[TopicPartition, float]) -> Iterator[Sample]:
    for tp, value in sorted(values.items()):
        yield Sample({**labels, "topic": tp.topic, "partition": str(tp.partition)}, value)
