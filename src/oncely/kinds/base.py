"""The port of every sink: the destination of rows and dead letters.

A sink has a ledger. Given a claim, it makes rows, dead letters and positions take effect together
or not at all; without a claim it only writes rows and dead letters, for delivery semantics weaker
than exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.core import digest
from oncely.core.batch import (
    Batch,
    Chunk,
    FileGroup,
    Formed,
    IntArray,
    Packet,
    Produce,
    Reject,
    Rejection,
    Rewrite,
    RewriteKind,
    Rewritten,
    Staged,
)
from oncely.core.claim import Claim, Counts, Fence, Finished, Opened, Takeover
from oncely.core.digest import Digests, Recipe, UInt64
from oncely.core.ledger import Entry
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Stopped
from oncely.native import native
from oncely.stores.document import Ledger


class Sink(Protocol):
    """A destination and the ledger beside it. Picklable; connects lazily."""

    @property
    def ledger(self) -> Ledger:
        """The ledger of the positions that take effect with the rows."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns of a record that the sink reads in addition to the decoder's, such as
        ``headers``."""

    def prepare(self) -> None:
        """Create missing objects, if permitted, except the ledger.

        Raises:
            TableMismatch: the destination does not accept the rows.
            Unavailable: no answer.
        """

    def open(self, takeover: Takeover) -> Opened:
        """Prepare the destination and take over its ledger.

        Raises:
            TableMismatch: the destination does not accept the rows.
            OncelyError: see :meth:`oncely.stores.document.Ledger.open`.
        """

    def bind(self) -> Self:
        """Inspect the present destination; the result contains its description for the tasks.

        Raises:
            TableMismatch: it is missing, or does not accept the rows.
        """

    def close(self) -> None:
        """The run has ended: close connections; never raises."""


@runtime_checkable
class CommitsChunks(Sink, Protocol):
    """A sink whose tasks commit the records that they have read."""

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> Mapping[TopicPartition, Counts]:
        """Write the chunk and move its positions in one transaction.

        Args:
            chunk: the rows and ranges that were read.
            fence: the run that writes.
            claim: the claim of the chunk's ranges; None: only rows and dead letters.
            max_rejects: the number of rejects that the chunk may add.

        Raises:
            PositionMoved: nothing was written; read the ledger and decide again.
            BudgetSpent: nothing was written; more than ``max_rejects`` records were refused.
            Unavailable: the outcome is unknown; read the ledger and decide again.
        """


class FinishesParts(CommitsChunks, Protocol):
    """A sink that several threads use, each for records of other keys of one chunk."""

    @property
    def threads(self) -> Mapping[str, int]:
        """The number of threads of each topic's partitions, if there are several."""

    def finish(
        self, chunk: Chunk, fence: Fence, claim: Claim, max_rejects: int | None
    ) -> Mapping[TopicPartition, Sequence[Finished]]:
        """Commit parts of a chunk's ranges, which may begin beyond the positions.

        Args: as of :meth:`CommitsChunks.commit`; the claim names the parts.

        Returns:
            What the ledger contains of each range that is finished now.

        Raises the errors of :meth:`CommitsChunks.commit`.
        """


@runtime_checkable
class SendsOffsets(CommitsChunks, Protocol):
    """A sink whose transactions contain the offsets of the workers' consumer group.

    Positions are in that group, and need no other mark in it.
    """

    @property
    def hidden_seconds(self) -> float:
        """Seconds for which the transaction of a member that has died may hide the ledger's end."""

    def for_worker(self) -> Self:
        """The sink for commits that follow each other closely."""

    def joined(self, metadata: Callable[[], Any]) -> None:
        """Name the member that sends offsets.

        Args:
            metadata: returns the group metadata of the member's consumer (KIP-447).
        """


@runtime_checkable
class PreparesChunks(Protocol):
    """A sink that computes a part of a commit from the chunk alone."""

    def prepare_chunk(self, chunk: Chunk) -> None:
        """Compute it now, in the thread that decodes, while another chunk is committed."""


