"""The state of a watch for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Metric

from oncely.audit.report import KINDS, Report
from oncely.clients.http_server import Page, Server
from oncely.errors import OncelyError
from oncely.prometheus import CONTENT_TYPE, exposition, gauge

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
            ("complete_until_seconds",
             "Unix time up to which all records are proved to have arrived.", complete.wall_time),
            ("complete_until_event_seconds", "The same as a timestamp of records.",
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

    def server(self, address: str) -> Server:
        """Serves ``/metrics`` at the address of ``--metrics``.

        Raises:
            WrongInput: the address is malformed, or can't be listened at.
        """
        pages = dict.fromkeys(("/", "/metrics"), lambda: Page(self.text(), CONTENT_TYPE))
        return Server("--metrics", address, pages)
