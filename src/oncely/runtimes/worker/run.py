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
from oncely.core.budget import Budget
from oncely.core.claim import NO_RECORDS, Fence, Notes, Opened, Takeover
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.errors import Fenced
from oncely.phases import phase
from oncely.runtimes.chunks import Letters
from oncely.runtimes.messages import table_of
from oncely.runtimes.opening import missing_before, settle_gaps
from oncely.runtimes.reprocess import Reprocessing
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.same_log import refuse_cut
from oncely.runtimes.worker.assignment import Work
from oncely.sinks.base import CommitsChunks, PreparesChunks
from oncely.sources.kafka import KafkaSource
from oncely.sources.start import Start


@dataclass(frozen=True)
class Taken:
    """The result of a takeover."""

    fence: Fence
    positions: Mapping[TopicPartition, Position]
    leader_epochs: Mapping[TopicPartition, int]


@dataclass
class WorkerRun(OpenRun[CommitsChunks, RowTransform]):
    """A run that takes partitions over one assignment after another.

    Attributes:
        name: the pipeline's name.
        kafka: the source, for metadata.
        letters: creates dead letters.
        start: the value of ``source.start``.
        on_gap: ``fail`` or ``record``.
        listener: called with the events of the run.
    """

    name: str = ""
    kafka: KafkaSource = field(default_factory=lambda: KafkaSource("", ()))
    letters: Letters = field(default=lambda *_: [])
    start: Start = "earliest"
    on_gap: str = "fail"
    listener: events.Listener = lambda _: None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._since: Fence | None = None

    def begin(self) -> None:
        """Compare source and destination, settle ``start``, and find the last run of all
        partitions; takes nothing over.

        Raises the errors of ``Ledger.open``.
        """
        self._since = self._opened_for(frozenset()).whole

    def look(self) -> None:
        """Raise Fenced if a run has taken all partitions since :meth:`begin`."""
        self._opened_for(frozenset())

    def take(self, partitions: frozenset[TopicPartition]) -> Taken:
        """Take partitions over, and compare their positions with the source's logs.

        Raises:
            Fenced: with ``lost``, another process was faster; without, a run has taken all
                partitions since :meth:`begin`.
            The errors of ``Ledger.open``, and those of a run on Spark for its source.
        """
        opened = self._opened_for(partitions)
        positions = {tp: at for tp, at in opened.positions.items() if tp in partitions}
        marks = self.kafka.watermarks()
        gaps = missing_before(self.kafka, positions, marks)
        here = {tp: at for tp, at in positions.items() if tp not in gaps}
        noted = opened.leader_epochs
        changed = refuse_cut(self.kafka, self.kafka.leader_epochs(), here, noted)
        if changed:
            self.ledger.note(opened.fence, Notes(leader_epochs=changed))

        def record(lost: Mapping[TopicPartition, OffsetRange]) -> None:
            self.tell(pass_over(self.delivery, lost, opened.fence, "gap"), opened.fence)

        positions |= settle_gaps(gaps, self.on_gap, self.listener, record)
        return Taken(opened.fence, positions, {**noted, **changed})

    def _opened_for(self, partitions: frozenset[TopicPartition]) -> Opened:
        earliest = self.kafka.earliest() if partitions else {}
        opened = self.open(
            Takeover(
                self.kafka.identity(),
                lambda: self.kafka.resolve_start(self.start),
                earliest,
                partitions=partitions,
                since=self._since,
            )
        )
        self.listener(
            events.PipelineOpened(
                self.name,
                opened.fence.epoch,
                opened.positions,
                opened.first_start,
                every=False,
                beyond=opened.beyond,
            )
        )
        return opened

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
        messages = {
            tp: [one for piece in pieces for one in piece.payload]
            for tp, pieces in work.pieces.items()
        }
        table = table_of(messages, self.decoder.needs | self.sink.needs)
        headers = "headers" in self.sink.needs
        again = Reprocessing(self.decoder.decode, self.transform, self.letters, headers)
        starts = {tp: range_.start for tp, range_ in work.ranges.items()}
        (chunk,) = again.chunks(starts, [table])
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

    def tell(self, outcomes: Collection[Outcome], fence: Fence) -> None:
        """Count outcomes and tell the listener."""
        self._count(sum((one.counts for one in outcomes), NO_RECORDS))
        for one in outcomes:
            done = one.counts
            self.listener(
                events.RangeCommitted(
                    one.partition, one.range, done.records, done.rows, done.rejects, done.filtered,
                    one.replayed, one.kind, fence.epoch,
                )
            )  # fmt: skip

    def keep_house(self, held: Collection[Fence], added: int) -> None:
        """Housekeeping after a commit, under a fence that is held."""
        self._fence = max(held, key=lambda one: one.epoch, default=self._fence)
        with suppress(Fenced):  # a commit finds it, and the group is asked
            super()._tidy(added)

    def _tidy(self, added: int, *_: object) -> None:
        """Called by :meth:`open`: nothing is held yet."""

    def budget(self) -> Budget:
        """The reject budget at the start."""
        return self._budget()
