"""The port of every sink: where rows and dead letters go.

A sink has a ledger. Given a claim, it makes rows, dead letters and positions take effect together
or not at all; without one it writes rows and dead letters alone, for the semantics that are
weaker than exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, Self

import pyarrow as pa

from oncely.core.batch import Batch, Chunk, Rejection, Staged
from oncely.core.claim import Claim, Counts, Fence, Opened, Takeover
from oncely.core.topics import TopicPartition
from oncely.ledgers.base import Ledger


class Sink(Protocol):
    """A destination and the ledger beside it. Picklable; connects lazily."""

    @property
    def ledger(self) -> Ledger:
        """Where positions live that take effect with the rows."""

    @property
    def needs(self) -> frozenset[str]:
        """What it reads of a record beside what the decoder does, such as ``headers``."""

    def prepare(self) -> None:
        """Create what is missing and may be; the ledger is left alone.

        Raises:
            TableMismatch: the destination doesn't take the rows.
            Unavailable: no answer.
        """

    def open(self, takeover: Takeover) -> Opened:
        """Make the destination ready and take its ledger over.

        Raises:
            TableMismatch: the destination doesn't take the rows.
            OncelyError: as :meth:`oncely.ledgers.base.Ledger.open`.
        """

    def bind(self) -> Self:
        """Look at the destination as it is now; tasks work with what was found.

        Raises:
            TableMismatch: it is missing, or doesn't take the rows.
        """

    def close(self) -> None:
        """The run has ended: end what is open, never raise."""


class CommitsChunks(Sink, Protocol):
    """A sink whose tasks commit what they have read."""

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> Mapping[TopicPartition, Counts]:
        """Write the chunk and move its positions in one transaction.

        Args:
            chunk: what was read.
            fence: the run that writes.
            claim: of the chunk's ranges; None: rows and dead letters alone.
            max_rejects: how many rejects the chunk may add.

        Raises:
            PositionMoved: nothing was written; read the ledger and decide again.
            BudgetSpent: nothing was written; more than ``max_rejects`` records were refused.
            Unavailable: the outcome is unknown; read the ledger and decide again.
        """


class StagesBatches(Sink, Protocol):
    """A sink whose tasks stage rows, and whose driver publishes them."""

    def begin_batch(self) -> None:
        """The driver begins a batch; nothing of it was staged before."""

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Keep a task's rows under the attempt's own name, where nobody reads them yet.

        Raises:
            Stopped: a row can't be written, and no single record answers for it.
            Unavailable: the staging place does not take them.
        """

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Make staged rows, dead letters and every position take effect in one transaction.

        Args:
            batch: what was staged.
            fence: the run that writes.
            claim: of all ranges of the batch; None: rows and dead letters alone.

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


class StagingTask(Protocol):
    """A task's staging of whole ranges: :meth:`add`, or a shuffle between the other two."""

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


class StagesRanges(StagesBatches, Protocol):
    """A sink whose tasks stage whole ranges, without a Spark transform."""

    def staging(self, fence: Fence, batch_id: int, attempt: int) -> StagingTask:
        """Begin a task's staging; in an executor."""

    def agree(self, staged: Staged) -> bool:
        """Settle what a task could only guess, before anything is published.

        Args:
            staged: what it left. Tasks are asked about in the order of what they have read.

        Returns:
            False when the task has contradicted earlier ones: what it has read is staged again,
            by a sink that knows more. One task that stages alone, by a sink that knows what all
            others have found, contradicts nobody.
        """
