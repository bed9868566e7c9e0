"""The state of a run, folded from its events, with its result and the wait of its records.

Progress, results, probes and metrics read the state. The wait for a commit is the measure
of a pipeline that stands still: the verdict (``status``, ``top``, pages, exit codes), ``/livez``
and the metrics read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from oncely.core import events
from oncely.core.claim import NO_RECORDS, Counts
from oncely.core.ranges import Position, TopicPartition

WARN_SECONDS, STALL_SECONDS = 60.0, 300.0
"""Seconds for which records may wait without a commit."""


@dataclass(frozen=True)
class TimesToLive:
    """Times to live in seconds.

    Attributes:
        polling: without a look for records; and of a partition that has some, without a read.
        consuming: without a commit though there are records.
    """

    polling: float = 300.0
    consuming: float = 60.0


class Waited(NamedTuple):
    """Seconds for which records have waited without a commit.

    Attributes:
        all: without a commit of any partition; 0 if there are no records to read.
        each: without a commit of this partition; only of those that have records to read.
    """

    all: float
    each: Mapping[TopicPartition, float]


def waited(
    ages: Mapping[TopicPartition, float], since: float, moved: Mapping[TopicPartition, float]
) -> Waited:
    """Measure it.

    Args:
        ages: seconds for which each partition has had records to read; absent if it has none.
        since: seconds since the last commit of any partition.
        moved: seconds since the last commit of each partition; absent if it had none.
    """
    each = {tp: min(age, moved.get(tp, age)) for tp, age in ages.items()}
    return Waited(min(since, max(ages.values(), default=0.0)), each)


@dataclass
class RunState:
    """What the events of a run have told so far.

    Attributes:
        state: starting, running, standing by, draining, fenced or ended.
        epoch: that of the last takeover; 0 before it.
        error: the last error, if nothing was committed since; empty if there was none.
        positions: of the partitions that it holds.
        planned: the partitions of the batch under way.
        waiting: the partitions whose next record waits as a filter says.
        counts: the sums of the committed batches.
    """

    state: str = "starting"
    epoch: int = 0
    error: str = ""
    positions: Mapping[TopicPartition, Position] = field(default_factory=dict)
    planned: frozenset[TopicPartition] = frozenset()
    waiting: frozenset[TopicPartition] = frozenset()
    counts: Counts = NO_RECORDS

    def take(self, event: events.Event) -> None:
        """Fold an event into the state."""
        match event:
            case events.PipelineOpened():
                self.epoch, self.error = event.epoch, ""
                if event.every or event.positions:  # not the first look of a member of a group
                    self.state = "running"
                self._move(event.positions)
            case events.BatchPlanned():
                self.planned = frozenset(event.ranges)
            case events.RangeCommitted():
                self._move({event.partition: event.range.end})
            case events.BatchCommitted():
                self.error, self.planned = "", frozenset()
                self.counts += Counts(event.records, event.rows, event.rejects, event.filtered)
                self._move(event.positions)
            case events.PartitionAdded():
                self._move({event.partition: event.position})
            case events.Polled():
                self.waiting = self.waiting - event.partitions | event.waiting
            case events.BatchFailed():
                self.error, self.planned = event.error, frozenset()
            case _:
                self._change(event)

    def _change(self, event: events.Event) -> None:
        match event:
            case events.PartitionsChanged(change="assigned"):
                self.state = "running"  # a member of a group, even without partitions
            case events.PartitionsChanged():
                self._lose(event.partitions)
            case events.FencedOut():
                self._lose(event.partitions or self.positions.keys())
                if not event.partitions:
                    self.state = "fenced"
            case events.StandingBy():
                self.state = "standing by"
            case events.Draining():
                self.state = "draining"
            case events.RunClosed():
                self.state = "ended"

    def _move(self, positions: Mapping[TopicPartition, Position]) -> None:
        self.positions = {**self.positions, **positions}

    def _lose(self, partitions: Collection[TopicPartition]) -> None:
        self.positions = {tp: at for tp, at in self.positions.items() if tp not in partitions}
        self.planned -= frozenset(partitions)
        self.waiting -= frozenset(partitions)


@dataclass(frozen=True)
class RunResult:
    """How a run has ended, and what it has committed; true in a condition if it is complete.

    Attributes:
        ended: ``complete``: by itself, with all records committed that it was to read;
            ``stopped``: it was asked to stop before.
        records: the records whose ranges it has committed.
        rows, rejects, filtered: what became of them: rows and dead letters that were written, and
            records that were filtered.
        seconds: its duration.
    """

    ended: Literal["complete", "stopped"]
    records: int = 0
    rows: int = 0
    rejects: int = 0
    filtered: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.ended == "complete"
