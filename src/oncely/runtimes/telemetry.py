"""Spans and metrics of OpenTelemetry from the events of a run (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from oncely.core import events
from oncely.core.topics import TopicPartition
from oncely.telemetry import Consumer, Messages, consumer_of, using


@dataclass
class Telemetry:
    """A listener of a run's events.

    Attributes:
        consumer: the instruments.
        listener: called with each event first.
        spans: make a span for each topic-partition of a committed batch; False where the sink
            makes them.
    """

    consumer: Consumer
    listener: events.Listener
    spans: bool = True
    _done: dict[TopicPartition, list[events.RangeCommitted]] = field(default_factory=dict)

    def __call__(self, event: events.Event) -> None:
        """Take an event."""
        self.listener(event)
        match event:
            case events.PipelineOpened():
                self._done.clear()
            case events.RangeCommitted() if event.records and not event.replayed:
                self._done.setdefault(event.partition, []).append(event)
            case events.BatchCommitted():
                self._committed(event)

    def _committed(self, event: events.BatchCommitted) -> None:
        done = {tp: self._done.pop(tp) for tp in event.positions if tp in self._done}
        for tp, ranges in done.items():
            first = min(one.range.start for one in ranges)
            last = max(one.range.end for one in ranges)
            messages = Messages(*tp, first, last, sum(one.records for one in ranges))
            self.consumer.count(messages)
            if self.spans:
                self.consumer.processed(messages, event.seconds, _attributes(event, ranges))
        for topic in sorted({tp.topic for tp in done}):
            self.consumer.took(topic, event.seconds)


@contextmanager
def traced(
    pipeline: str, group: str, listener: events.Listener, *, spans: bool = True
) -> Iterator[events.Listener]:
    """The listener, with :class:`Telemetry` before it if the process uses OpenTelemetry.

    Args:
        pipeline: its name.
        group: the consumer group.
        listener, spans: as of :class:`Telemetry`.
    """
    consumer = consumer_of(pipeline, group)
    with using(consumer):
        yield listener if consumer is None else Telemetry(consumer, listener, spans)


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
