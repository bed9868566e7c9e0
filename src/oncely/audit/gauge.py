"""The state of a watch for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from oncely.audit.report import KINDS, Report
from oncely.clients.http_server import Page, Server
from oncely.core.prometheus import CONTENT_TYPE, Metric, Sample, exposition
from oncely.errors import OncelyError

_VERDICTS = ("clean", "damaged", "unknown")


@dataclass
class Gauges:
    """The values after the last audit.

    Attributes:
        pipeline: the value of the label ``pipeline``.
    """

    pipeline: str
    _report: Report | None = None
    _counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def audited(self, report: Report) -> None:
        """Take the values of a report."""
        with self._lock:
            self._report = report
            self._counts["audits"] += 1

    def failed(self, _: OncelyError) -> None:
        """Count an audit without an answer."""
        with self._lock:
            self._counts["failures"] += 1

    def text(self) -> str:
        """The values in Prometheus' format."""
        with self._lock:
            report, counts = self._report, Counter(self._counts)
        metrics = [
            self._metric("audit_audits_total", "Audits that have ended.",
                         [({}, counts["audits"])])._replace(kind="counter"),
            self._metric("audit_failures_total", "Audits that got no answer.",
                         [({}, counts["failures"])])._replace(kind="counter"),
        ]  # fmt: skip
        if report is not None:
            metrics += self._of_report(report)
        return exposition(metrics)

    def _of_report(self, report: Report) -> Iterator[Metric]:
        complete, metric = report.complete_until, self._metric
        found = [({"kind": str(kind)}, report.found.get(kind, 0)) for kind in KINDS]
        verdicts = [({"verdict": one}, int(one == report.verdict)) for one in _VERDICTS]
        if complete.wall_time is not None:
            told = "Unix time up to which all records are proved to have arrived."
            yield metric("complete_until_seconds", told, [({}, complete.wall_time.timestamp())])
        if complete.event_time is not None:
            told = "The same as a timestamp of records."
            at = complete.event_time.timestamp()
            yield metric("complete_until_event_seconds", told, [({}, at)])
        yield metric("audit_findings", "Findings of the last audit.", found)
        yield metric("audit_verdict", "1 for the verdict of the last audit.", verdicts)
        for name, told, value in (
            ("records", "Records that the last audit compared.", report.records),
            ("accounted", "Those that are accounted for.", report.accounted),
            ("undecided", "What the last audit could not decide.", len(report.undecided)),
            ("duration_seconds", "Duration of the last audit.", report.seconds),
            ("timestamp_seconds", "When its ends were fixed.", report.at.timestamp()),
        ):
            yield metric(f"audit_{name}", told, [({}, value)])

    def _metric(
        self, name: str, told: str, samples: Sequence[tuple[dict[str, str], float]]
    ) -> Metric:
        own = [Sample({"pipeline": self.pipeline, **labels}, value) for labels, value in samples]
        return Metric(f"oncely_{name}", told, own)

    def server(self, address: str) -> Server:
        """Serves ``/metrics`` at the address of ``--metrics``.

        Raises:
            WrongInput: the address is malformed, or can't be listened at.
        """
        pages = dict.fromkeys(("/", "/metrics"), lambda: Page(self.text(), CONTENT_TYPE))
        return Server("--metrics", address, pages)
