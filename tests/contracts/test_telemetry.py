"""Spans and metrics of OpenTelemetry: by events, around handlers, and by the environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from oncely import telemetry
from oncely.core import events
from oncely.core.ranges import OffsetRange
from oncely.kinds.handlers.batch import Batch
from oncely.kinds.handlers.sink import Handler, HandlersSink, OnError
from oncely.pipeline.running import traced
from oncely.runtimes.health import Telemetry
from oncely.stores.sql.ledger import SqlLedger
from oncely.telemetry import Consumer, using
from tests.sinktools import T0, T1, Place, chunk, commit_all, numbered, open_sink

pytest.importorskip("opentelemetry.sdk", reason="oncely[otel] is not installed")

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
COMMON = {
    "messaging.system": "kafka",
    "messaging.operation.name": "process",
    "messaging.operation.type": "process",
    "messaging.consumer.group.name": "g",
    "messaging.destination.name": "t",
    "oncely.pipeline": "p",
}


@dataclass
class Recorded:
    """A consumer whose spans and metrics stay in memory."""

    consumer: Consumer
    spans_: Any
    metrics_: Any

    @property
    def spans(self) -> list[Any]:
        return list(self.spans_.get_finished_spans())

    def metric(self, name: str) -> list[tuple[Mapping[str, Any], Any]]:
        """Attributes and data point of each series."""
        found = self.metrics_.get_metrics_data()
        return [
            (dict(point.attributes), point)
            for resource in found.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def recorded() -> Recorded:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, tracers, metrics = InMemorySpanExporter(), TracerProvider(), InMemoryMetricReader()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    return Recorded(Consumer("p", "g", tracers, MeterProvider([metrics])), spans, metrics)


def test_a_span_for_each_partition_of_a_committed_batch(recorded: Recorded) -> None:
    from opentelemetry.trace import SpanKind

    heard: list[events.Event] = []
    listener = Telemetry(recorded.consumer, heard.append)
    told: list[events.Event] = [
        events.BatchPlanned(7, {T0: OffsetRange(10, 50), T1: OffsetRange(0, 5)}),
        events.RangeCommitted(T0, OffsetRange(10, 30), 20, 18, 1, 1),
        events.RangeCommitted(T0, OffsetRange(30, 48), 15, 15, 0, 0),
        events.RangeCommitted(T0, OffsetRange(48, 50), 0, 0, 0, 0, kind="hole"),
        events.RangeCommitted(T1, OffsetRange(0, 5), 5, 5, 0, 0, replayed=True),
        events.BatchCommitted(7, 35, 33, 1, 0.25, {T0: 50, T1: 5}, phases={"write": 0.125}),
        events.BatchCommitted(8, 0, 0, 0, 0.25, {T0: 50, T1: 5}),
    ]
    for one in told:
        listener(one)
    assert heard == told
    (span,) = recorded.spans
    assert (span.name, span.kind, span.links) == ("process t", SpanKind.CONSUMER, ())
    assert abs((span.end_time - span.start_time) / 1e9 - 0.25) < 1e-6
    assert span.attributes == COMMON | {
        "messaging.destination.partition.id": "0",
        "messaging.batch.message_count": 35,
        "messaging.kafka.offset": 10,
        "oncely.offset.end": 48,
        "oncely.batch": 7,
        "oncely.epoch": 0,
        "oncely.rows": 33,
        "oncely.rejects": 1,
        "oncely.filtered": 1,
        "oncely.seconds.write": 0.125,
    }
    common = {name: one for name, one in COMMON.items() if name != "messaging.operation.type"}
    ((attributes, point),) = recorded.metric("messaging.client.consumed.messages")
    assert attributes == common | {"messaging.destination.partition.id": "0"}
    assert point.value == 35
    ((attributes, point),) = recorded.metric("messaging.process.duration")
    assert attributes == common
    assert (point.count, point.sum, point.explicit_bounds[-1]) == (1, 0.25, 10.0)


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (events.BatchFailed("value 4111 of a record", 1, 0.5, "Unavailable", 3), "Unavailable"),
        (events.FencedOut(3, 4), "Fenced"),
        (events.RunClosed(False, "value 4111 of a record", "TooManyRejects"), "TooManyRejects"),
    ],
    ids=["failed", "fenced", "ended"],
)
def test_a_failed_span_for_each_partition_of_a_batch_that_is_not_committed(
    recorded: Recorded, ending: events.Event, kind: str
) -> None:
    planned = events.BatchPlanned(7, {T0: OffsetRange(10, 50), T1: OffsetRange(0, 5)}, 3)
    for one in (planned, ending, ending):
        Telemetry(recorded.consumer, lambda _: None, spans=False)(one)
    assert not recorded.spans
    listener = Telemetry(recorded.consumer, lambda _: None)
    for one in (planned, ending, ending):
        listener(one)
    first, second = recorded.spans
    assert first.attributes == COMMON | {
        "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": 10,
        "oncely.offset.end": 50,
        "oncely.batch": 7,
        "oncely.epoch": 3,
        "error.type": kind,
    }
    assert second.attributes["messaging.destination.partition.id"] == "1"
    for span in (first, second):
        assert (span.status.is_ok, span.status.is_unset) == (False, False)
        assert "4111" not in span.to_json()
        assert span.start_time <= span.end_time


def test_an_error_beside_a_batch_is_not_its_own(recorded: Recorded) -> None:
    listener = Telemetry(recorded.consumer, lambda _: None)
    told: list[events.Event] = [
        events.BatchPlanned(1, {T0: OffsetRange(0, 2)}, 3),
        events.BatchFailed("a takeover without an answer", 1, 0.5, "Unavailable", None),
        events.FencedOut(2, 4),
        events.RangeCommitted(T0, OffsetRange(0, 2), 2, 2, 0, 0),
        events.BatchCommitted(1, 2, 2, 0, 0.25, {T0: 2}, 3),
        events.RunClosed(False, "the broker is away", "Unavailable"),
    ]
    for one in told:
        listener(one)
    (span,) = recorded.spans
    assert span.status.is_unset


def handled(place: Place, handler: Handler) -> HandlersSink:
    ledger = SqlLedger("p", place.dialect, place.table("oncely_positions"))
    return HandlersSink(ledger, {"t": handler}, OnError(0))


def test_the_span_of_a_handler_links_to_the_producer(
    on_postgres: Place, recorded: Recorded
) -> None:
    from opentelemetry import trace

    current: list[Any] = []

    def handler(batch: Batch, tx: object) -> None:
        current.append(trace.get_current_span().get_span_context())
        if batch.partition == 1:
            raise ValueError("the card 4111 is refused")

    sink = handled(on_postgres, handler)
    fence = open_sink(sink, {T0: 0, T1: 0}).fence
    header = {"key": "traceparent", "value": f"00-{TRACE_ID}-{SPAN_ID}-01".encode()}
    given = chunk({T0: (0, numbered(3, 5)), T1: (0, numbered(0, 1))})
    headers: Any = pa.array([[header], [], [{"key": "traceparent", "value": b"nonsense"}]])
    with using(recorded.consumer):
        commit_all(sink, replace(given, headers=headers), fence)
    first, refused, *_ = recorded.spans
    assert [one.get_span_context() for one in recorded.spans] == current
    (link,) = first.links
    assert (link.context.trace_id, link.context.span_id) == (int(TRACE_ID, 16), int(SPAN_ID, 16))
    assert first.attributes == COMMON | {
        "messaging.destination.partition.id": "0",
        "messaging.batch.message_count": 2,
        "messaging.kafka.offset": 3,
        "oncely.offset.end": 5,
    }
    assert first.status.is_unset
    assert (refused.status.is_ok, refused.attributes["error.type"]) == (False, "ValueError")
    assert refused.links == ()
    assert "4111" not in refused.to_json()


def test_without_opentelemetry_in_the_process_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)

    def heard(_: events.Event) -> None: ...

    with traced("p", "g", heard) as listener:
        assert listener is heard
        with telemetry.processing(lambda: pytest.fail("the messages are not asked for")):
            pass


@pytest.mark.parametrize(
    ("environment", "providers", "said"),
    [
        ({}, "Proxy Proxy imported=False", ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "Tracer Meter", ""),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, "Tracer Proxy", ""),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_METRICS_EXPORTER": "none",
          "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "Tracer Proxy", ""),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, "Proxy Proxy imported=False",
         "OTEL_METRICS_EXPORTER: found 'prometheus'; only otlp is exported"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
         "Proxy Proxy imported=False", ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
          "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "Proxy Proxy",
         "no OpenTelemetry traces: opentelemetry.exporter.otlp.proto.grpc is not installed"),
    ],
)  # fmt: skip
def test_the_environment_switches_it_on(
    environment: dict[str, str], providers: str, said: str
) -> None:
    code = """
import os, sys
from oncely.telemetry import configure, consumer_of
configure()
imported = "opentelemetry.trace" in sys.modules
assert imported == (consumer_of("p", "g") is not None)
from opentelemetry import metrics, trace
names = [type(one).__name__.strip("_").removesuffix("Provider")
         for one in (trace.get_tracer_provider(), metrics.get_meter_provider())]
print(*("Proxy" if one.startswith("Proxy") else one for one in names), f"{imported=}")
sys.stdout.flush()
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stdout.startswith(providers)
    assert said in done.stderr
