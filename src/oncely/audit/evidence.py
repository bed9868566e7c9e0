"""The ports of the audit: the content of a destination, of the topics, and expected records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from oncely.audit.report import Proof, Undecided
from oncely.audit.stored.topic_ledger import Letter
from oncely.core.claim import SKIPPED, Counts
from oncely.core.expected import Expected, ExpectedRecords, Span
from oncely.core.ranges import (
    OffsetRange,
    Position,
    SourceIdentity,
    TopicPartition,
    grouped,
    normalize,
)
from oncely.stores.sql.claims import Claim

Digests = npt.NDArray[np.uint64]


class Keys(NamedTuple):
    """Keys of which the rows are looked for.

    Attributes:
        recipe: the columns of a key.
        digest: the digest of each key, ascending.
        version: the name of the version column; None if there is none.
        versions: the version of each key's record; None without a version column.
    """

    recipe: str
    digest: Digests
    version: str | None
    versions: pa.Array | None


class Holder(NamedTuple):
    """The row that has a key.

    Attributes:
        key: the digest.
        topic, partition, offset: of its record, as the row names it.
        newer: its version is higher than that which is asked for.
    """

    key: int
    topic: str | None
    partition: int | None
    offset: int | None
    newer: bool


def among(keys: Keys, digests: Digests, places: pa.Table, versions: pa.Array) -> Iterator[Holder]:
    """Those of some rows that have one of the keys.

    Args:
        keys: the keys.
        digests: the digest of each row's key.
        places: topic, partition and offset of each row.
        versions: of each row; without a version column they are not used.
    """
    at = np.searchsorted(keys.digest, digests)
    hit = np.flatnonzero(np.append(keys.digest, np.uint64(0))[at] == digests)
    hit = hit[at[hit] < len(keys.digest)]
    newer: list[bool | None] = [False] * len(hit)
    if keys.versions is not None:
        asked = keys.versions.take(pa.array(at[hit]))
        newer = pc.greater(versions.take(pa.array(hit)).cast(asked.type), asked).to_pylist()
    topic, number, offset = places.take(pa.array(hit)).to_pydict().values()
    found = zip(digests[hit].tolist(), topic, number, offset, newer, strict=True)
    yield from (Holder(key, t, p, at, bool(above)) for key, t, p, at, above in found)


__all__ = ["Expected", "ExpectedRecords", "Span"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Committed:
    """A range that the pipeline says it has committed, from the ledger's history or a manifest.

    Attributes:
        span: its offsets.
        kind: of a history entry: data, hole, gap, joined, skipped; or of an amendment, whose counts
            and digest are added to those of the entries: replay, repair, backfill.
        counts: the counts of its records, with the digest of its rows and the digest's recipe if
            they were stored.
        epoch: the epoch of the run that has committed it; None if it is not stored.
        at: the time of the commit; None if it is not stored.
        amended: the counts contain what replays have changed.
    """

    span: Span
    kind: str
    counts: Counts
    epoch: int | None = None
    at: datetime | None = None
    amended: bool = False


def skipped(committed: Iterable[Committed]) -> dict[TopicPartition, list[OffsetRange]]:
    """The offsets that a start, or a reset, has put positions behind."""
    return grouped(one.span for one in committed if one.kind == SKIPPED)


def passed_over(
    skipped: Mapping[TopicPartition, Sequence[OffsetRange]],
    compared: Mapping[TopicPartition, OffsetRange],
) -> list[str]:
    """Skipped offsets among those that are compared, as limits of a report."""
    return [
        f"{tp}: {one} was passed over by a reset: its records are not expected, and are not"
        " compared"
        for tp, own in sorted(skipped.items())
        for one in own
        if tp in compared and one.overlaps(compared[tp])
    ]


class Cell(NamedTuple):
    """The unit of comparison: offsets of one committed range, and the recipe of its digest.

    A large range has several cells, so that what is read of a range that differs is bounded.
    """

    span: Span
    recipe: str


@dataclass(frozen=True)
class Tally:
    """The content of the destination for one cell, recomputed there.

    Attributes:
        rows: the number of rows.
        rejects: the number of dead letters.
        offsets: the sum modulo 2^64 of :func:`oncely.audit.tally.offset_digests` over the offsets
            of all rows and dead letters. With the two counts it shows whether each offset of a set
            has exactly one row or dead letter.
        digest: the sum of the rows' digests; None if it can't be computed.
    """

    rows: int = 0
    rejects: int = 0
    offsets: int = 0
    digest: int | None = None


PRESENT = pa.schema(
    [("topic", pa.string()), ("partition", pa.int64()), ("offset", pa.int64()),
     ("rows", pa.int64()), ("digest", pa.uint64())]
)  # fmt: skip
"""Rows by record: number and digest sum of the rows of each offset; ``digest`` may be null. An
offset may have several lines. The first three columns are null for rows without an offset."""


class Stated(Protocol):
    """What a ledger states; see :class:`Snapshot`."""

    @property
    def source(self) -> SourceIdentity: ...
    @property
    def positions(self) -> Mapping[TopicPartition, Position]: ...
    @property
    def committed(self) -> Sequence[Committed]: ...
    @property
    def kept(self) -> Callable[[], Iterable[Letter]]: ...


class Snapshot(Stated, Protocol):
    """One consistent snapshot of a destination, read without the pipeline's own code.

    Attributes:
        source: cluster and topic ids, as stored in the destination.
        positions: the committed position of each partition.
        started: the first offset of each partition that the pipeline was to read.
        committed: the history in force, ascending by partition and range; amendments last.
        kept: returns the content of the dead letters, by partition and offset; also of discarded
            ones.
        proof: what the destination allows to prove.
        limits: reasons why the proof is weaker than by offset and value, for ``oncely plan`` and
            the report; empty if it is not.
        claims: what other pipelines have committed into the same destination.
        untold: offsets before ``started`` that may have been committed, and of which nothing is
            known any more.
    """

    @property
    def started(self) -> Mapping[TopicPartition, Position]: ...
    @property
    def proof(self) -> Proof: ...
    @property
    def limits(self) -> Sequence[str]: ...
    @property
    def claims(self) -> Claims: ...
    @property
    def untold(self) -> Sequence[Undecided]: ...

    def close(self) -> None:
        """End the snapshot."""


class OfLedger:
    """The part of :class:`Snapshot` that the ledger of a snapshot states."""

    snapshot: Stated
    claims: Claims = ()
    untold: Sequence[Undecided] = ()

    @property
    def source(self) -> SourceIdentity:
        """Cluster and topics that were read."""
        return self.snapshot.source

    @property
    def positions(self) -> Mapping[TopicPartition, Position]:
        """The position of each partition."""
        return self.snapshot.positions

    @property
    def committed(self) -> Sequence[Committed]:
        """The history that the ledger still contains."""
        return self.snapshot.committed

    def kept(self) -> Iterable[Letter]:
        """The content of the dead letters."""
        return self.snapshot.kept()

    def whole(
        self, started: Mapping[TopicPartition, Position]
    ) -> dict[TopicPartition, OffsetRange]:
        """By partition the offsets from the start to the position, ascending."""
        return {tp: OffsetRange(started[tp], at) for tp, at in sorted(self.positions.items())}

    def read(self, started: Mapping[TopicPartition, Position]) -> tuple[Span, ...]:
        """The same without the offsets that a reset has passed over."""
        passed, whole = skipped(self.committed), self.whole(started)
        return tuple(
            Span(tp, r) for tp, one in whole.items() for r in one.minus(passed.get(tp, ()))
        )

    def close(self) -> None:
        """Nothing is open."""


class Evidence(Snapshot, Protocol):
    """A destination whose rows contain their offsets."""

    def tallies(self, cells: Sequence[Cell]) -> Sequence[Tally]:
        """One tally for each cell, in O(cells) of memory.

        Raises:
            Unavailable: no answer.
        """

    def unable(self, recipe: str) -> str:
        """The reason why the destination's digests of a recipe can't be computed; empty if they
        can."""

    def outside(self, whole: Mapping[TopicPartition, OffsetRange]) -> Iterable[pa.RecordBatch]:
        """Rows and dead letters of other offsets than these, or of other partitions, in the form of
        :data:`PRESENT`: there must be none. ``whole`` is from the start to the position."""

    def rows(self, cells: Sequence[Cell]) -> Iterable[pa.RecordBatch]:
        """Rows by record in the form of :data:`PRESENT`, of these cells only."""

    def rejects(self, spans: Sequence[Span]) -> Iterable[tuple[TopicPartition, int]]:
        """The dead letters of these spans."""


class KeyedEvidence(Evidence, Protocol):
    """A destination in which rows are replaced by their keys."""

    def holders(self, keys: Keys) -> Iterable[Holder]:
        """The rows that have one of some keys. The digests of the keys can be computed.

        Raises:
            Unavailable: no answer.
        """


class Bounds(NamedTuple):
    """The bounds of a partition's log: its first offset and its last stable offset."""

    first: Position
    end: Position


