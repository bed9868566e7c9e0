"""The health, the metrics and the spans of a run, from its events.

They are for the probes of a supervisor, for Prometheus and for OpenTelemetry.

A run is alive if it polls and consumes, as in other consumers' probes:

- *polling*: it has looked for records, or has taken a batch, within a time to live;
- *consuming*: positions have moved within a shorter one, or there is nothing to read, or what there
  is waits as a filter says. After a failed commit each of its partitions must move by itself.

Looking for records is not enough for a partition that has some: it must have been read within the
time to live of polling, or there must have been nothing to read.

A run that is not alive any more does not recover by itself in many cases (a client that never
reconnects, a thread that is blocked). It never ends a run: the supervisor does.

Metrics and spans are made from the same events; docs/metrics.md describes each of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric

from oncely.core import events
from oncely.core.progress import RunState, TimesToLive, Waited, waited
from oncely.core.ranges import Position, TopicPartition
from oncely.http_server import exposition, gauge
from oncely.phases import PHASES
from oncely.secrets import Secrets
from oncely.telemetry import Consumer, MessageRange


@dataclass
class Health:
    """A listener of a run's events; called from several threads.

    Attributes:
        pipeline: its name.
        group: the consumer group whose lag is shown.
        limits: the times to live.
        secrets: redacted in error texts.
        clock: monotonic seconds.
        wall_clock: seconds since 1970.
    """

    pipeline: str
    group: str
    limits: TimesToLive = field(default_factory=TimesToLive)
    secrets: Secrets = field(default_factory=Secrets)
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._polled = self._moved_at = self.clock()
        self._waits: dict[TopicPartition, float] = {}  # since the last commit, or the first record
        self._failing: frozenset[TopicPartition] = frozenset()  # no commit since a failed one
        self._run = RunState()
        self._metrics = RunMetrics(self.pipeline, self.clock, self.wall_clock)
        self._ends: Mapping[TopicPartition, Position] = {}
        self._ages: Mapping[TopicPartition, float] = {}
        self._read: dict[TopicPartition, float] = {}  # or had nothing to read
        self._stored: Mapping[TopicPartition, Position] = {}
        self._strange: frozenset[TopicPartition] = frozenset()  # read by no member

    # -- what is observed ------------------------------------------------------------------

    def __call__(self, event: events.Event) -> None:
        """Take an event."""
        with self._lock:
            self._metrics.take(event)
            self._take(event)

    def _take(self, event: events.Event) -> None:
        before, planned = self._run.positions, self._run.planned
        self._run.take(event)
        match event:
            case events.PipelineOpened() | events.BatchCommitted():
                self._moved(before, event.positions)
            case events.RangeCommitted() | events.PartitionAdded():
                self._moved(before, [event.partition])
            case events.BatchPlanned():
                self._polled = self.clock()
            case events.Polled():
                self._polled = self.clock()
                self._was_read(event.read | event.waiting)
                self._strange = event.unread
            case events.BatchFailed():
                self._was_read(planned)
                self._failing |= planned
                return  # also of partitions whose ends are not known yet
        self._wait()

    def _wait(self) -> None:
        """Begin or end the time without a commit, by what there is to read; none after the end."""
        left = {} if self._run.state == "ended" else self._lag
        behind = left.keys() - self._run.waiting
        self._waits = {tp: self._waits.get(tp, self.clock()) for tp in sorted(behind)}
        self._failing &= behind

    def _was_read(self, partitions: Collection[TopicPartition]) -> None:
        self._read |= dict.fromkeys(partitions, self.clock())

    def _moved(
        self, before: Mapping[TopicPartition, Position], moved: Collection[TopicPartition]
    ) -> None:
        for tp in moved:
            if self._run.positions[tp] > before.get(tp, -1):
                self._waits.pop(tp, None)
                self._failing -= {tp}
        self._polled = self._moved_at = self.clock()
        self._was_read(moved)

    def ends(self, ends: Mapping[TopicPartition, Position]) -> None:
        """Take the present last stable offsets."""
        with self._lock:
            self._was_read(self._run.planned | (self._run.positions.keys() - self._lag.keys()))
            self._ends = ends
            self._wait()

    def stored(self, positions: Mapping[TopicPartition, Position]) -> None:
        """Take positions of the ledger: the tasks of a long batch move them before its end."""
        with self._lock:
            self._stored = positions
            known = {tp: at for tp, at in positions.items() if tp in self._run.positions}
            if any(at > self._run.positions[tp] for tp, at in known.items()):
                before = self._run.positions
                self._run.positions = {**before, **known}
                self._moved(before, known)
                self._wait()

    def unread(self) -> dict[TopicPartition, Position]:
        """The position of each partition that has offsets left to read."""
        with self._lock:
            return {tp: self._run.positions[tp] for tp in self._lag}

    def aged(self, timestamps: Mapping[TopicPartition, int | None]) -> None:
        """Take the timestamps, in ms since 1970, of the next records to read."""
        now = self.wall_clock()
        with self._lock:
            known = {tp: at for tp, at in timestamps.items() if at is not None}
            self._ages = {tp: max(0.0, now - at / 1000) for tp, at in known.items()}

    def rejected(self, pending: int) -> None:
        """Take the present number of dead letters."""
        with self._lock:
            self._metrics.rejects_pending = pending

    # -- what is answered ------------------------------------------------------------------

    @property
    def suspicious(self) -> bool:
        """No event tells of progress for half of the time to live: worth a look at the ledger."""
        with self._lock:
            return self._stood > self.limits.consuming / 2

    def liveness(self) -> tuple[bool, dict[str, Any]]:
        """Alive, and the JSON document that tells why not."""
        with self._lock:
            now, behind = self.clock(), self._stood
            idle = now - self._polled
            over = self._run.state == "ended"  # among others, which a restart would end
            unread = {} if over else self._unread(now)
            polling = over or (idle <= self.limits.polling and not unread)
            consuming = behind <= self.limits.consuming
            reasons = []
            ttl = f"(ttl {self.limits.polling:g} s)"
            if not over and idle > self.limits.polling:
                reasons.append(f"polling: it has not looked for records for {idle:.0f} s {ttl}")
            reasons += [
                f"polling: {tp} has {self._lag[tp]:,} offsets left to read, and was not read for"
                f" {seconds:.0f} s {ttl}"
                for tp, seconds in unread.items()
            ]
            if not consuming:
                reasons.append(
                    f"consuming: no commit{self._of_failing} for {behind:.0f} s"
                    f" (ttl {self.limits.consuming:g} s),"
                    f" and {sum(self._lag.values()):,} offsets are left to read"
                )
            if reasons and self._run.error:
                reasons.append(f"the last error: {self.secrets.redact(self._run.error)}")
            return not reasons, self._document(not reasons, reasons) | {
                "errors": {"polling_ttl_exceeded": not polling,
                           "consuming_ttl_exceeded": not consuming},
            }  # fmt: skip

    @property
    def _waited(self) -> Waited:
        now = self.clock()
        ages = {tp: now - since for tp, since in self._waits.items()}
        return waited(ages, now - self._moved_at, {})

    @property
    def _stood(self) -> float:
        """Seconds without a commit, or without one of a partition whose commit has failed."""
        wait = self._waited
        return max([wait.all, *(wait.each[tp] for tp in self._failing)])

    @property
    def _of_failing(self) -> str:
        """The partitions whose commit has failed, as a part of a sentence."""
        return f" of {', '.join(map(str, sorted(self._failing)))}" if self._failing else ""

    def _unread(self, now: float) -> dict[TopicPartition, float]:
        """Partitions that have records and were not read for too long, and for how many seconds."""
        since = {tp: now - self._read.setdefault(tp, now) for tp in sorted(self._lag)}
        return {tp: one for tp, one in since.items() if one > self.limits.polling}

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Ready once the ledger was taken over or a group was joined, also without partitions, or
        while standing by."""
        with self._lock:
            ready = self._run.state in ("running", "standing by")
            return ready, self._document(ready, [] if ready else [f"the run is {self._run.state}"])

    def _document(self, good: bool, reasons: list[str]) -> dict[str, Any]:
        return {
            "status": "healthy" if good else "unhealthy",
            "pipeline": self.pipeline,
            "state": self._run.state,
            "epoch": self._run.epoch or None,
            "reasons": reasons,
        }

    @property
    def _lag(self) -> dict[TopicPartition, int]:
        """Offsets that are left to read, by partition; only of those with any."""
        return self._lag_of(self._run.positions)

    def _lag_of(self, positions: Mapping[TopicPartition, Position]) -> dict[TopicPartition, int]:
        ends = self._ends
        lag = {tp: ends[tp] - at for tp, at in positions.items() if tp in ends}
        return {tp: one for tp, one in lag.items() if one > 0}

    def metrics(self) -> list[Metric]:
        """The metrics of the pipeline."""
        with self._lock:
            running = self._run.state in ("running", "draining")
            strange = {tp: self._stored.get(tp, 0) for tp in self._strange}
            shown = {**strange, **self._run.positions}
            now, lag = self.wall_clock(), self._lag_of(shown)
            since = {tp: now - seconds for tp, seconds in self._waited.each.items()}
            partitions = PartitionGauges(shown, self._ends, lag, self._ages, since)
            return [
                *partitions.metrics(self.pipeline, self.group),
                *self._metrics.metrics(self._run.epoch, running=running),
            ]


