"""Audits one after another: what has been added since, until a signal or a condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Metric

from oncely.audit.evidence import Bounds, IntArray, Log, Readable, Span
from oncely.audit.report import EXIT_CODES, KINDS, Report
from oncely.core.ranges import Position, SourceIdentity, TopicPartition
from oncely.errors import OncelyError
from oncely.http_server import CONTENT_TYPE, Page, Server, exposition, gauge

_KEPT = 4_000_000  # runs of offsets: 64 MB


class Listener(Protocol):
    """Is told what happens."""

    def audited(self, report: Report) -> None:
        """An audit has ended."""

    def failed(self, error: OncelyError) -> None:
        """An audit got no answer; the next one may."""


@dataclass(frozen=True)
class Condition:
    """The end of a watch.

    Attributes:
        until: all records up to this time must be proved; None: watch until a signal.
        timeout: seconds after which to give up; None: never.
        late: True if a lost record may only be late, because nothing tells up to where the
            destination has read.
    """

    until: datetime | None = None
    timeout: float | None = None
    late: bool = False

    def code(self, report: Report) -> int | None:
        """The exit code if the watch ends with this report."""
        if self.until is None:
            return None
        found = {kind for kind, number in report.found.items() if number}
        if found - ({"lost"} if self.late else set()):
            return EXIT_CODES["damaged"]
        complete = report.complete_until.wall_time
        proved = report.verdict == "clean" and complete is not None and complete >= self.until
        return EXIT_CODES["clean"] if proved else None


def watch(
    audit: Callable[[], Report],
    listener: Listener,
    condition: Condition,
    *,
    every: float,
    stop: threading.Event,
) -> int:
    """Audit again and again; returns the exit code.

    Args:
        audit: one audit.
        listener: gets the reports.
        condition: when to end.
        every: seconds between the starts of two audits.
        stop: ends the watch before the next audit.

    Raises:
        OncelyError: an audit failed, and another one would fail, too.
    """
    began, last = time.monotonic(), None
    while not stop.is_set():
        started = time.monotonic()
        try:
            last = audit()
            listener.audited(last)
            if (code := condition.code(last)) is not None:
                return code
        except OncelyError as error:
            if not error.retryable:
                raise
            listener.failed(error)
        now, wait = time.monotonic(), every
        if condition.timeout is not None:
            left = condition.timeout - (now - began)
            if left <= 0:
                return _unproved(last)
            wait = min(wait, left)
        stop.wait(max(0.0, started + wait - now))
    return _stopped(last, condition)


def _unproved(last: Report | None) -> int:
    damaged = last is not None and last.verdict == "damaged"
    return EXIT_CODES["damaged" if damaged else "unknown"]


def _stopped(last: Report | None, condition: Condition) -> int:
    """The exit code after a signal."""
    if last is not None and last.verdict == "damaged":
        return EXIT_CODES["damaged"]
    return EXIT_CODES["unknown" if condition.until else "clean"]


@dataclass
class RememberingLog:
    """A topic whose offsets are read once.

    Below the last stable offset only compaction and deletion change which offsets are readable. A
    compacted topic is read each time; of deleted records the offsets were readable before.
    """

    log: Log

    def __post_init__(self) -> None:
        self._known: dict[Span, IntArray] = {}
        self._size = 0
        self._ids: SourceIdentity | None = None

    def identity(self) -> SourceIdentity:  # noqa: D102
        found = self.log.identity()
        if found != self._ids:  # another topic
            self._ids, self._known, self._size = found, {}, 0
        return found

    def bounds(self) -> Mapping[TopicPartition, Bounds]:  # noqa: D102
        return self.log.bounds()

    def compacted(self) -> frozenset[str]:  # noqa: D102
        return self.log.compacted()

    def messages(self, tp: TopicPartition, offsets: Sequence[int]) -> Mapping[int, Any]:  # noqa: D102
        return self.log.messages(tp, offsets)

    def offsets_at(self, at: datetime) -> Mapping[TopicPartition, Position]:  # noqa: D102
        return self.log.offsets_at(at)

    def times(  # noqa: D102
        self, around: Mapping[TopicPartition, Position]
    ) -> Mapping[TopicPartition, tuple[datetime | None, datetime | None]]:
        return self.log.times(around)

    def close(self) -> None:  # noqa: D102
        self.log.close()

    def readable(self, spans: Sequence[Span]) -> Iterator[Readable]:
        """Known spans from memory, the others from the log."""
        compacted = self.compacted() if spans else frozenset()
        known = {
            span for span in spans if span in self._known and span.partition.topic not in compacted
        }
        reads = self.log.readable([span for span in spans if span not in known])
        first = {tp: one.first for tp, one in self.bounds().items()} if known else {}
        for span in spans:
            if span in known:
                yield Readable(span, self._known[span], first.get(span.partition, 0))
                continue
            read = next(reads)
            self._keep(read)
            yield read

    def _keep(self, read: Readable) -> None:
        self._size += len(read.runs)
        if self._size > _KEPT:
            self._known, self._size = {}, len(read.runs)
        self._known[read.span] = read.runs


# -- metrics -------------------------------------------------------------------------------


_VERDICTS = ("clean", "damaged", "unknown")


@dataclass
class Gauges:
    """The values after the last audit.

    Attributes:
        pipeline: the value of the label ``pipeline``.
    """

    pipeline: str
    _report: Report | None = None

    def __post_init__(self) -> None:
        self._registry, own = CollectorRegistry(), ["pipeline"]
        self._audits, self._failures = (
            Counter(f"oncely_audit_{name}", told, own, registry=self._registry).labels(
                self.pipeline
            )
            for name, told in (
                ("audits", "Audits that have ended."),
                ("failures", "Audits that got no answer."),
            )
        )

    def audited(self, report: Report) -> None:
        """Take the values of a report."""
        self._report = report
        self._audits.inc()

    def failed(self, _: OncelyError) -> None:
        """Count an audit without an answer."""
        self._failures.inc()

    def text(self) -> str:
        """The values in Prometheus' format."""
        report = self._report
        values = () if report is None else self._of_report(report)
        return exposition([*self._registry.collect(), *values])

    def _of_report(self, report: Report) -> Iterator[Metric]:
        complete = report.complete_until
        found = {str(kind): report.found.get(kind, 0) for kind in KINDS}
        verdicts = {one: int(one == report.verdict) for one in _VERDICTS}
        yield self._by("findings", "Findings of the last audit.", "kind", found)
        yield self._by("verdict", "1 for the verdict of the last audit.", "verdict", verdicts)
        times = (
            ("complete_until_timestamp_seconds",
             "Unix time up to which all records are proved to have arrived.", complete.wall_time),
            ("complete_until_event_timestamp_seconds", "The same as a timestamp of records.",
             complete.event_time),
            ("audit_timestamp_seconds", "When its ends were fixed.", report.at),
        )  # fmt: skip
        for name, told, value in (
            *((name, told, at.timestamp()) for name, told, at in times if at is not None),
            ("audit_records", "Records that the last audit compared.", report.records),
            ("audit_accounted", "Those that are accounted for.", report.accounted),
            ("audit_undecided", "What the last audit could not decide.", len(report.undecided)),
            ("audit_duration_seconds", "Duration of the last audit.", report.seconds),
        ):
            yield gauge(f"oncely_{name}", told, ["pipeline"], [([self.pipeline], value)])

    def _by(self, name: str, told: str, label: str, values: Mapping[str, float]) -> Metric:
        samples = [((self.pipeline, of), value) for of, value in values.items()]
        return gauge(f"oncely_audit_{name}", told, ("pipeline", label), samples)

    def server(self, address: str, names: Collection[str] = ()) -> Server:
        """Serves ``/metrics`` at the address of ``--metrics``, and to requests for these names.

        Raises:
            WrongInput: the address is malformed, or none of this machine.
            Unavailable: it is taken.
        """
        pages = dict.fromkeys(("/", "/metrics"), lambda: Page(self.text(), CONTENT_TYPE))
        return Server("--metrics", address, pages, names)
