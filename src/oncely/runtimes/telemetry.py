"""Spans and metrics of OpenTelemetry from the events of a run (docs/metrics.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from oncely.core import events
from oncely.core.ranges import TopicPartition
from oncely.telemetry import Consumer, MessageRange, consumer_of, using


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
