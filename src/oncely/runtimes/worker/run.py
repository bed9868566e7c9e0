"""The ledger's side of a worker: takeovers of some partitions, and housekeeping between commits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from oncely.commit.path import Outcome, pass_over
from oncely.commit.run import OpenLedger
from oncely.core.batch import Chunk
from oncely.core.claim import NO_RECORDS, Fence, Notes
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import Fenced
from oncely.kafka.records import table_of
from oncely.kinds.base import CommitsChunks, PreparesChunks
from oncely.phases import phase
from oncely.runtimes.batches.commit import RangeReader
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.takeover import Taken, Takeovers
from oncely.runtimes.worker.assignment import PendingCommit


@dataclass
class WorkerRun:
    """A run that takes partitions over one assignment after another.

    Attributes:
        ledger: the ledger of the positions.
        takeovers: takes partitions of it over.
        transform: transforms the decoded rows.
    """

    ledger: OpenLedger[CommitsChunks]
    takeovers: Takeovers
    transform: RowTransform

    def begin(self) -> None:
        """Compare source and destination, settle ``start``, and find the last run of all
        partitions; takes nothing over.

        Raises the errors of ``Ledger.open``.
        """
        self.takeovers.since = self.takeovers.open({}, frozenset()).whole

    def look_for_a_whole_run(self) -> None:
        """Raise Fenced if a run has taken all partitions since :meth:`begin`."""
        self.takeovers.open({}, frozenset())

    def take(self, partitions: frozenset[TopicPartition]) -> Taken:
        """Take partitions over, and compare their positions with the source's logs.

        Raises:
            Fenced: with ``lost``, another process was faster; without, a run has taken all
                partitions since :meth:`begin`.
            The errors of :meth:`Takeovers.take`.
        """
        return self.takeovers.take(partitions)

    def topic_ids(self) -> dict[str, str]:
        """The ids of the topics, read from the cluster now; for any thread."""
        return self.takeovers.source.topic_ids()

    def everywhere(self) -> dict[TopicPartition, Position]:
        """The positions of all partitions, whoever holds them."""
        found = self.ledger.context.ledger.positions(self.ledger.fence, settled=True)
        return {tp: entry.position for tp, entry in found.items()}

    # -- commits ---------------------------------------------------------------------------

    @phase("decode")
    def chunk(self, work: PendingCommit) -> Chunk:
        """Decode and transform records."""
        runs = [(tp, piece.payload) for tp, pieces in work.pieces.items() for piece in pieces]
        context = self.ledger.context
        table = table_of(runs, context.needs)
        starts = {tp: range_.start for tp, range_ in work.ranges.items()}
        (chunk,) = RangeReader.of(context, self.transform).processing().chunks(starts, [table])
        if self.by_key:
            return replace(chunk, keys=table.column("key"))
        if isinstance(context.sink, PreparesChunks):
            context.sink.prepare_chunk(chunk)
        return chunk

    @property
    def by_key(self) -> bool:
        """True if several threads commit a chunk, divided by key."""
        return bool(getattr(self.ledger.context.sink, "threads", None))

    def watch(self, fence: Fence | None) -> list[Outcome]:
        """Check that the topics are the same, and that the partitions of a fence are held.

        Args:
            fence: None if no partitions are owned.

        Raises:
            TopicMissing, SourceMismatch: a topic was deleted, or recreated.
            Fenced: another process has taken over.
        """
        self.ledger.same_topics(self.topic_ids())
        if fence is not None:
            fence.refuse_taken(self.ledger.context.ledger.positions(fence))
        return []

    @phase("plan")
    def before(self, work: PendingCommit, topic_ids: Callable[[], Mapping[str, str]]) -> None:
        """Before a commit: the topics are the same, and the ledger knows the leader epochs.

        Args:
            work: what is committed.
            topic_ids: the ids of the topics at a time when its records had been fetched.

        Raises:
            SourceMismatch: a topic was recreated.
            Fenced, Unavailable: nothing was noted.
        """
        self.ledger.same_topics(topic_ids())
        if work.leader_epochs:
            self.ledger.context.ledger.note(work.fence, Notes(leader_epochs=work.leader_epochs))

    def close_holes(
        self, fence: Fence, holes: Mapping[TopicPartition, OffsetRange]
    ) -> Callable[[], list[Outcome]]:
        """Work that moves positions over holes."""
        return partial(pass_over, self.ledger.context.delivery, holes, fence, "hole")

    def keep_house(self, held: Collection[Fence], outcomes: Collection[Outcome]) -> None:
        """Count what was committed, and do the housekeeping, under a fence that is held."""
        ledger = self.ledger
        ledger.count(sum((one.counts for one in outcomes), NO_RECORDS))
        ledger.fence = max(held, key=lambda one: one.epoch, default=ledger.fence)
        with suppress(Fenced):  # a commit finds it, and the group is asked
            ledger.tidy(len(outcomes))