class Readable(NamedTuple):
    """The offsets of a span that a reader of committed records gets.

    Attributes:
        span: the offsets that were read.
        runs: consecutive offsets, as an array of (first, end) in ascending order.
        first: the first offset of the log *after* it was read. Offsets below it may have been
            deleted before they were read.
    """

    span: Span
    runs: IntArray
    first: Position

    @property
    def records(self) -> int:
        """The number of readable records."""
        return int((self.runs[:, 1] - self.runs[:, 0]).sum())


class Log(Protocol):
    """The source topics as they are now."""

    def identity(self) -> SourceIdentity:
        """Cluster and topic ids.

        Raises:
            TopicMissing: a topic is missing.
            Unavailable: no answer.
        """

    def bounds(self) -> Mapping[TopicPartition, Bounds]:
        """The bounds of every partition. Raises the errors of :meth:`identity`."""

    def compacted(self) -> frozenset[str]:
        """The topics that are compacted: there a record may vanish after its commit."""

    def readable(self, spans: Sequence[Span]) -> Iterator[Readable]:
        """The readable offsets of each span, in the same order. The spans are disjoint and
        ascending.

        Raises:
            Unavailable: no answer.
        """

    def messages(self, tp: TopicPartition, offsets: Sequence[int]) -> Mapping[int, Any]:
        """The readable records at these offsets, as messages of confluent-kafka.

        Raises:
            Unavailable: no answer.
        """

    def offsets_at(self, at: datetime) -> Mapping[TopicPartition, Position]:
        """The first record at or after a time in every partition; the end if there is none."""

    def times(
        self, around: Mapping[TopicPartition, Position]
    ) -> Mapping[TopicPartition, tuple[datetime | None, datetime | None]]:
        """The timestamps of the last record before an offset and of the first record at or after
        it; None if there is none."""

    def close(self) -> None:
        """Close the connections."""