class PublishesBatches(Sink, Protocol):
    """A sink to which the driver publishes a batch as a whole."""

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Make rows, dead letters and every position take effect in one transaction.

        Args:
            batch: the batch.
            fence: the run that writes.
            claim: the claim of all ranges of the batch; None: only rows and dead letters.

        Raises:
            PositionMoved: nothing was published; read the ledger and decide again.
            StagedRowsGone: nothing was published; the batch can be repeated.
            Unavailable: the outcome is unknown; read the ledger and decide again.
        """


@runtime_checkable
class PacksRows(PublishesBatches, Protocol):
    """A sink whose driver writes the rows of a batch: it reads them from Spark while it does so."""

    def pack(self, rows: pa.Table) -> Sequence[Packet]:
        """Rows of a Spark transform in the form in which :meth:`publish` writes them.

        Called in an executor; nothing is written.

        Raises:
            Stopped: a row cannot be written, and it belongs to no single record.
        """


@runtime_checkable
class StagesBatches(PublishesBatches, Protocol):
    """A sink whose tasks stage rows, and whose driver publishes them."""

    def begin_batch(self) -> None:
        """The driver begins a batch, of which nothing is staged yet."""

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Store a task's rows under the attempt's own name, where they are not visible yet.

        Raises:
            Stopped: a row cannot be written, and it belongs to no single record.
            Unavailable: the staging store does not accept them.
        """

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> None:
        """Remove staged output that will not be published.

        Output of older epochs is always removed; of our own epoch, that of batches before
        ``keep_batches_from``.
        """

    def staging(self, fence: Fence, batch_id: int, attempt: int) -> StagingTask:
        """Begin a task's staging of whole ranges, without a Spark transform; in an executor."""

    def agree(self, staged: Staged) -> bool:
        """Merge a task's assumptions about the schema, before anything is published.

        Args:
            staged: the task's output. The method is called for tasks in the order of their ranges.

        Returns:
            False if the task contradicts earlier ones: its ranges are staged again, by a sink with
                the merged schema. A single task that stages alone, with the merged schema of all
                others, contradicts no other task.
        """


class StagingTask(Protocol):
    """A task's staging: :meth:`add` of whole ranges, or :meth:`pack`, a shuffle, and
    :meth:`add_packet`; :meth:`add_rows` after a Spark transform.
    """

    def add(self, chunk: Chunk) -> list[Rejection]:
        """Stage the rows of a chunk, and return the records that cannot be staged."""

    def pack(self, chunk: Chunk, buckets: int) -> tuple[list[tuple[int, bytes]], list[Rejection]]:
        """The chunk's rows in packets, each with its bucket.

        Rows that must be staged together have the same bucket in all tasks.
        """

    def add_packet(self, packet: pa.Buffer) -> int:
        """Stage a packet, and return its number of rows."""

    def add_rows(self, rows: pa.Table) -> None:
        """Stage rows that belong to no single record.

        Raises:
            Stopped: a row cannot be written.
        """

    def finish(self) -> Staged:
        """Stage the remaining rows.

        Raises:
            Unavailable, Stopped: the staging store does not accept them.
        """

    def abandon(self) -> None:
        """Remove the staged output, as far as possible; never raises."""


@dataclass(frozen=True)
class Reprocessed:
    """The result of decoding and transforming dead letters again.

    Attributes:
        chunk: records in the order of the dead letters; rows of the valid ones.
        records: the dead letters, with the content that was processed.
        traceable: False if rows belong to no single record (after a Spark transform).
    """

    chunk: Chunk
    records: Sequence[Reject]
    traceable: bool = True

    def again(self, why: Rejection) -> Reject:
        """The dead letter of a record that still fails."""
        return self.records[why.record].because(why)

    def own(self, row_record: IntArray, failed: Collection[int]) -> IntArray:
        """The record of each written row; rows of no single record are counted as those of the
        first one that has not failed."""
        if self.traceable or not len(row_record):
            return row_record
        first = min(set(range(self.chunk.records)).difference(failed))
        return np.full(len(row_record), first)


Judge = Callable[[Sequence[Reject]], Reprocessed]
"""Decodes and transforms rejects again. They are sorted by topic, partition and offset."""


class ReplayResult(NamedTuple):
    """The counts of a replay.

    Attributes:
        moved: rejects that were written, or filtered.
        kept: rejects that still fail.
    """

    moved: int = 0
    kept: int = 0


@dataclass(frozen=True)
class LockedDeadLetters:
    """Dead letters for one transaction of a replay.

    Attributes:
        rejects: the dead letters to decode again; truncated ones are not included.
        commit: writes the valid records, and keeps the others with their newer reasons; None if
            there is no dead letter to decode.
    """

    rejects: Sequence[Reject]
    commit: Callable[[Reprocessed | None], ReplayResult]


