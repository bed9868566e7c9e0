"""What a transaction claims of a topic, for which run, and what became of the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from oncely.core.budget import NOTHING_COUNTED, RejectCount
from oncely.core.ledger import Entry, advance
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, SourceIdentity, TopicPartition
from oncely.errors import check

RangeKind = Literal["data", "hole", "gap", "joined"]
"""data: records were read; hole: there were none; gap: lost before we read them."""

Positions = Mapping[TopicPartition, Position]

Reset = Callable[[Positions], Positions]
"""Where positions are put, given where they stand; asked when the old run is fenced."""


@dataclass(frozen=True)
class Fence:
    """Who writes: a pipeline and the epoch it was given. An older epoch commits nothing.

    ``run`` is the unique name of the run, where the ledger keeps it beside the epoch.
    """

    pipeline: str
    epoch: int
    run: str = ""


class QueryBatch(NamedTuple):
    """A micro-batch of a streaming query that brings its own checkpoint.

    Attributes:
        query_id: the id of the checkpoint.
        batch_id: Spark's number of the micro-batch.
        plan: a digest of what Spark has planned, from the checkpoint's offset log.
    """

    query_id: str
    batch_id: int
    plan: str


@dataclass(frozen=True)
class Claim:
    """What one transaction claims, and the ledger state that the decision was made on.

    Attributes:
        fence: the run that claims.
        ranges: the offsets that positions are moved over, each from where its position stands.
        expected: the entry of each of these partitions. A position is moved by compare-and-set on
            its (position, epoch).
        kind: what the history says of the ranges.
        query: the micro-batch of a query that brings its checkpoint; it takes effect once.
    """

    fence: Fence
    ranges: Mapping[TopicPartition, OffsetRange]
    expected: Mapping[TopicPartition, Entry]
    kind: RangeKind = "data"
    query: QueryBatch | None = None

    def __post_init__(self) -> None:
        holder = self.fence.epoch, self.fence.run
        for tp in self.ranges:
            ours = (self.expected[tp].epoch, self.expected[tp].run) == holder
            check(ours, f"{tp}: decided on another epoch's entry, or another run's")

    def only(self, partitions: Iterable[TopicPartition]) -> Claim:
        """The claim of some of its partitions."""
        return replace(self, ranges={tp: self.ranges[tp] for tp in partitions})

    def end(self, tp: TopicPartition) -> Position:
        """Where the partition's position stands when the claim has taken effect."""
        return advance(self.expected[tp], [self.ranges[tp]])

    @property
    def data(self) -> Claim:
        """The claim of a batch without its empty ranges, which move no position.

        Raises:
            InvariantViolation: the batch does not begin where the positions stand.
        """
        claimed = self.only(tp for tp, range_ in self.ranges.items() if not range_.is_empty)
        for tp, range_ in claimed.ranges.items():
            check(self.expected[tp].position == range_.start, f"{tp}: the batch begins elsewhere")
        return claimed


@dataclass(frozen=True)
class Takeover:
    """How a run takes the positions of a ledger over.

    Attributes:
        source: cluster and topic ids as they are now; compared with the ledger's.
        start: where a pipeline that never ran begins; asked once in the pipeline's life.
        earliest: the first offset of each partition, for partitions seen later.
        expected: the epoch that this very run has held. A run that opens again after a failed
            batch must not steal the ledger back from a newer run.
        reset: puts positions elsewhere.
    """

    source: SourceIdentity
    start: Callable[[], Positions]
    earliest: Positions
    expected: int | None = None
    reset: Reset | None = None


@dataclass(frozen=True)
class Opened:
    """The answer to ``open``: this run's fence, and a position for every partition.

    Attributes:
        fence: the run's.
        positions: where it reads on.
        first_start: the pipeline has never run before.
        counted: the count of rejects that was noted last; empty where none is kept.
        leader_epochs: the leader epochs of the source that were noted; a reset forgets those of
            the positions that it moves.
    """

    fence: Fence
    positions: Positions
    first_start: bool
    counted: RejectCount = NOTHING_COUNTED
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Notes:
    """What a run keeps in the ledger beside positions.

    Attributes:
        leader_epochs: of the source's partitions, each no older than the record before the
            partition's position. Partitions that are not named keep theirs.
        counted: the count of rejects for the next run's ``open``; None: unchanged.
    """

    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    counted: RejectCount | None = None


@dataclass(frozen=True)
class Counts:
    """What became of a topic-partition's records."""

    records: int
    rows: int
    rejects: int
    filtered: int


NO_RECORDS = Counts(0, 0, 0, 0)


class PositionMoved(Exception):
    """The compare-and-set changed no row: someone else committed. Read the ledger, decide again."""
