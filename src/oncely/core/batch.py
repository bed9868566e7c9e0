"""What is written: the records of a transaction, what they became, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.core.budget import RAISE_BUDGET
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.errors import OncelyError, TooManyRejects, Unavailable
from oncely.refused import KEPT, Refused, RefusedRecord

IntArray = npt.NDArray[np.integer[Any]]

Stage = Literal["decode", "transform", "write"]
"""Where a record was refused."""


class Rejection(NamedTuple):
    """One record that can't become a row, by its index among the records, and why."""

    record: int
    stage: Stage
    reason: str


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
class Staged:
    """What one successful task left for a batch commit.

    Attributes:
        name: where its rows are; None when it had none.
        rows: how many.
    """

    name: str | None
    rows: int


@dataclass(frozen=True)
class Batch:
    """What the driver publishes in one transaction.

    Attributes:
        ranges: the ranges that were read; empty ones are allowed (a batch without new data).
        counts: what became of each topic-partition's records. Rows after a shuffle belong to no
            partition: they are counted in the history of the first range that is not empty.
        rejects: dead letters of the batch.
        staged: what the successful tasks left.
    """

    ranges: Mapping[TopicPartition, OffsetRange]
    counts: Mapping[TopicPartition, Counts]
    rejects: Sequence[Reject] = ()
    staged: Sequence[Staged] = ()

    @property
    def rows(self) -> int:
        """How many rows were staged."""
        return sum(one.rows for one in self.staged)

    @property
    def history(self) -> dict[TopicPartition, Counts]:
        """What the history says of each range."""
        if sum(one.rows for one in self.counts.values()) == self.rows:
            return dict(self.counts)
        first = min((tp for tp, range_ in self.ranges.items() if not range_.is_empty), default=None)
        return {
            tp: replace(one, rows=self.rows) if tp == first else one
            for tp, one in self.counts.items()
        }


class StagedRowsGone(Unavailable):
    """Staged rows are not there to be published: a crash emptied them, or they were taken.

    They may have been taken by this very publication, when the answer to its commit was lost:
    the ledger knows.
    """


class Record(Protocol):
    """A record as the broker holds it."""

    @property
    def timestamp_ms(self) -> int | None:
        """Milliseconds since 1970."""

    @property
    def key(self) -> bytes | None:
        """The key."""

    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]:
        """Names and values, in order."""


class RecordFetcher(Protocol):
    """Fetches single records by offset; those that are gone are absent from the answer."""

    def fetch(self, partition: TopicPartition, offsets: Sequence[int]) -> Mapping[int, Record]:
        """The records at ``offsets``."""


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
