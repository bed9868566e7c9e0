"""The ledger's side of a worker: takeovers of some partitions, and housekeeping between commits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from oncely.commit.path import Outcome, pass_over
from oncely.commit.run import OpenRun
from oncely.core import events
from oncely.core.batch import Chunk
from oncely.core.claim import NO_RECORDS, Budget, Fence, Notes, Opened, Takeover
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import Fenced
from oncely.kafka.records import table_of
from oncely.kafka.source import KafkaSource
from oncely.kafka.start import Start
from oncely.kinds.base import CommitsChunks, PreparesChunks
from oncely.phases import phase
from oncely.runtimes.batches.commit import Reading
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.takeover import Taken, Takeovers
from oncely.runtimes.worker.assignment import Work


@dataclass
class WorkerRun(OpenRun[CommitsChunks, RowTransform]):
    """A run that takes partitions over one assignment after another.

    Attributes:
        name: the pipeline's name.
        kafka: the source, for metadata.
        start: the value of ``source.start``.
        on_gap: ``fail`` or ``record``.
        listener: called with the events of the run.
    """

    name: str = ""
    kafka: KafkaSource = field(default_factory=lambda: KafkaSource("", ()))
    start: Start = "earliest"
    on_gap: str = "fail"
    listener: events.Listener = lambda _: None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._since: Fence | None = None
        self._held = 0  # the last epoch of partitions of this worker
        self._takeovers = Takeovers(
            self, self.kafka, self.name, self.start, self.on_gap, self.listener
        )

    def begin(self) -> None:
        """Compare source and destination, settle ``start``, and find the last run of all
        partitions; takes nothing over.

        Raises the errors of ``Ledger.open``.
        """
        self._since = self._takeovers.open({}, frozenset()).whole

    def look_for_a_whole_run(self) -> None:
        """Raise Fenced if a run has taken all partitions since :meth:`begin`."""
        self._takeovers.open({}, frozenset())

    def take(self, partitions: frozenset[TopicPartition]) -> Taken:
        """Take partitions over, and compare their positions with the source's logs.

        Raises:
            Fenced: with ``lost``, another process was faster; without, a run has taken all
                partitions since :meth:`begin`.
            The errors of :meth:`Takeovers.take`.
        """
        taken = self._takeovers.take(partitions)
        self._held = taken.fence.epoch
        return taken

    def open(self, takeover: Takeover) -> Opened:
        """Take over, unless a run has taken all partitions since :meth:`begin`."""
        try:
            return super().open(replace(takeover, since=self._since))
        except Fenced as error:
            if error.lost:
                raise
            ours = max(self._held, error.ours)
            raise Fenced(error.pipeline, ours, error.theirs) from error

    def topic_ids(self) -> dict[str, str]:
        """The ids of the topics, read from the cluster now; for any thread."""
        return self.kafka.topic_ids()

    def everywhere(self) -> dict[TopicPartition, Position]:
        """The positions of all partitions, whoever holds them."""
        found = self.ledger.positions(self.fence, settled=True)
        return {tp: entry.position for tp, entry in found.items()}

    # -- commits ---------------------------------------------------------------------------

    @phase("decode")
    def chunk(self, work: Work) -> Chunk:
        """Decode and transform records."""
        runs = [(tp, piece.payload) for tp, pieces in work.pieces.items() for piece in pieces]
        table = table_of(runs, self.needs)
        starts = {tp: range_.start for tp, range_ in work.ranges.items()}
        (chunk,) = Reading.of(self).processing().chunks(starts, [table])
        if self.by_key:
            return replace(chunk, keys=table.column("key"))
        if isinstance(self.sink, PreparesChunks):
            self.sink.prepare_chunk(chunk)
        return chunk

    @property
    def by_key(self) -> bool:
        """True if several threads commit a chunk, divided by key."""
        return bool(getattr(self.sink, "threads", None))

    def watch(self, fence: Fence | None) -> list[Outcome]:
        """Check that the topics are the same, and that the partitions of a fence are held.

        Args:
            fence: None if no partitions are owned.

        Raises:
            TopicMissing, SourceMismatch: a topic was deleted, or recreated.
            Fenced: another process has taken over.
        """
        self.same_topics(self.topic_ids())
        if fence is not None:
            fence.refuse_taken(self.ledger.positions(fence))
        return []

    @phase("plan")
    def before(self, work: Work, topic_ids: Callable[[], Mapping[str, str]]) -> None:
        """Before a commit: the topics are the same, and the ledger knows the leader epochs.

        Args:
            work: what is committed.
            topic_ids: the ids of the topics at a time when its records had been fetched.

        Raises:
            SourceMismatch: a topic was recreated.
            Fenced, Unavailable: nothing was noted.
        """
        self.same_topics(topic_ids())
        if work.leader_epochs:
            self.ledger.note(work.fence, Notes(leader_epochs=work.leader_epochs))

    def close_holes(self, fence: Fence, holes: Mapping[TopicPartition, OffsetRange]) -> Any:
        """Work that moves positions over holes."""
        return partial(pass_over, self.delivery, holes, fence, "hole")

    def keep_house(self, held: Collection[Fence], outcomes: Collection[Outcome]) -> None:
        """Count what was committed, and do the housekeeping, under a fence that is held."""
        self._count(sum((one.counts for one in outcomes), NO_RECORDS))
        self._fence = max(held, key=lambda one: one.epoch, default=self._fence)
        with suppress(Fenced):  # a commit finds it, and the group is asked
            super()._tidy(len(outcomes))

    def _tidy(self, added: int, *_: object) -> None:
        """Called by :meth:`open`: nothing is held yet."""

    def budget(self) -> Budget:
        """The reject budget at the start."""
        return self._budget()
