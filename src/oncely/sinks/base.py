"""The port of every sink: rows, rejects and positions take effect together or not at all.

``entries`` is what most sink interfaces lack. Whoever can't be asked "what have you
committed?" can promise at-least-once only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.core.ledger import Entry
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.decode.base import Rejection
from oncely.errors import OncelyError, TooManyRejects, Unavailable
from oncely.refused import KEPT, Refused, RefusedRecord

RangeKind = Literal["data", "hole", "gap", "joined"]
"""data: records were read; hole: there were none; gap: lost before we read them."""

IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Fence:
    """Who writes: a pipeline and the epoch it was given. An older epoch commits nothing.

    ``run`` is the unique name of the run, where the ledger keeps it beside the epoch.
    """

    pipeline: str
    epoch: int
    run: str = ""


@dataclass(frozen=True)
class RejectCount:
    """What has been counted against ``sink.max_rejects``, over restarts of the pipeline.

    Attributes:
        setting: the budget that it is counted against, as text; empty when nothing was noted.
        records: records that were read.
        rejects: those of them that were rejected.
    """

    setting: str = ""
    records: int = 0
    rejects: int = 0


@dataclass(frozen=True)
class Opened:
    """The answer to ``open``: this run's fence, and a position for every partition.

    ``counted`` is the count of rejects that was noted last; empty where none is kept.
    """

    fence: Fence
    positions: Mapping[TopicPartition, Position]
    first_start: bool
    counted: RejectCount = RejectCount()


@dataclass(frozen=True)
class Reject:
    """A dead letter: the record as Kafka held it, and why it is no row.

    ``headers`` are pairs of name and bytes, in order. ``timestamp_ms`` is Kafka's own, in
    milliseconds since 1970, or None.
    """

    partition: TopicPartition
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    stage: str
    reason: str

    @property
    def refused(self) -> RefusedRecord:
        """As the error shows it when the pipeline stops."""
        value = None if self.value is None else self.value[:KEPT]
        return RefusedRecord(*self.partition, self.offset, self.stage, self.reason, value)


RAISE_BUDGET = (
    "raise sink.max_rejects to keep them: rejects are counted over restarts, and a changed"
    " sink.max_rejects begins a new count"
)


class BudgetSpent(TooManyRejects):
    """Raised by a sink: more records would be rejected than it may add; nothing was written.

    Attributes:
        rejections: the records of the chunk that were refused so far.
    """

    def __init__(self, rejections: Sequence[Rejection], mend: str) -> None:
        self.rejections = rejections
        super().__init__(
            f"sink.max_rejects: {len(rejections):,} or more records of one commit can't be"
            " written, and fewer rejects are left",
            way_out=f"mend {mend}; or {RAISE_BUDGET}",
        )

    def about(self, chunk: Chunk) -> TooManyRejects:
        """The error for the user, with reasons and a sample of the chunk's records."""
        return TooManyRejects(
            self.message, way_out=self.way_out, refused=chunk.refused(self.rejections)
        )


