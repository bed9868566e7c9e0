"""OpenTelemetry: spans and metrics of a consumer, by the semantic conventions for messaging.

Everything goes through OpenTelemetry's API, and only in a process that has imported it: by
:func:`configure`, which reads the environment, or by an application that is instrumented. The
conventions: https://opentelemetry.io/docs/specs/semconv/messaging/ (docs/metrics.md).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from oncely.extras import is_installed

log = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float]

_NAME = "oncely"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds that the conventions give for messaging.process.duration."""


@dataclass(frozen=True)
class MessageRange:
    """Messages of one topic-partition that are processed together.

    Attributes:
        topic, partition: the topic-partition.
        start, end: the offset of the first one, and the offset after the last one.
        count: their number; None: unknown.
        context: the trace of the first one, by W3C Trace Context; empty if it is not known.
    """

    topic: str
    partition: int
    start: int
    end: int
    count: int | None
    context: Mapping[str, str] = field(default_factory=dict)


class Consumer:
    """The instruments of a pipeline.

    Args:
        pipeline: its name.
        group: the consumer group.
        tracers, meters: the providers; None: the global ones.
    """

    def __init__(self, pipeline: str, group: str, tracers: Any = None, meters: Any = None) -> None:
        from opentelemetry import metrics, trace

        version = importlib.metadata.version(_NAME)
        self._tracer = trace.get_tracer(_NAME, version, tracers)
        meter = metrics.get_meter(_NAME, version, meters)
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages",
            "{message}",
            "Number of messages that were delivered to the application.",
        )
        self._duration = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of processing operation.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._own: Attributes = {
            "messaging.system": "kafka",
            "messaging.operation.name": "process",
            "messaging.consumer.group.name": group,
            "oncely.pipeline": pipeline,
        }

    def count(self, messages: MessageRange) -> None:
        """Count messages that have taken effect."""
        self._consumed.add(
            messages.count or 0,
            {
                **self._own,
                "messaging.destination.name": messages.topic,
                "messaging.destination.partition.id": str(messages.partition),
            },
        )

    def took(self, topic: str, seconds: float) -> None:
        """Add the duration of a batch of a topic."""
        self._duration.record(seconds, {**self._own, "messaging.destination.name": topic})

    def processed(
        self, messages: MessageRange, seconds: float, more: Attributes, error: str = ""
    ) -> None:
        """A span that ends now; with the class of an error, one that has failed."""
        end = time.time_ns()
        span = self._tracer.start_span(
            **self._of(messages, more), start_time=end - int(seconds * 1e9)
        )
        if error:
            _fail(span, error)
        span.end(end)

    @contextmanager
    def processing(self, messages: MessageRange) -> Iterator[None]:
        """A span of the block. It contains no text of an error, which may quote a record."""
        with self._tracer.start_as_current_span(
            **self._of(messages, {}), record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except BaseException as error:
                _fail(span, type(error).__qualname__)
                raise

    def _of(self, messages: MessageRange, more: Attributes) -> dict[str, Any]:
        from opentelemetry import trace

        count = {} if messages.count is None else {"messaging.batch.message_count": messages.count}
        return {
            "name": f"process {messages.topic}",
            "kind": trace.SpanKind.CONSUMER,
            "links": _links(messages.context),
            "attributes": {
                **self._own,
                "messaging.operation.type": "process",
                "messaging.destination.name": messages.topic,
                "messaging.destination.partition.id": str(messages.partition),
                **count,
                "messaging.kafka.offset": messages.start,
                "oncely.offset.end": messages.end,
                **more,
            },
        }


def _fail(span: Any, error: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error)
    span.set_status(StatusCode.ERROR)


def _links(context: Mapping[str, str]) -> list[Any]:
    """The link to the span that has produced the first message."""
    if "traceparent" not in context:
        return []
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    found = TraceContextTextMapPropagator().extract(context, context=Context())
    producer = trace.get_current_span(found).get_span_context()
    return [trace.Link(producer)] if producer.is_valid else []


_consumer: ContextVar[Consumer | None] = ContextVar("consumer", default=None)


def consumer_of(pipeline: str, group: str) -> Consumer | None:
    """The instruments of a pipeline; None if the process does not use OpenTelemetry."""
    return Consumer(pipeline, group) if "opentelemetry.trace" in sys.modules else None


@contextmanager
def using(consumer: Consumer | None) -> Iterator[None]:
    """Within the block, also in threads with a copy of the context, :func:`processing` uses it."""
    token = _consumer.set(consumer)
    try:
        yield
    finally:
        _consumer.reset(token)


@contextmanager
def processing(messages: Callable[[], MessageRange]) -> Iterator[None]:
    """A span of the block, if there is a consumer."""
    consumer = _consumer.get()
    if consumer is None:
        yield
        return
    with consumer.processing(messages()):
        yield


# -- the environment -----------------------------------------------------------------------


def configure() -> None:
    """Export spans and metrics as the variables OTEL_* say, until the process ends.

    Without them nothing is imported. Providers that the application has set stay.
    """
    wanted = [signal for signal in _SET if _exporter(signal) == "otlp"]
    if not wanted or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    if not is_installed("opentelemetry.sdk"):
        log.info("OTEL_* is set and has no effect: pip install 'oncely[otel]'")
        return
    from opentelemetry import trace
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    named = OTELResourceDetector().detect().attributes
    resource = Resource.create({SERVICE_NAME: named.get(SERVICE_NAME, _NAME)})
    for signal in wanted:
        try:
            _SET[signal](resource)
        except ModuleNotFoundError as error:
            log.warning("no OpenTelemetry %s: %s is not installed", signal.lower(), error.name)


def _exporter(signal: str) -> str:
    """otlp if an endpoint is named, unless OTEL_…_EXPORTER says otherwise."""
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    named = "otlp" if any(os.environ.get(one) for one in endpoints) else "none"
    given = os.environ.get(f"OTEL_{signal}_EXPORTER") or named
    if given not in ("otlp", "none"):
        log.warning("OTEL_%s_EXPORTER: found %r; only otlp is exported", signal, given)
    return given


def _otlp(signal: str, module: str) -> Any:
    """The module of the protocol's exporter, by default http/protobuf."""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    given = next((os.environ[one] for one in names if os.environ.get(one)), "http/protobuf")
    protocol = given.partition("/")[0]
    return importlib.import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{module}")


def _set_tracers(resource: Any) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = _otlp("TRACES", "trace_exporter").OTLPSpanExporter()
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def _set_meters(resource: Any) -> None:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = _otlp("METRICS", "metric_exporter").OTLPMetricExporter()
    reader = PeriodicExportingMetricReader(exporter)
    metrics.set_meter_provider(MeterProvider([reader], resource))


_SET: Mapping[str, Callable[[Any], None]] = {"METRICS": _set_meters, "TRACES": _set_tracers}