def moment(milliseconds: int) -> datetime:
    """A time in milliseconds since 1970."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def no_runs() -> IntArray:
    """No offsets."""
    return np.zeros((0, 2), dtype=np.int64)


def runs_of(offsets: Any) -> IntArray:
    """Ascending offsets as runs of consecutive ones."""
    given = np.asarray(offsets, dtype=np.int64)
    if not len(given):
        return no_runs()
    breaks = np.flatnonzero(np.diff(given) != 1)
    firsts = given[np.concatenate([[0], breaks + 1])]
    ends = given[np.concatenate([breaks, [len(given) - 1]])] + 1
    return np.stack([firsts, ends], axis=1)


def joined(batches: Sequence[ExpectedRecords]) -> ExpectedRecords:
    """The records of all batches, with digests if all of them have any."""
    none = np.zeros(0, dtype=np.int64)
    digests = [one.digest for one in batches if one.digest is not None]
    return ExpectedRecords(
        np.concatenate([none, *(one.offset for one in batches)]),
        np.concatenate([none.astype(np.int8), *(one.outcome for one in batches)]),
        np.concatenate([none, *(one.rows for one in batches)]),
        np.concatenate([none.astype(np.uint64), *digests])
        if len(digests) == len(batches)
        else None,
    )


def within(offsets: Any, range_: OffsetRange) -> slice:
    """The indices of those of ascending offsets that are in a range."""
    start, end = np.searchsorted(offsets, (range_.start, range_.end))
    return slice(int(start), int(end))


def clipped(runs: IntArray, range_: OffsetRange) -> IntArray:
    """The part of runs inside a range."""
    inside = runs[(runs[:, 1] > range_.start) & (runs[:, 0] < range_.end)]
    return np.clip(inside, range_.start, range_.end)


Claims = Sequence[Claim]
"""Offsets for which the ledgers of other pipelines account, in the same destination."""


def claimed(claims: Claims, tp: TopicPartition, offsets: IntArray) -> npt.NDArray[np.bool_]:
    """True for each offset that another pipeline has committed."""
    found = np.zeros(len(offsets), np.bool_)
    for one in normalize(range_ for _, of, range_ in claims if of == tp):
        found |= (offsets >= one.start) & (offsets < one.end)
    return found


def claimants(claims: Claims, tp: TopicPartition, within: OffsetRange) -> str:
    """The pipelines that have committed offsets of a range, as text; empty: none."""
    names = {name for name, of, one in claims if of == tp and one.overlaps(within)}
    return ", ".join(map(repr, sorted(names)))


def told(claims: Claims) -> list[str]:
    """The other pipelines, for the limits of a report."""
    return [
        f"pipeline {name!r} writes into the same table: rows of offsets that only its ledger"
        " contains are its rows, and are not compared"
        for name in sorted({name for name, *_ in claims})
    ]