class ReplaysDeadLetters(Protocol):
    """A replay of a sink's dead letters, each processed once."""

    def portion(self, limit: int) -> AbstractContextManager[LockedDeadLetters | None]:
        """The next ``limit`` dead letters; None: none are left.

        They are taken by compare-and-set: the result takes effect only if no other replay has taken
        any of them, and no reset has voided one.

        Raises, also at the end of the context:
            PositionMoved: nothing was written; repeat.
            WrongInput: valid records must not be written there.
            Stopped: a row of a Spark transform cannot be written; nothing was changed.
            Unavailable: the outcome is unknown; repeat.
        """


DELETED = "_oncely_deleted"
"""The column of an upsert's rows that is true, or 1, for a tombstone."""


def as_made(chunk: Chunk) -> Formed[pa.Table]:
    """The rows that decode and transform have made."""
    return Formed(chunk.rows, chunk.row_record, chunk.rejections)


def as_sent(rows: pa.Table, recipe: Recipe) -> tuple[pa.Table, list[int]]:
    """The rows as they are: the destination changes no value."""
    del recipe
    return rows, []


@dataclass(frozen=True)
class Form:
    """What records become in a destination, for audits, repairs and ``plan``: nothing is written.
    By default the rows that decode and transform have made, without a digest.

    Attributes:
        of: the rows of a chunk as a commit sends them. Those of an upsert are in the order of their
            records, tombstones among them, with the column :data:`DELETED`.
        sampled: a sample with the columns that the destination infers from its rows.
        stored: the rows as the destination returns them, by the columns of a recipe; and the
            numbers of those with a value that it does not accept, which stays as it is sent.
        recipe: of single rows; None: they have no digest.
        others: the recipe of the columns that the digests of ranges do not cover, if there are any.
        keys: the columns of the key by which later rows replace earlier ones; none if none do.
        version: the column of which the highest value is kept, of rows with the same key.
        lacks_are_null: a column of an earlier recipe that rows lack is null in the destination.
    """

    of: Callable[[Chunk], Formed[pa.Table]] = as_made
    sampled: Callable[[Chunk], Chunk] = lambda chunk: chunk
    stored: Callable[[pa.Table, Recipe], tuple[pa.Table, list[int]]] = as_sent
    recipe: Recipe | None = None
    others: Recipe | None = None
    keys: tuple[str, ...] = ()
    version: str | None = None
    lacks_are_null: bool = True


Which = Callable[[Reject], bool]
Discard = Callable[[Which, bool, Callable[[], None]], Mapping[str, int]]
"""See :meth:`oncely.kinds.destination.Destination.discarding`."""


class RewritesRecords(Protocol):
    """Replaces what records below the position have produced; for repairs and backfills.

    It may be used beside a run, and never moves a position. A rewrite leaves the same state however
    often it is repeated.
    """

    def check(self) -> None:
        """Refuse a destination in which a rewrite would do something else.

        Raises:
            WrongInput: the reason, and the way out.
        """

    def lacks(self, kind: str) -> str:
        """The reason why damage of a kind can't be repaired here; empty if it can.

        Args:
            kind: lost, duplicated, altered or unexpected; or backfill, for that.
        """

    def entries(self) -> Mapping[TopicPartition, Entry]:
        """The present entries of the ledger."""

    def committed(self, partition: TopicPartition, within: OffsetRange) -> Sequence[OffsetRange]:
        """The committed ranges that overlap a range, by the present history."""

    def present(self, partition: TopicPartition, offsets: Sequence[OffsetRange]) -> tuple[int, int]:
        """The number of rows and of dead letters of some offsets."""

    def rewrite(self, work: Rewrite) -> Rewritten:
        """Replace what the offsets have produced, in one transaction with the history's amendment.

        Raises:
            PositionMoved: nothing was written; read the ledger and decide again.
            Unavailable: the outcome is unknown; repeat.
        """

    def remove_beyond(
        self, partition: TopicPartition, offsets: Sequence[OffsetRange], expected: Entry
    ) -> Rewritten:
        """Remove rows and dead letters of records at or beyond the position.

        Raises:
            PositionMoved: nothing was removed; read the ledger and decide again.
            Unavailable: the outcome is unknown; repeat.
        """


@runtime_checkable
class EndsRefusals(Protocol):
    """Rewrites of a destination that a start may refuse, because it has lost what was committed."""

    def end_refusal(self, refused: str) -> None:
        """Accept the destination, if it is still refused for this reason, which was read before an
        audit that has found nothing lacking.

        Raises:
            Unavailable: the outcome is unknown; repeat.
        """


