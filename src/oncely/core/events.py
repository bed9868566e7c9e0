"""What happened, as values: logs, progress and tests read these, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition


@dataclass(frozen=True)
class PipelineOpened:
    """The run holds the ledger from here on."""

    pipeline: str
    epoch: int
    positions: Mapping[TopicPartition, Position]
    first_start: bool


@dataclass(frozen=True)
class BatchPlanned:
    """Spark has fixed the exact ranges of a micro-batch; nothing of it is committed yet."""

    batch_id: int
    ranges: Mapping[TopicPartition, OffsetRange]


@dataclass(frozen=True)
class RangeCommitted:
    """Records of one range have taken effect (or had before: ``replayed``)."""

    partition: TopicPartition
    range: OffsetRange
    records: int
    rows: int
    rejects: int
    filtered: int
    replayed: bool = False


@dataclass(frozen=True)
class BatchCommitted:
    """Every range of a micro-batch has taken effect and the positions stand at its ends."""

    batch_id: int
    records: int
    rows: int
    rejects: int
    seconds: float
    positions: Mapping[TopicPartition, Position] = field(default_factory=dict)


@dataclass(frozen=True)
class PartitionAdded:
    """The topic has grown; the new partition is read from its first offset."""

    partition: TopicPartition
    position: Position


@dataclass(frozen=True)
class GapFound:
    """Records left the topic before they were read; with ``on_gap = "record"`` the run goes on."""

    partition: TopicPartition
    missing: OffsetRange


@dataclass(frozen=True)
class BatchFailed:
    """A micro-batch ended in an error and will be tried again after ``retry_in_seconds``."""

    error: str
    attempt: int
    retry_in_seconds: float


@dataclass(frozen=True)
class FencedOut:
    """A newer run has taken over; this one ends."""

    ours: int
    theirs: int


@dataclass(frozen=True)
class Draining:
    """Asked to stop: the batch in hand is finished first."""


Event = (
    PipelineOpened
    | BatchPlanned
    | RangeCommitted
    | BatchCommitted
    | PartitionAdded
    | GapFound
    | BatchFailed
    | FencedOut
    | Draining
)
Listener = Callable[[Event], None]
