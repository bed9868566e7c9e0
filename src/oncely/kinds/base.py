"""The port of a kind's sink: what it must have, what it may have, and who calls it.

A sink has a ledger. Given a claim, it makes rows, dead letters and positions take effect together
or not at all; without a claim it only writes rows and dead letters, for delivery semantics weaker
than exactly once.

Every sink must have:

    Sink              the ledger, objects, connections: ``commit.run``, ``runtimes.takeover``

For rows that belong to records it must have one of these, which ``Kind.commits`` names:

    CommitsChunks     ``chunks``: tasks and workers commit: ``commit.path``, ``commit.path``
        absent        ``oncely work`` refuses ``sink.kind`` (``pipeline.guarantee.refuse_unfit``)
    StagesBatches     ``ranges``: tasks stage, the driver publishes: ``runtimes.batches.commit``
        absent        tasks commit chunks

For rows of a Spark transform it may have one of these:

    PacksRows         tasks pack, the driver writes: ``runtimes.spark.batch_commit``, ``.plugin``
    StagesBatches     as above: ``runtimes.spark.batch_commit``
        both absent   the kind's ``SinkSettings.problems`` must refuse ``transform.spark``

A pipeline for which none of these fits is an InvariantViolation (``pipeline.parts.Parts.batches``):
a defect of the kind, which no user should see.

For workers (``oncely work``) it may have, beside CommitsChunks:

    FinishesParts     threads commit by key: ``commit.path.ByKey``
        absent        one thread commits a chunk (``threads`` is an argument of ``Worker.handle``)
    PreparesChunks    a part of a commit is computed early: ``runtimes.worker.member``
        absent        the commit computes it
    SendsOffsets      its transactions contain the group's offsets: ``pipeline.working``
        absent        members mark the ledger's positions in their group

For records below the position ``kinds.destination.Destination`` may have these. What it refuses is
a ConfigError with the key, the reason and the way out; so is a discard (``discarding``):

    ReplaysDeadLetters   ``oncely rejects replay``: ``commit.change``
        absent           ``Destination.check_replay`` refuses
    RewritesRecords      ``oncely repair``, ``backfill``: ``commit.change``, ``pipeline.repair``
    RewritesTogether     the same, where rows do not contain their offset
        both absent      ``Destination.check_rewrite`` refuses
        in part          it returns the reason for each kind of damage that can't be repaired
    EndsRefusals         after a repair whose audit is clean: ``pipeline.parts.Parts.end_refusal``
        absent           no start refuses the destination (``LedgerState.refused`` is empty)

``oncely plan`` calls what refuses, and shows each operation that is not possible with the reason
(``pipeline.planning``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, runtime_checkable

import pyarrow as pa

from oncely.core.batch import Batch, Chunk, Packet, Rejection, Staged
from oncely.core.change import (
    FileGroup,
    LockedDeadLetters,
    Produce,
    Rewrite,
    RewriteKind,
    Rewritten,
)
from oncely.core.claim import Claim, Counts, Entry, Fence, Finished, Opened, Takeover
from oncely.core.ranges import OffsetRange, TopicPartition
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


# -- chunks: tasks commit -----------------------------------------------------------------------


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


# -- batches: the driver publishes --------------------------------------------------------------


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


@runtime_checkable
class PacksRows(PublishesBatches, Protocol):
    """A sink whose driver writes the rows of a batch: it reads them from Spark while it does so."""

    def pack(self, rows: pa.Table) -> Sequence[Packet]:
        """Rows of a Spark transform in the form in which :meth:`publish` writes them.

        Called in an executor; nothing is written.

        Raises:
            Stopped: a row cannot be written, and it belongs to no single record.
        """


# -- for workers --------------------------------------------------------------------------------


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
class PreparesChunks(Protocol):
    """A sink that computes a part of a commit from the chunk alone."""

    def prepare_chunk(self, chunk: Chunk) -> None:
        """Compute it now, in the thread that decodes, while another chunk is committed."""


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


# -- records below the position -----------------------------------------------------------------


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


class Rewrites(Protocol):
    """Replaces what records below the position have produced; for repairs and backfills.

    It may be used beside a run, and never moves a position.
    """

    def entries(self) -> Mapping[TopicPartition, Entry]:
        """The present entries of the ledger."""


class RewritesRecords(Rewrites, Protocol):
    """Rewrites of single records, where the destination tells which rows are theirs. A rewrite
    leaves the same state however often it is repeated."""

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
class RewritesTogether(Rewrites, Protocol):
    """Rewrites of groups of offsets, where rows do not contain their offset: what holds rows of a
    group, such as a file, is replaced as a whole."""

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
