"""Events of a run as values: the only input of logs, progress, the event log and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from oncely.core.change import RewriteKind
from oncely.core.claim import RangeKind
from oncely.core.ranges import OffsetRange, Position, TopicPartition


@dataclass(frozen=True)
class PipelineOpened:
    """The run has taken over the ledger.

    Attributes:
        pipeline: its name.
        epoch: the epoch of the takeover.
        positions: the position of each partition that was taken over.
        first_start: the pipeline has never run before.
        every: all partitions were taken over, also those added later; False: only those of
            ``positions``.
        beyond: the ranges beyond the positions that have taken effect.
        begun: the partitions that begin at these positions: no run has moved them.
    """

    pipeline: str
    epoch: int
    positions: Mapping[TopicPartition, Position]
    first_start: bool
    every: bool = True
    beyond: Mapping[TopicPartition, Sequence[OffsetRange]] = field(default_factory=dict)
    begun: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True)
class Polled:
    """The run has looked for records. A sign of life: not in the event log.

    Attributes:
        partitions: those that a member of a group reads.
        read: those of which something has come since its last sign, or is in memory.
        waiting: those whose next record waits as a filter says.
        repeated: the number of records that had come before, since the last sign.
        unread: those that a member of another pipeline holds: no member reads them for this one.
    """

    partitions: frozenset[TopicPartition] = frozenset()
    read: frozenset[TopicPartition] = frozenset()
    waiting: frozenset[TopicPartition] = frozenset()
    repeated: int = 0
    unread: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True)
class BatchPlanned:
    """The exact ranges of a batch are fixed; none of it is committed yet.

    Attributes:
        batch_id: its number in the epoch.
        ranges: its offsets.
        epoch: the epoch that commits it; 0: that of the last takeover.
    """

    batch_id: int
    ranges: Mapping[TopicPartition, OffsetRange]
    epoch: int = 0


@dataclass(frozen=True)
class RangeCommitted:
    """Records of one range have taken effect, now or earlier (``replayed``).

    ``kind`` is that of the history: a hole has no records, a gap was lost, and the position was
    before a range of kind ahead. ``epoch`` is that of the commit; 0: that of the last takeover.
    """

    partition: TopicPartition
    range: OffsetRange
    records: int
    rows: int
    rejects: int
    filtered: int
    replayed: bool = False
    kind: RangeKind = "data"
    epoch: int = 0


@dataclass(frozen=True)
class BatchCommitted:
    """Every range of a batch has taken effect; the positions are at its ends. ``epoch`` is that of
    the commit; 0: that of the last takeover. ``phases`` has the seconds of each phase that was
    measured (:mod:`oncely.phases`)."""

    batch_id: int
    records: int
    rows: int
    rejects: int
    seconds: float
    positions: Mapping[TopicPartition, Position] = field(default_factory=dict)
    epoch: int = 0
    filtered: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PartitionAdded:
    """A partition was added to the topic; it is read from its first offset."""

    partition: TopicPartition
    position: Position


@dataclass(frozen=True)
class GapFound:
    """Records were deleted from the topic before they were read; with ``on_gap = "record"`` the run
    continues."""

    partition: TopicPartition
    missing: OffsetRange


@dataclass(frozen=True)
class BatchFailed:
    """A batch ended in an error and will be repeated after ``retry_in_seconds``.

    Attributes:
        error: its text.
        attempt: the number of errors in a row.
        retry_in_seconds: the time until the next attempt.
        kind: the class of the error.
        epoch: that of the planned batch, which is not committed; None: no batch was planned.
    """

    error: str
    attempt: int
    retry_in_seconds: float
    kind: str = ""
    epoch: int | None = 0


@dataclass(frozen=True)
class FencedOut:
    """A newer run has taken over. This one ends, unless it holds other partitions.

    Attributes:
        ours: the epoch of this run.
        theirs: the epoch of the newer one.
        partitions: the partitions that it has taken; empty: all.
    """

    ours: int
    theirs: int
    partitions: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True)
class StandingBy:
    """The run waits until it is the first of the pipeline's replicas, or a worker until there is no
    replica on Spark; it takes over then."""


@dataclass(frozen=True)
class Draining:
    """The run was asked to stop; it finishes the current batch first."""


@dataclass(frozen=True)
class PositionsReset:
    """A reset has taken over the ledger and moved positions.

    Attributes:
        epoch: the epoch of the reset.
        before: every position when the previous run was fenced.
        positions: every position since.
    """

    epoch: int
    before: Mapping[TopicPartition, Position]
    positions: Mapping[TopicPartition, Position]


@dataclass(frozen=True)
class RecordsRewritten:
    """A repair or backfill has replaced what records below the position had produced.

    Attributes:
        kind: repair or backfill.
        ranges: the offsets of each topic-partition.
        removed_rows, removed_rejects: what was removed.
        rows, rejects, filtered: what became of the records.
    """

    kind: RewriteKind
    ranges: Mapping[TopicPartition, Sequence[OffsetRange]]
    removed_rows: int
    removed_rejects: int
    rows: int
    rejects: int
    filtered: int


@dataclass(frozen=True)
class RunClosed:
    """The run has ended.

    Attributes:
        complete: it ended by itself, with all records committed that it was to read.
        error: the error that ended it; empty if there was none.
        kind: the class of the error.
    """

    complete: bool
    error: str = ""
    kind: str = ""


@dataclass(frozen=True)
class PartitionsChanged:
    """The assignment of a member of a consumer group has changed.

    ``lost``: the group has given the partitions to others before this member could return them.
    """

    change: Literal["assigned", "revoked", "lost"]
    partitions: frozenset[TopicPartition]


Logged = (
    PipelineOpened
    | BatchPlanned
    | RangeCommitted
    | BatchCommitted
    | PartitionAdded
    | GapFound
    | BatchFailed
    | FencedOut
    | StandingBy
    | Draining
    | PositionsReset
    | RecordsRewritten
    | RunClosed
    | PartitionsChanged
)
Event = Logged | Polled
Listener = Callable[[Event], None]