@dataclass(frozen=True)
class Chunk:
    """What one transaction commits: some ranges and everything their records became.

    A record is named by its index; ``partition`` and ``offset`` map it back to the topic, and
    every row, delete and rejection knows its record, so a chunk can be cut after the fact.

    Attributes:
        ranges: claimed range of each topic-partition: from the planned start, or the end of the
            chunk before, to the last record READ plus one. Never the planned end.
        partitions: the topic-partitions, sorted.
        partition: per record, an index into ``partitions`` (int32).
        offset: per record, its offset (int64).
        rows: the rows to write, columns named as in the table.
        row_record: per row, the record it came from (int64).
        deletes: key columns of tombstones (upsert), or None.
        delete_record: per delete, its record (int64).
        rejections: records found bad before writing.
        dead_letters: fetches what a reject keeps (key, value, headers) for rejections.
        headers: per record, its headers as Spark's source gives them; None where the sink does
            not ask for them.
    """

    ranges: Mapping[TopicPartition, OffsetRange]
    partitions: tuple[TopicPartition, ...]
    partition: IntArray
    offset: IntArray
    rows: pa.Table
    row_record: IntArray
    deletes: pa.Table | None
    delete_record: IntArray
    rejections: tuple[Rejection, ...]
    dead_letters: Callable[[Sequence[Rejection]], list[Reject]]
    headers: pa.ChunkedArray | None = None

    @classmethod
    def of_nothing(cls, ranges: Mapping[TopicPartition, OffsetRange]) -> Chunk:
        """Ranges that are known to hold no records: holes, or gaps that were accepted."""
        none = np.array([], dtype=np.int64)
        return cls(
            ranges, tuple(sorted(ranges)), none, none, pa.table({}), none, None, none, (),
            lambda _: [],
        )  # fmt: skip

    @property
    def records(self) -> int:
        """How many records were read."""
        return len(self.offset)

    def refused(self, rejections: Sequence[Rejection]) -> Refused:
        """Reasons and a sample of refused records; without values where Kafka does not answer."""
        return Refused.of(
            [one.reason for one in rejections],
            lambda chosen: self.refused_records([rejections[at] for at in chosen]),
        )

    def refused_records(self, rejections: Sequence[Rejection]) -> list[RefusedRecord]:
        """Refused records as the error shows them; without values where Kafka does not answer."""
        try:
            return [one.refused for one in self.dead_letters(rejections)]
        except OncelyError:
            return [self._unread(one) for one in rejections]

    def _unread(self, why: Rejection) -> RefusedRecord:
        tp = self.partitions[self.partition[why.record]]
        offset = int(self.offset[why.record])
        return RefusedRecord(tp.topic, tp.partition, offset, why.stage, why.reason, None)

    def keep(self, keep: Mapping[TopicPartition, Sequence[OffsetRange]]) -> Chunk:
        """The chunk without the records outside ``keep``; record indices stay what they were."""
        mask = np.zeros(len(self.offset), dtype=bool)
        for index, tp in enumerate(self.partitions):
            for one in keep.get(tp, ()):
                inside = (self.offset >= one.start) & (self.offset < one.end)
                mask |= inside & (self.partition == index)
        kept_rows = mask[self.row_record]
        kept_deletes = mask[self.delete_record]
        return replace(
            self,
            partition=np.where(mask, self.partition, -1),
            rows=self.rows.filter(pa.array(kept_rows)),
            row_record=self.row_record[kept_rows],
            deletes=self.deletes and self.deletes.filter(pa.array(kept_deletes)),
            delete_record=self.delete_record[kept_deletes],
            rejections=tuple(r for r in self.rejections if mask[r.record]),
        )


@dataclass(frozen=True)
class Written:
    """What a transaction did for one topic-partition."""

    records: int
    rows: int
    rejects: int
    filtered: int


@dataclass(frozen=True)
class Staged:
    """What one successful task left for a batch commit.

    Attributes:
        name: where its rows are; None when it had none.
        rows: how many.
    """

    name: str | None
    rows: int


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
class Publication:
    """What the driver publishes in one transaction.

    Attributes:
        ranges: the ranges that were read; empty ones are allowed (a batch without new data).
        written: per topic-partition, how many records were read and rejected. Rows after a
            shuffle belong to no partition: they are counted in the history of the first one.
        rejects: dead letters of the batch.
        staged: what the successful tasks left.
        query: for a streaming query that brings its own checkpoint, its micro-batch.
    """

    ranges: Mapping[TopicPartition, OffsetRange]
    written: Mapping[TopicPartition, Written]
    rejects: Sequence[Reject]
    staged: Sequence[Staged]
    query: QueryBatch | None = None

    def counted(self, rows: int) -> dict[TopicPartition, Written]:
        """What the history says of each range, the published rows at the first one."""
        first = min((tp for tp, range_ in self.ranges.items() if not range_.is_empty), default=None)
        return {
            tp: replace(one, rows=rows) if tp == first else one for tp, one in self.written.items()
        }