# -- of all pipelines of a process ---------------------------------------------------------


def liveness(healths: Sequence[Health]) -> tuple[bool, dict[str, Any]]:
    """Every run that has not ended is alive."""
    return _together([one.liveness() for one in healths])


def readiness(healths: Sequence[Health]) -> tuple[bool, dict[str, Any]]:
    """Every run is ready."""
    return _together([one.readiness() for one in healths])


def metrics(healths: Sequence[Health]) -> str:
    """The metrics of all, in Prometheus' format."""
    return exposition([metric for one in healths for metric in one.metrics()])


def _together(answers: Sequence[tuple[bool, dict[str, Any]]]) -> tuple[bool, dict[str, Any]]:
    """The document of a single pipeline, or one that contains those of all."""
    if len(answers) == 1:
        return answers[0]
    good = all(answer for answer, _ in answers)
    documents = [document for _, document in answers]
    reasons = [f"{one['pipeline']}: {reason}" for one in documents for reason in one["reasons"]]
    status = "healthy" if good else "unhealthy"
    return good, {"status": status, "reasons": reasons, "pipelines": documents}


T = TypeVar("T", Counter, Histogram)

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_OUTCOMES = ("written", "rejected", "filtered")
_RESULTS = ("committed", "replayed")
_PHASES = ("wait", "process", *PHASES)
_COUNTED = {
    "rows": "Rows that were made of records.",
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
        self._registry, self._started = CollectorRegistry(), self.wall_clock()
        told = "Records that have taken effect, by what became of them."
        self._outcomes = self._by(Counter, "records", told, "outcome", _OUTCOMES)
        told = "Ranges of offsets that have taken effect; replayed: they had before."
        self._results = self._by(Counter, "commits", told, "result", _RESULTS)
        self._counts = {
            name: self._metric(Counter, name, told).labels(self.pipeline)
            for name, told in _COUNTED.items()
        }
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
        self._counts["rows"].inc(event.rows)

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
            ("start_timestamp_seconds", "Unix time of the start of the run.", self._started),
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
        since: the Unix time since which records have waited without a commit; absent if none do.
    """

    positions: Mapping[TopicPartition, Position]
    ends: Mapping[TopicPartition, Position]
    lag: Mapping[TopicPartition, int]
    ages: Mapping[TopicPartition, float]
    since: Mapping[TopicPartition, float]

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
            ("oncely_waiting_since_timestamp_seconds",
             "Unix time since which records have waited without a commit.", own, self.since),
        ):  # fmt: skip
            samples = [((of, tp.topic, str(tp.partition)), at) for tp, at in sorted(values.items())]
            yield gauge(name, told, (label, "topic", "partition"), samples)


# -- spans ----------------------------------------------------------------------------------


@dataclass
class Telemetry:
    """A listener of a run's events.

    Attributes:
        consumer: the instruments.
        listener: called with each event first.
        spans: make a span for each topic-partition of a batch; False where the sink makes them.
    """

    consumer: Consumer
    listener: events.Listener
    spans: bool = True
    _done: dict[TopicPartition, list[events.RangeCommitted]] = field(default_factory=dict)
    _planned: dict[int, tuple[events.BatchPlanned, float]] = field(default_factory=dict)
    """The batches that are not committed yet, with the times of their plans, by epoch."""

    def __call__(self, event: events.Event) -> None:
        """Take an event."""
        self.listener(event)
        match event:
            case events.PipelineOpened():
                self._done.clear()
            case events.RangeCommitted() if event.records and not event.replayed:
                self._done.setdefault(event.partition, []).append(event)
            case events.BatchPlanned():
                self._planned[event.epoch] = event, time.monotonic()
            case events.BatchCommitted():
                self._planned.pop(event.epoch, None)
                self._committed(event)
            case events.BatchFailed(epoch=int(epoch)):
                self._failed(epoch, event.kind)
            case events.FencedOut():
                self._failed(event.ours, "Fenced")
            case events.RunClosed(kind=str(kind)) if kind:
                for epoch in sorted(self._planned):
                    self._failed(epoch, kind)

    def _failed(self, epoch: int, error: str) -> None:
        """A failed span for each topic-partition of the batch that was planned in this epoch."""
        planned = self._planned.pop(epoch, None)
        if planned is None or not self.spans:
            return
        batch, began = planned
        more = {"oncely.batch": batch.batch_id, "oncely.epoch": epoch}
        for tp, one in batch.ranges.items():
            messages = MessageRange(*tp, one.start, one.end, None)
            self.consumer.processed(messages, time.monotonic() - began, more, error)

    def _committed(self, event: events.BatchCommitted) -> None:
        done = {tp: self._done.pop(tp) for tp in event.positions if tp in self._done}
        for tp, ranges in done.items():
            first = min(one.range.start for one in ranges)
            last = max(one.range.end for one in ranges)
            messages = MessageRange(*tp, first, last, sum(one.records for one in ranges))
            self.consumer.count(messages)
            if self.spans:
                self.consumer.processed(messages, event.seconds, _attributes(event, ranges))
        for topic in sorted({tp.topic for tp in done}):
            self.consumer.took(topic, event.seconds)


def _attributes(
    event: events.BatchCommitted, ranges: list[events.RangeCommitted]
) -> dict[str, int | float]:
    return {
        "oncely.batch": event.batch_id,
        "oncely.epoch": event.epoch,
        "oncely.rows": sum(one.rows for one in ranges),
        "oncely.rejects": sum(one.rejects for one in ranges),
        "oncely.filtered": sum(one.filtered for one in ranges),
        **{f"oncely.seconds.{name}": seconds for name, seconds in event.phases.items()},
    }
