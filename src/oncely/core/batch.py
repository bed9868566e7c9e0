"""Values that sinks write: the records of a transaction, their rows and their rejections.

A conversion is done for each record by itself if that of all fails (:func:`isolated`), and the
records of a chunk are divided by key among threads (:class:`KeyShards`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.core.claim import NO_RECORDS, RAISE_BUDGET, Counts
from oncely.core.digest import Digests, digest_sums
from oncely.core.ranges import OffsetRange, TopicPartition, halved, normalize
from oncely.errors import (
    KEPT,
    OncelyError,
    RejectSample,
    RejectSummary,
    TooManyRejects,
    Unavailable,
    check,
    masked,
)
from oncely.wording import printable

IntArray = npt.NDArray[np.integer[Any]]

Stage = Literal["decode", "transform", "write", "handle"]
"""The step that refused a record."""

DISCARDED = "discarded"
"""The stage of a dead letter whose content was removed. It still accounts for its record, and is
neither pending nor replayed."""


class _Rejection(NamedTuple):
    record: int
    stage: Stage
    reason: str


class Rejection(_Rejection):
    """A record that cannot become a row: its index among the records, and the reason, on one line
    and without control characters."""

    __slots__ = ()

    def __new__(cls, record: int, stage: Stage, reason: str) -> Self:
        """A rejection; what is not printable in its reason is escaped."""
        return super().__new__(cls, record, stage, printable(reason))


@dataclass(frozen=True)
class Reject:
    """A dead letter: the record as Kafka stores it, and the reason of its rejection.

    ``headers`` are pairs of name and bytes, in order. ``timestamp_ms`` is Kafka's timestamp, in
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
    def pending(self) -> bool:
        """True unless the content was removed."""
        return self.stage != DISCARDED

    @property
    def discarded(self) -> Reject:
        """What remains when the content is removed: origin, timestamp, and a masked reason."""
        reason = masked(self.reason)
        return replace(self, key=None, value=None, headers=(), stage=DISCARDED, reason=reason)

    def because(self, why: Rejection) -> Reject:
        """The same record with a newer reason."""
        return replace(self, stage=why.stage, reason=why.reason)

    @property
    def refused(self) -> RejectSample:
        """The record in the form that error messages show."""
        value = None if self.value is None else self.value[:KEPT]
        return RejectSample(*self.partition, self.offset, self.stage, self.reason, value)


