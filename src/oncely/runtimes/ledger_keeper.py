"""What both ways of committing share: the ledger, what is read, and the reject budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, TypeVar

from oncely.core.ledger import Entry
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.decode.base import Decoder
from oncely.errors import Fenced, InvariantViolation, OncelyError, SourceMismatch, Unavailable
from oncely.runtimes.backoff import Backoff
from oncely.runtimes.commit import commit, require_current
from oncely.runtimes.letters import Rereader
from oncely.runtimes.task import Budget
from oncely.sinks.base import Chunk, Fence, Opened, RejectCount, Sink

log = logging.getLogger(__name__)

_TIDY_AFTER = 10_000  # rows that were added to the history

AnyTransform = TypeVar("AnyTransform")


class Housekeeping:
    """What is done between batches; it can wait, and must not fail what is committed.

    The history is tidied at the beginning, because a run may have a few batches only, and by the
    number of rows that batches add to it.
    """

    def __init__(self) -> None:
        self._added = _TIDY_AFTER

    def do(self, tidy: Callable[[], object], added: int, *more: Callable[[], object]) -> None:
        """Do ``more``, and ``tidy`` when enough rows were added since the last time."""
        works = list(more)
        self._added += added
        if self._added >= _TIDY_AFTER:
            self._added = 0
            works.append(tidy)
        for work in works:
            try:
                work()
            except Unavailable as error:
                log.warning("housekeeping is put off: %s", error.message)


@dataclass
class LedgerKeeper(Generic[AnyTransform]):
    """The driver's side of a run, whichever way it commits.

    Attributes:
        sink: where the records go; bound to its destination by :meth:`open`.
        source: rereads rejected records, for their dead letters.
        decoder: of the records.
        transform: of the decoded rows.
        topics: what is read.
        max_rejects_share: the greatest share of rejects among the records, or None.
        max_rejects_count: the greatest number of rejects, or None.
    """

    sink: Sink
    source: Rereader
    decoder: Decoder
    transform: AnyTransform
    topics: tuple[str, ...]
    max_rejects_share: Fraction | None = None
    max_rejects_count: int | None = None

    def __post_init__(self) -> None:
        self._fence: Fence | None = None
        self._source: SourceIdentity | None = None
        self._opened: tuple[TopicPartition, ...] = ()
        self._housekeeping = Housekeeping()
        self._counted = self._noted = RejectCount()

    @property
    def fence(self) -> Fence:
        """The epoch of this run, once opened."""
        if self._fence is None:
            raise InvariantViolation("the ledger was not opened")
        return self._fence

    @property
    def columns(self) -> list[str]:
        """Partition, offset, value, and what else decoder and sink read."""
        needs = self.decoder.needs | self.sink.needs
        topic = ["topic"] if len(self.topics) > 1 or "topic" in needs else []
        more = sorted(needs - {"topic", "partition", "offset", "value"})
        return [*topic, "partition", "offset", "value", *more]

    @property
    def _only_topic(self) -> str | None:
        """The topic of all records, where it is not read with each of them."""
        return None if "topic" in self.columns else self.topics[0]

    def open(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None,
    ) -> Opened:
        """Take the ledger and bind the sink to its destination as it is now."""
        opened = self.sink.open(source, start, earliest, expected)
        self.sink = self.sink.bind()
        if self._fence is None:  # a run that opens again goes on counting
            setting = self._budget().setting
            self._noted = opened.counted
            same = opened.counted.setting == setting
            self._counted = opened.counted if same else RejectCount(setting)
        self._fence, self._source = opened.fence, source
        self._opened = tuple(opened.positions)
        self._tidy(0)
        return opened

    def same_source(self, source: SourceIdentity) -> None:
        """Refuse a cluster or topic other than at ``open``.

        Raises:
            SourceMismatch: the topic was made anew under the running query.
        """
        if self._source is None or source == self._source:
            return
        raise SourceMismatch(
            "the topic or its cluster changed while the pipeline ran:"
            f" {dict(self._source.topic_ids)} at start, {dict(source.topic_ids)} now",
            way_out="give the pipeline a new name if the topic was made again on purpose",
        )

    def positions(self) -> dict[TopicPartition, Position]:
        """The ledger's positions, read now."""
        return {tp: entry.position for tp, entry in self._entries().items()}

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity
    ) -> None:
        """Give partitions that were found while running their position."""
        self.sink.add_partitions(positions, source, self.fence)

    def leader_epochs(self) -> Mapping[TopicPartition, int]:
        """The source's leader epochs that the ledger has noted."""
        return self.sink.leader_epochs(self.fence)

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int]) -> None:
        """Note them."""
        self.sink.note_leader_epochs(epochs, self.fence)

    def record_gaps(self, gaps: Mapping[TopicPartition, OffsetRange]) -> None:
        """Move positions over lost ranges and keep those in the history."""
        lost = Chunk.of_nothing(gaps)
        list(commit(self.sink, lost, self.fence, None, Backoff(), kind="gap"))

    def _entries(self, sink: Sink | None = None) -> dict[TopicPartition, Entry]:
        sink = sink or self.sink
        try:
            entries = sink.committed(self.fence)
        except Unavailable:
            # The kept session may have been ended while nothing was to do: a new one may work.
            entries = sink.committed(self.fence)
        newest = max((entry.epoch for entry in entries.values()), default=self.fence.epoch)
        if newest > self.fence.epoch:
            raise Fenced(self.fence.pipeline, self.fence.epoch, newest)
        if sink.one_store:
            known = dict.fromkeys(self._opened, None) | entries
            require_current(sink, self.fence, known)
        return entries

    def _tidy(self, added: int, *more: Callable[[], object]) -> None:
        """Housekeeping after a batch that has added so many rows to the history."""
        self._housekeeping.do(lambda: self.sink.tidy(self.fence), added, self._note_rejects, *more)

    def finish(self) -> None:
        """The run has ended in order: note the records of batches without rejects, too."""
        if self._counted.rejects and self._limited:
            try:
                self._note()
            except OncelyError as error:
                log.warning("the count of rejects is not noted: %s", error.message)

    @property
    def _limited(self) -> bool:
        return self._budget().left(0, 0) is not None

    def _budget(self) -> Budget:
        """What the batches so far have left of the rejects that are allowed."""
        counted = self._counted
        return Budget(
            self.max_rejects_share, self.max_rejects_count, counted.records, counted.rejects
        )

    def _count(self, records: int, rejects: int) -> None:
        """Count a batch that has taken effect, or that part of it that has."""
        counted = self._counted
        self._counted = replace(
            counted, records=counted.records + records, rejects=counted.rejects + rejects
        )

    def _note_rejects(self) -> None:
        """Note the count when there are more rejects, or a changed setting has begun it anew."""
        noted, counted = self._noted, self._counted
        more = self._limited and noted.rejects != counted.rejects
        if (more or noted.setting != counted.setting) and (noted.rejects or counted.rejects):
            self._note()

    def _note(self) -> None:
        if self._noted != self._counted:
            self.sink.note_rejects(self._counted, self.fence)
            self._noted = self._counted