class PositionMoved(Exception):
    """The compare-and-set changed no row: someone else committed. Read the ledger, decide again."""


class StagedRowsGone(Unavailable):
    """Staged rows are not there to be published: a crash emptied them, or they were taken.

    They may have been taken by this very publication, when the answer to its commit was lost:
    the ledger knows.
    """


Reset = Callable[[Mapping[TopicPartition, Position]], Mapping[TopicPartition, Position]]
"""Where positions are put, given where they stand; asked when the old run is fenced."""


class Committer(Protocol):
    """The half of a sink that tasks and workers use. Picklable; connects lazily."""

    @property
    def one_store(self) -> bool:
        """True when records and positions can only go back together, in a failover or restore.

        A ledger that is behind what was committed then tells where to go on. Otherwise records
        are there that it does not know.
        """

    def entries(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """What has been committed; it may lag a little behind, as :meth:`commit` asks again."""

    def committed(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """All that was committed before this call, by whichever process.

        Raises:
            Unavailable: no answer, or a commit has begun and does not end.
        """

    def commit(
        self,
        chunk: Chunk,
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        max_rejects: int | None,
        kind: RangeKind = "data",
    ) -> dict[TopicPartition, Written]:
        """Write the chunk and move its positions in one transaction.

        ``entries`` is the ledger that the decision was made on: each position is moved by
        compare-and-set on its (position, epoch, run).

        Raises:
            PositionMoved: nothing was written; read the ledger and decide again.
            BudgetSpent: nothing was written; more than ``max_rejects`` records were refused.
            Unavailable: the outcome is unknown; read the ledger and decide again.
        """


class Stager(Protocol):
    """The half of a sink that tasks of a batch commit use. Picklable; connects lazily."""

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Keep a task's rows under the attempt's own name, where nobody reads them yet.

        Raises:
            Stopped: a row can't be written, and no single record answers for it.
        """


class StagingTask(Protocol):
    """One task's staging of whole ranges: either :meth:`add`, or a shuffle between the others."""

    def add(self, chunk: Chunk) -> list[Rejection]:
        """Take the rows of a chunk; the records that can't be staged."""

    def pack(self, chunk: Chunk, buckets: int) -> tuple[list[tuple[int, bytes]], list[Rejection]]:
        """The chunk's rows in packets, each with the bucket that it belongs to.

        Rows that are to be staged together have one bucket, whichever task packs them.
        """

    def add_packet(self, packet: pa.Buffer) -> int:
        """Take a packet; how many rows it holds."""

    def finish(self) -> Staged:
        """Stage what is left.

        Raises:
            Unavailable, Stopped: the staging place does not take it.
        """

    def abandon(self) -> None:
        """Remove what was staged, as far as it can be; never raises."""


class RangeStager(Protocol):
    """The half of a sink that tasks use which stage the records of ranges. Picklable."""

    def staging(self, fence: Fence, batch_id: int, attempt: int) -> StagingTask:
        """Begin, under the attempt's own name; nobody reads it yet."""


class Sink(Committer, Stager, Protocol):
    """A store that holds rows and ledger, and as a rule moves both in one transaction."""

    @property
    def timed(self) -> bool:
        """True when positions move on a timer, whatever becomes of the records."""

    def in_hand(self, ranges: Mapping[TopicPartition, OffsetRange]) -> Sink:
        """The sink for one micro-batch, which reads these ranges."""

    @property
    def needs(self) -> frozenset[str]:
        """What it reads of a record beside what the decoder does, such as ``headers``."""

    def bind(self) -> Self:
        """Look at the destination as it is now; tasks work with what was found.

        Raises:
            TableMismatch: it is missing, or doesn't take the rows.
        """

    def open(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None = None,
    ) -> Opened:
        """Take the next epoch, end older sessions, and settle a position for EVERY partition.

        Args:
            source: cluster and topic ids; compared with the ledger's.
            start: where a pipeline that never ran begins; asked once in the pipeline's life.
            earliest: the first offset of each partition, for partitions seen later.
            expected: the epoch that this very run has held. A run that opens again after a
                failed batch must not steal the ledger back from a newer run.

        Raises:
            Fenced: another run has opened since ``expected``.
            SourceMismatch: the ledger was written for another cluster or topic.
            TableMismatch: the table doesn't take the rows.
            Unavailable: no answer from the store.
        """

    def reset(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        positions: Reset,
    ) -> Opened:
        """Take the next epoch and put positions elsewhere. Raises as :meth:`open` does."""

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity, fence: Fence
    ) -> None:
        """Give partitions that were found while running their position.

        Raises:
            Fenced: a newer run has opened.
        """

    def leader_epochs(self, fence: Fence) -> Mapping[TopicPartition, int]:
        """The leader epochs of the source that were noted; a reset forgets those it moves."""

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int], fence: Fence) -> None:
        """Note leader epochs, each no older than the record before the partition's position.

        Raises:
            Fenced: a newer run has opened.
        """

    def note_rejects(self, count: RejectCount, fence: Fence) -> None:
        """Keep the count for the next run's ``open``; a reset forgets it.

        Raises:
            Fenced: a newer run has opened; nothing was noted.
            Unavailable: nobody knows; it can be noted again.
        """

    def tidy(self, fence: Fence) -> None:
        """Housekeeping between batches; may fail, and is tried again later."""

    def close(self) -> None:
        """The run has ended: end what is open, never raise."""

    def publish(
        self, what: Publication, entries: Mapping[TopicPartition, Entry], fence: Fence
    ) -> None:
        """Make staged rows, rejects and every position take effect in one transaction.

        Raises:
            PositionMoved: nothing was published; read the ledger and decide again.
            StagedRowsGone: nothing was published; the batch can be repeated.
            Unavailable: the outcome is unknown; read the ledger and decide again.
        """

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> int:
        """Remove what was staged and will not be published; how much there was.

        What older epochs left always; of our own epoch that of batches before
        ``keep_batches_from``.
        """