@dataclass(frozen=True)
class Chunk:
    """The content of one transaction: offset ranges, and the rows, deletes and rejections of their
    records.

    A record is named by its index; ``partition`` and ``offset`` map it back to the topic, and every
    row, delete and rejection refers to its record, so a chunk can be reduced to some of its
    records.

    Attributes:
        ranges: claimed range of each topic-partition: from the planned start, or the end of the
            preceding chunk, to the offset after the last record READ. Never the planned end.
        partitions: the topic-partitions, sorted.
        partition: per record, an index into ``partitions`` (int32).
        offset: per record, its offset (int64).
        rows: the rows to write, columns named as in the table.
        row_record: per row, the record it came from (int64).
        deletes: key columns of tombstones (upsert), or None.
        delete_record: per delete, its record (int64).
        rejections: records that were refused before writing.
        dead_letters: fetches key, value and headers of rejected records.
        headers: per record, its headers in the form of Spark's source; None if the sink does not
            request them.
        timestamps: per record, Kafka's timestamp in the form of Spark's source; None if nothing
            requests it.
        keys: per record, its key; None if the records are not divided by key.
        given_up: waits some seconds; true as soon as nobody waits for its commit any more: the
            isolation of rows, and calls of handlers, then end. None: somebody always does.
        prepared: what a sink has computed from the chunk before its commit. A copy of the chunk,
            which may hold other records, begins without it.
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
    timestamps: pa.ChunkedArray | None = None
    keys: pa.ChunkedArray | None = None
    given_up: Callable[[float], bool] | None = None
    prepared: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of_nothing(cls, ranges: Mapping[TopicPartition, OffsetRange]) -> Chunk:
        """A chunk of ranges that hold no records: holes, or gaps that were accepted."""
        none = np.array([], dtype=np.int64)
        return cls(
            ranges, tuple(sorted(ranges)), none, none, pa.table({}), none, None, none, (),
            lambda _: [],
        )  # fmt: skip

    def until(self, given_up: Callable[[float], bool]) -> Chunk:
        """The same chunk, with what was prepared."""
        found = replace(self, given_up=given_up)
        found.prepared.update(self.prepared)
        return found

    @property
    def records(self) -> int:
        """The number of records that were read."""
        return len(self.offset)

    def counts(
        self,
        row_record: IntArray,
        rejections: Sequence[Rejection],
        digests: Digests | None = None,
    ) -> dict[TopicPartition, Counts]:
        """Counts of the records of each range by outcome; the rest was filtered.

        Args:
            row_record: the record of each row that was written.
            rejections: the records that were refused; none of them has a row that was written.
            digests: the digests of these rows.
        """
        counts = _counts(self.partition, len(self.partitions), row_record, rejections)
        if digests is not None:
            sums = digest_sums(digests.of_row, self.partition[row_record], len(counts))
            counts = [
                replace(one, digest=digest, recipe=digests.recipe)
                for one, digest in zip(counts, sums, strict=True)
            ]
        found = dict(zip(self.partitions, counts, strict=True))
        return {tp: found.get(tp, NO_RECORDS) for tp in self.ranges}

    def counts_of(
        self,
        parts: Mapping[TopicPartition, Sequence[OffsetRange]],
        row_record: IntArray,
        rejections: Sequence[Rejection],
    ) -> dict[TopicPartition, list[Counts]]:
        """Counts of the records of several ranges of each topic-partition, as :meth:`counts`.

        Args:
            parts: ascending, disjoint.
            row_record, rejections: as of :meth:`counts`.
        """
        group = np.full(self.records, -1, dtype=np.int64)
        first: dict[TopicPartition, int] = {}
        number = 0
        for tp, ranges in parts.items():
            first[tp] = number
            inside = self._part(tp, ranges)
            group = np.where(inside >= 0, inside + number, group)
            number += len(ranges)
        counts = _counts(group, number, row_record, rejections)
        return {tp: counts[first[tp] : first[tp] + len(ranges)] for tp, ranges in parts.items()}

    def _part(self, tp: TopicPartition, ranges: Sequence[OffsetRange]) -> IntArray:
        """Per record, the index of the range that contains it, or -1; the ranges are ascending."""
        if tp not in self.partitions or not ranges:
            return np.full(self.records, -1, dtype=np.int64)
        starts, ends = np.array([(one.start, one.end) for one in ranges], dtype=np.int64).T
        found = np.searchsorted(starts, self.offset, side="right") - 1
        inside = (found >= 0) & (self.offset < ends[found])
        return np.where(inside & (self.partition == self.partitions.index(tp)), found, -1)

    def letters(self, rejections: Sequence[Rejection]) -> list[Reject]:
        """One dead letter for each rejection."""
        found = self.dead_letters(rejections) if rejections else []
        check(len(found) == len(rejections), "a rejection has no dead letter")
        return found

    def refused(self, rejections: Sequence[Rejection]) -> RejectSummary:
        """Reasons and a sample of refused records; without values if Kafka does not answer."""
        return RejectSummary.of(
            [one.reason for one in rejections],
            lambda chosen: self.reject_samples([rejections[at] for at in chosen]),
        )

    def reject_samples(self, rejections: Sequence[Rejection]) -> list[RejectSample]:
        """Rejects in the form that error messages show; without values if Kafka does not answer."""
        try:
            return [one.refused for one in self.dead_letters(rejections)]
        except OncelyError:
            return [self._unread(one) for one in rejections]

    def _unread(self, why: Rejection) -> RejectSample:
        tp = self.partitions[self.partition[why.record]]
        offset = int(self.offset[why.record])
        return RejectSample(tp.topic, tp.partition, offset, why.stage, why.reason, None)

    def halves(self) -> list[Chunk]:
        """Two chunks of half of its partitions, or of the offsets of the only one; itself if it
        can't be divided."""
        every = list(self.ranges.items())
        parts = [every[: len(every) // 2], every[len(every) // 2 :]]
        if len(every) == 1:
            ((tp, whole),) = every
            parts = [[(tp, half[0])] for half in halved((whole,))]
        if len(parts) == 1:
            return [self]
        ranges = [dict(part) for part in parts]
        return [replace(self.keep({t: (r,) for t, r in one.items()}), ranges=one) for one in ranges]

    def keep(self, keep: Mapping[TopicPartition, Sequence[OffsetRange]]) -> Chunk:
        """The chunk without the records outside ``keep``; record indices do not change."""
        mask = np.zeros(len(self.offset), dtype=bool)
        for tp, ranges in keep.items():
            mask |= self._part(tp, normalize(ranges)) >= 0
        kept_rows = mask[self.row_record]
        kept_deletes = mask[self.delete_record]
        deletes = None if self.deletes is None else self.deletes.filter(pa.array(kept_deletes))
        return replace(
            self,
            partition=np.where(mask, self.partition, -1),
            rows=self.rows.filter(pa.array(kept_rows)),
            row_record=self.row_record[kept_rows],
            deletes=deletes,
            delete_record=self.delete_record[kept_deletes],
            rejections=tuple(r for r in self.rejections if mask[r.record]),
        )


def _counts(
    group: IntArray, groups: int, row_record: IntArray, rejections: Sequence[Rejection]
) -> list[Counts]:
    """Counts by group; ``group`` is that of each record, -1 of those that do not count."""
    alive = group >= 0
    rejected = np.zeros(len(group), dtype=bool)
    rejected[[one.record for one in rejections]] = True
    filtered = alive & ~rejected
    filtered[row_record] = False

    def of_each(records: npt.NDArray[Any]) -> list[int]:
        numbers = np.bincount(group[records], minlength=groups)
        return [int(number) for number in numbers]

    columns = of_each(alive), of_each(row_record), of_each(rejected), of_each(filtered)
    return list(starmap(Counts, zip(*columns, strict=True)))


class _Rows(Protocol):
    def filter(self, mask: pa.BooleanArray) -> Self:
        """The rows for which the mask is true."""


R = TypeVar("R", bound=_Rows)


@dataclass(frozen=True)
class Formed(Generic[R]):
    """What records become: by a transform, or in the form of a destination.

    Attributes:
        rows: the rows, none of a rejected record.
        row_record: per row, its record (int64).
        rejections: all rejections so far.
        digests: of the rows, as the destination has them; None if they are not computed.
    """

    rows: R
    row_record: IntArray
    rejections: Sequence[Rejection] = ()
    digests: Digests | None = None

    def without(self, rejections: Sequence[Rejection]) -> Formed[R]:
        """Without all rows of rejected records: a record is a reject or rows, never both."""
        if not rejections:
            return self
        gone = np.array([one.record for one in rejections], dtype=np.int64)
        keep, every = ~np.isin(self.row_record, gone), (*self.rejections, *rejections)
        if keep.all():  # no row is copied
            return replace(self, rejections=every)
        return Formed(
            self.rows.filter(pa.array(keep)),
            self.row_record[keep],
            every,
            self.digests and self.digests._replace(of_row=self.digests.of_row[keep]),
        )

    def counts(self, chunk: Chunk) -> dict[TopicPartition, Counts]:
        """The counts of a transaction with these rows, and their digests."""
        return chunk.counts(self.row_record, self.rejections, self.digests)


@dataclass(frozen=True)
class Staged:
    """Rows of a batch that wait for its publication.

    Attributes:
        name: the place to which a task has written them, or the topic for which they are encoded;
            None when there is none.
        rows: the number of rows.
        digest: their digest, None if it is not known; used for rows that belong to no range.
        recipe: the columns that the digests cover.
        digests: by topic-partition, the digest of the rows of its records.
    """

    name: str | None
    rows: int
    digest: int | None = None
    recipe: str = ""
    digests: Mapping[TopicPartition, int] = field(default_factory=dict)

    def of_range(self, tp: TopicPartition, done: Counts) -> Counts:
        """The counts of a topic-partition's records, with the digest of their rows."""
        if not self.recipe:
            return done
        return replace(done, digest=self.digests.get(tp, 0), recipe=self.recipe)


@dataclass(frozen=True)
class Packet:
    """A part of the rows of a Spark transform, in the form in which the driver writes them.

    Attributes:
        staged: its description.
        content: the rows.
    """

    staged: Staged
    content: pa.Table


@dataclass(frozen=True)
class Batch:
    """The content of the transaction in which the driver publishes a batch.

    Attributes:
        ranges: the ranges that were read; empty ranges are allowed (a batch without new data).
        counts: counts of each topic-partition's records. Rows after a shuffle belong to no
            partition: they are counted in the history of the first range that is not empty.
        rejects: dead letters of the batch.
        staged: the rows, without their contents.
        packets: reads the same rows with their contents, once for each attempt to publish them;
            nothing for a sink whose tasks have written the rows.
    """

    ranges: Mapping[TopicPartition, OffsetRange]
    counts: Mapping[TopicPartition, Counts]
    rejects: Sequence[Reject] = ()
    staged: Sequence[Staged] = ()
    packets: Callable[[], Iterator[Packet]] = lambda: iter(())

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(one.rows for one in self.staged)

    @property
    def history(self) -> dict[TopicPartition, Counts]:
        """The counts that the history stores for each range."""
        if sum(one.rows for one in self.counts.values()) == self.rows:
            return dict(self.counts)
        first = min((tp for tp, range_ in self.ranges.items() if not range_.is_empty), default=None)
        rows = sum((Counts(0, s.rows, 0, 0, s.digest, s.recipe) for s in self.staged), NO_RECORDS)
        return {
            tp: replace(one, rows=0, digest=0) + rows if tp == first else replace(one, digest=0)
            for tp, one in self.counts.items()
        }


class StagedRowsGone(Unavailable):
    """Rows of the batch are missing, or cannot be published any more; the batch can be repeated.

    A publication may have taken them: also this one, if the answer to its commit was lost. The
    ledger decides.
    """


class CommitBudget:
    """Counts the rejects of one commit against its budget.

    Args:
        limit: the maximum number of rejects; None: any number.
        correctable: the parts of the pipeline that the user can correct.
    """

    def __init__(self, limit: int | None, correctable: str) -> None:
        self._limit, self._mend = limit, correctable
        self._spent: list[Rejection] = []

    def spend(self, rejections: Sequence[Rejection]) -> None:
        """Count rejects.

        Raises:
            BudgetSpent: the limit is exceeded.
        """
        self._spent += rejections
        if rejections and self._limit is not None and len(self._spent) > self._limit:
            raise BudgetSpent(self._spent, self._mend)


class BudgetSpent(TooManyRejects):
    """Raised by a sink: the chunk has more rejections than the budget allows; nothing was written.

    Attributes:
        rejections: the records of the chunk that were refused so far.
    """

    def __init__(self, rejections: Sequence[Rejection], correctable: str) -> None:
        self.rejections = rejections
        super().__init__(
            f"{len(rejections):,} or more records of one commit can't be written, and fewer"
            " rejects are left",
            way_out=f"correct {correctable}; or {RAISE_BUDGET}",
        )

    def about(self, chunk: Chunk) -> TooManyRejects:
        """The error for the user, with the reasons and a sample of the chunk's records."""
        return TooManyRejects(
            self.problem, way_out=self.way_out, refused=chunk.refused(self.rejections)
        )


# -- isolation of records -------------------------------------------------------------------

T = TypeVar("T")

OF_VALUES = (ValueError, TypeError, ArithmeticError, LookupError, pa.ArrowException)
"""The errors that a conversion raises for a value; a lack of memory and our own are others."""


def isolated(
    step: Callable[[int, int], T],
    count: int,
    of_a_row: tuple[type[Exception], ...] = OF_VALUES,
    others: tuple[type[Exception], ...] = (),
) -> tuple[list[tuple[int, T]], dict[int, Exception]]:
    """Run a step on rows; on an error halve the part until the bad row is alone.

    Args:
        step: takes the first index of a part and the one after its last.
        count: the number of rows.
        of_a_row: errors that a single row may cause.
        others: those among them that no row causes; they are raised.

    Returns:
        The result of each part with its first index, ascending, and the error of each bad row.
    """
    done: list[tuple[int, T]] = []
    bad: dict[int, Exception] = {}
    parts = [(0, count)]
    while parts:
        start, stop = parts.pop()
        try:
            done.append((start, step(start, stop)))
        except of_a_row as error:
            if isinstance(error, (OncelyError, MemoryError, *others)) or stop == start:
                raise
            if stop - start == 1:
                bad[start] = error
            else:
                middle = (start + stop) // 2
                parts += [(middle, stop), (start, middle)]
    return done, bad


def unexpected(error: Exception) -> str:
    """The reason of a rejection for an error that no check has foreseen."""
    return f"{type(error).__name__}: {error}"


# -- division by key ------------------------------------------------------------------------

Parts = Mapping[TopicPartition, tuple[OffsetRange, ...]]


class KeyShards:
    """The lanes of a chunk.

    Args:
        chunk: the chunk, with the keys of its records.
        threads: the number of lanes of each topic's partitions.
        most: the number of records of a piece.
    """

    def __init__(self, chunk: Chunk, threads: Mapping[str, int], most: int) -> None:
        check(chunk.keys is not None, "records are divided by key, and their keys are not known")
        lane = np.zeros(chunk.records, dtype=np.int64)
        start = np.zeros(chunk.records, dtype=np.int64)
        for index, tp in enumerate(chunk.partitions):
            own = np.flatnonzero(chunk.partition == index)
            lane[own] = _lanes(chunk, own, threads.get(tp.topic, 1))
            # A record's range begins at the end of the record before it: holes are in it.
            start[own[:1]] = chunk.ranges[tp].start
            start[own[1:]] = chunk.offset[own[:-1]] + 1
        self._chunk, self._start = chunk, start
        self._pieces: list[deque[IntArray]] = []
        for number in range(int(lane.max(initial=-1)) + 1):
            own = np.flatnonzero(lane == number)
            self._pieces.append(deque(own[at : at + most] for at in range(0, len(own), most)))
        self._given_up = False

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def left(self) -> bool:
        """True if pieces were not handed out."""
        return any(self._pieces)

    def give_up(self) -> None:
        """Hand out nothing more: a piece has failed, or the partitions change hands."""
        self._given_up = True

    def next(self, lane: int) -> Parts | None:
        """The ranges of the next piece of a lane; None if there is none.

        The piece before it must have taken effect.
        """
        if self._given_up or not self._pieces[lane]:
            return None
        return self._parts(self._pieces[lane].popleft())

    def _parts(self, records: IntArray) -> Parts:
        """The ranges of some records, as few as possible."""
        chunk, found = self._chunk, {}
        for index, tp in enumerate(chunk.partitions):
            own = records[chunk.partition[records] == index]
            if not len(own):
                continue
            starts, ends = self._start[own], chunk.offset[own] + 1
            first = np.concatenate([[True], starts[1:] != ends[:-1]])
            last = np.concatenate([first[1:], [True]])
            pairs = zip(starts[first].tolist(), ends[last].tolist(), strict=True)
            found[tp] = tuple(OffsetRange(start, end) for start, end in pairs)
        return found


def _lanes(chunk: Chunk, records: IntArray, lanes: int) -> IntArray:
    """The lane of each of a partition's records."""
    if lanes == 1 or chunk.keys is None:
        return np.zeros(len(records), dtype=np.int64)
    found, without = np.zeros(len(records), dtype=np.int64), 0
    for at, key in enumerate(chunk.keys.take(records).to_pylist()):
        if key is None:
            found[at], without = without % lanes, without + 1
        else:
            found[at] = lane_of(key, lanes)
    return found


def lane_of(key: bytes, lanes: int) -> int:
    """The lane of a key.

    The keys of a partition have the same CRC modulo the number of partitions, if a producer with
    librdkafka's default has written them. A multiplication makes the upper bits depend on all bits.
    """
    return (crc32(key) * 0x9E3779B1 % (1 << 32) >> 16) % lanes