@runtime_checkable
class RewritesTogether(Protocol):
    """Replaces what groups of offsets have produced, where rows do not contain their offset: what
    holds rows of a group, such as a file, is replaced as a whole.

    It may be used beside a run, and never moves a position.
    """

    def check(self) -> None:
        """As :meth:`RewritesRecords.check`."""

    def entries(self) -> Mapping[TopicPartition, Entry]:
        """The present entries of the ledger."""

    def groups(self, wanted: Mapping[TopicPartition, Sequence[OffsetRange]]) -> Sequence[FileGroup]:
        """The groups of these offsets, with all offsets whose rows are inseparable from theirs.
        Offsets that were never committed are left out."""

    def rewrite_together(
        self,
        kind: RewriteKind,
        group: FileGroup,
        entries: Mapping[TopicPartition, Entry],
        produce: Produce,
    ) -> Rewritten:
        """Replace what the offsets of a group have produced, in one transaction.

        Args:
            kind: the kind of the amendment.
            group: the offsets.
            entries: the ledger's entries on which that was decided.
            produce: what the records produce at present.

        Raises:
            PositionMoved: nothing was written; read the ledger and decide again.
            Unavailable: the outcome is unknown; repeat.
        """

    def present(self, names: Sequence[str]) -> int:
        """The number of rows that the destination has by these names."""

    def foreign(self, names: Sequence[str]) -> Mapping[str, str]:
        """The pipelines of the names that are another one's."""

    def remove_unexpected(self, names: Sequence[str]) -> Rewritten:
        """Remove names whose rows are still beyond the position. Raises the errors of
        :meth:`rewrite_together`."""


def stage_rows(task: StagingTask, rows: Iterable[pa.Table]) -> Staged:
    """Stage the rows of a Spark transform; a failed task leaves no output."""
    try:
        for table in rows:
            task.add_rows(table)
        return task.finish()
    except BaseException:
        task.abandon()
        raise


def stage_judged(task: StagingTask, judged: Reprocessed) -> tuple[Staged, list[Rejection]]:
    """Stage the rows of dead letters; returns the staged output and the refused records."""
    refused = list(judged.chunk.rejections)
    if judged.traceable:
        refused += task.add(judged.chunk)
    else:
        task.add_rows(judged.chunk.rows)
    return task.finish(), sorted(refused)


def row_refused(reason: str, way_out: str) -> Stopped:
    """The error for a row of a Spark transform that the destination refuses."""
    return Stopped(f"a row of the Spark transform can't be written: {reason}", way_out=way_out)


LETTERS_STAY = "correct the transform; all of these rejects were left as they are"
NO_SINGLE_RECORD = (
    "correct or filter it in the transform; after a Spark transform a row belongs to no single"
    " record, so it can't be kept as a reject"
)


def row_digests(
    rows: pa.Table, offsets: npt.NDArray[np.integer[Any]] | None, recipe: Recipe
) -> UInt64:
    """As :func:`oncely.core.digest.row_digests`."""
    module = native()
    if module is None:
        return digest.row_digests(rows, offsets, recipe)
    contents = pa.array(_contents(module, rows, recipe))
    at = pa.array(digest.offsets_of(offsets, recipe)) if recipe.offset else None
    return np.frombuffer(module.row_digests(contents, at), np.uint64)


def digests_of(chunk: Chunk, rows: pa.Table, row_record: IntArray, recipe: Recipe) -> Digests:
    """The digests of a chunk's rows; ``row_record`` is the record of each."""
    offsets = chunk.offset[row_record] if recipe.offset else None
    return Digests(row_digests(rows, offsets, recipe), str(recipe))


def _contents(module: Any, rows: pa.Table, recipe: Recipe) -> UInt64:
    if not recipe.columns or not rows.num_rows:
        return digest.row_contents(rows, recipe)
    kinds = [kind.name for _, kind in recipe.columns]
    constants = [digest.column_constant(name) for name, _ in recipe.columns]
    found: list[bytes] = []
    left: list[int] = []
    for batch in digest.covered_columns(rows, recipe).combine_chunks().to_batches():
        data, left = module.row_contents(batch, kinds, constants)
        found.append(data)
    contents = np.frombuffer(b"".join(found) if len(found) > 1 else found[0], np.uint64)
    if left:
        others = tuple(recipe.columns[at] for at in left)
        contents = contents ^ digest.row_contents(rows, Recipe(others, recipe.offset))
    return contents