class RangeSink(Sink, RangeStager, Protocol):
    """A sink whose tasks stage whole ranges, without a Spark transform."""

    def agree(self, staged: Staged) -> bool:
        """Settle what a task could only guess, before anything is published.

        Args:
            staged: what it left. Tasks are asked about in the order of what they have read.

        Returns:
            False when the task has contradicted earlier ones: what it has read is staged again,
            by a sink that knows more. One task that stages alone, by a sink that knows what all
            others have found, contradicts nobody.
        """


class Halves(Sink, Protocol):
    """A sink whose two halves, records and positions, can also be written apart.

    For the semantics that are weaker than exactly once: whichever comes first, a crash between
    the two shows.
    """

    def in_hand(self, ranges: Mapping[TopicPartition, OffsetRange]) -> Self:
        """See :class:`Sink`; it has two halves as well."""

    def prepare(self) -> None:
        """Create what is missing and may be; the ledger is left alone.

        Raises:
            TableMismatch: the destination doesn't take the rows.
            Unavailable: no answer.
        """

    def write(
        self, chunk: Chunk, fence: Fence, max_rejects: int | None
    ) -> dict[TopicPartition, Written]:
        """Write the chunk's rows and rejects, and no position.

        Raises:
            TooManyRejects: nothing was written.
            Unavailable: nobody knows how much was written.
        """

    def write_staged(self, what: Publication, fence: Fence) -> None:
        """Write staged rows and rejects, and no position. Raises as :meth:`publish` does."""

    def move(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        written: Mapping[TopicPartition, Written],
        kind: RangeKind,
    ) -> None:
        """Move positions over ranges, and keep those in the history. Raises as ``commit`` does."""
