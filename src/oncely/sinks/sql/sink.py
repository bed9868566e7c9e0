"""The SQL sink: rows, rejects, history and positions in one transaction of the database."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from oncely.core.ledger import Entry, advance
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.decode.base import Rejection
from oncely.errors import Fenced, InvariantViolation, check
from oncely.sinks.base import (
    BudgetSpent,
    Chunk,
    Fence,
    Opened,
    PositionMoved,
    Publication,
    RangeKind,
    Reject,
    RejectCount,
    Reset,
    Staged,
    Written,
)
from oncely.sinks.same_source import same_topics
from oncely.sinks.sql import staging, takeover
from oncely.sinks.sql.connection import Connect, Connection, Dialect, connect
from oncely.sinks.sql.dead_letters import DeadLetters
from oncely.sinks.sql.history import History
from oncely.sinks.sql.ledger import Ledger, Registered
from oncely.sinks.sql.ledger_tables import LedgerTables
from oncely.sinks.sql.prepare import Prepared, prepare
from oncely.sinks.sql.same_table import check_known_table
from oncely.sinks.sql.session import brief_session, session, transaction
from oncely.sinks.sql.target import Target, Wanted, inspect
from oncely.sinks.sql.write import write_rows

_HISTORY_KEPT = 1_000  # ranges of a partition
_HISTORY_JOINED_FROM = 1_500  # so that not every batch pays for it


@dataclass(frozen=True)
class SqlSink:
    """A table in a SQL database, with the ledger beside it.

    Attributes:
        pipeline: the ledger's key.
        dialect: which database, and where.
        wanted: table, row schema, keys.
        keep_source: also write topic, partition and offset of each row.
        create: create missing tables.
        target: what was found by :meth:`bind`; needed for commits.
        connect: how sessions are opened; the one place where a test puts faults.
        run: a name of this run's own, by which it finds itself in the ledger.
    """

    pipeline: str
    dialect: Dialect
    wanted: Wanted
    keep_source: bool = False
    create: bool = True
    target: Target | None = None
    connect: Connect = connect
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def ledger_tables(self) -> LedgerTables:
        """The tables beside the destination table."""
        return LedgerTables(self.dialect, self.wanted.table, self.pipeline)

    @property
    def ledger(self) -> Ledger:
        """Epoch and positions."""
        return Ledger(self.ledger_tables)

    @property
    def history(self) -> History:
        """The committed ranges."""
        return History(self.ledger_tables)

    @property
    def dead_letters(self) -> DeadLetters:
        """The rejects."""
        return DeadLetters(self.ledger_tables)

    @property
    def needs(self) -> frozenset[str]:
        """A table takes nothing but rows and where they come from."""
        return frozenset()

    @property
    def one_store(self) -> bool:
        """The ledger stands in the database of the table."""
        return True

    @property
    def timed(self) -> bool:
        """Positions move with the rows."""
        return False

    def in_hand(self, ranges: Mapping[TopicPartition, OffsetRange]) -> SqlSink:  # noqa: ARG002
        """The same for every batch."""
        return self

    def bind(self) -> SqlSink:
        """Look at the table as it is now; executors work with what was found.

        Raises:
            TableMismatch: the table is missing or doesn't take the rows.
        """
        with brief_session(self.dialect, "bind", self.connect) as look:
            return replace(self, target=inspect(self.dialect, look, self.wanted))

    def open(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None = None,
    ) -> Opened:
        """Take the next epoch and settle a position for every partition; see the port."""
        if self.create:
            self.dialect.create_database()
        with brief_session(self.dialect, "open", self.connect) as setup:
            # Before anything is created; asked again under the pipeline's lock.
            check_known_table(setup, self.ledger_tables)
            self._prepare(setup)
            opener = takeover.Opener(self.run, expected, self.wanted.table)
            fence = takeover.take_epoch(setup, self.ledger_tables, source, opener)
            return takeover.take_positions(
                setup, self.ledger_tables, fence, opener, source, start, earliest
            )

    def reset(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        positions: Reset,
    ) -> Opened:
        """Take the next epoch and put positions elsewhere, in one transaction.

        ``positions`` is asked when the old run is fenced, with where it has really ended.
        The destination table is not looked at, nor created. Raises as :meth:`open` does.
        """
        if self.create:
            self.dialect.create_database()
        with brief_session(self.dialect, "reset", self.connect) as setup:
            if self.create:
                takeover.create_ledger(setup, self.ledger_tables)
            takeover.require_ledger(setup, self.ledger_tables)
            opener = takeover.Opener(self.run, expected=None, table=None)
            fence = takeover.take_epoch(setup, self.ledger_tables, source, opener)
            return takeover.take_positions(
                setup, self.ledger_tables, fence, opener, source, start, earliest, positions
            )

    def entries(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """What has been committed, read now.

        Raises:
            Fenced: another run has been given our epoch, and holds a position.
        """
        with session(self.dialect, self.pipeline, fence.epoch, self.connect) as ours:
            entries = self.ledger.entries(ours)
        if any(one.epoch == fence.epoch and one.run != fence.run for one in entries.values()):
            raise Fenced(self.pipeline, fence.epoch, fence.epoch)
        return entries

    def committed(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """The same: a COMMIT that was answered is seen by everybody."""
        return self.entries(fence)

    def registered(self) -> Registered:
        """The pipeline's row, read now.

        Raises:
            InvariantViolation: it is missing though the pipeline was opened.
        """
        with brief_session(self.dialect, "look", self.connect) as look:
            row = self.ledger.registered(look)
        if row is None:
            raise InvariantViolation(f"pipeline {self.pipeline!r} is not in the ledger")
        return row

    def same_topics(self, topic_ids: Mapping[str, str]) -> None:
        """Compare topic ids, as far as they are known, with the ledger's.

        Raises:
            SourceMismatch: a topic was deleted and made again.
        """
        with brief_session(self.dialect, "look", self.connect) as look:
            same_topics(self.ledger.topic_ids(look), SourceIdentity("", topic_ids), self.pipeline)

    def add_partitions(
        self, positions: Mapping[TopicPartition, Position], source: SourceIdentity, fence: Fence
    ) -> None:
        """Give partitions that were found while running their position.

        Raises:
            Fenced: a newer run has opened; its epoch may not be mixed with ours.
        """
        with self._holding_the_pipeline(fence) as ours:
            self.ledger.add_positions(ours, positions, source.topic_ids, fence)

    def leader_epochs(self, fence: Fence) -> dict[TopicPartition, int]:
        """What was noted beside the positions."""
        with session(self.dialect, self.pipeline, fence.epoch, self.connect) as ours:
            return self.ledger.leader_epochs(ours)

    def note_leader_epochs(self, epochs: Mapping[TopicPartition, int], fence: Fence) -> None:
        """Note them beside positions that are ours; a newer run is noticed by the next commit."""
        with (
            session(self.dialect, self.pipeline, fence.epoch, self.connect) as ours,
            transaction(ours),
        ):
            self.ledger.note_leader_epochs(ours, epochs, fence)

    def note_rejects(self, count: RejectCount, fence: Fence) -> None:
        """Note the count in the pipeline's row; see the port."""
        with self._holding_the_pipeline(fence) as ours:
            self.ledger.note_rejects(ours, count)

    def close(self) -> None:
        """Sessions end with their process, or are ended by whoever takes over."""

    def tidy(self, fence: Fence) -> None:
        """Join old adjacent ranges of the history where it has become long.

        Raises:
            Fenced: a newer run has opened.
        """
        self.join_history(fence, _HISTORY_KEPT, _HISTORY_JOINED_FROM)

    def join_history(self, fence: Fence, keep_newest: int, more_than: int = 0) -> int:
        """Join old adjacent ranges of partitions that have ``more_than`` so many.

        A partition is a transaction of its own: nobody who takes the pipeline over waits long.

        Returns:
            How many rows the history lost.
        """
        with session(self.dialect, self.pipeline, fence.epoch, self.connect) as ours:
            takeover.require_held(self.ledger.registered(ours), fence)
            crowded = self.history.crowded(ours, max(keep_newest, more_than))
        saved = 0
        for tp in crowded:
            with self._holding_the_pipeline(fence) as ours:
                saved += self.history.join(ours, tp, keep_newest)
        return saved

    @contextmanager
    def _holding_the_pipeline(self, fence: Fence) -> Iterator[Connection]:
        """A transaction that no other run of the pipeline can open into."""
        with (
            session(self.dialect, self.pipeline, fence.epoch, self.connect) as ours,
            transaction(ours),
        ):
            registered = self.ledger.registered(ours, lock=True)
            takeover.require_held(registered, fence)
            yield ours

    def commit(
        self,
        chunk: Chunk,
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        max_rejects: int | None = None,
        kind: RangeKind = "data",
    ) -> dict[TopicPartition, Written]:
        """Write the chunk and move its positions in one transaction; see the port.

        Nothing of the ledger is locked while rows are sent. The compare-and-set comes last, and
        its row locks are held from there to COMMIT only.
        """
        return self._in_one_transaction(
            chunk,
            fence,
            max_rejects,
            lambda ours: self._still_ours(ours, chunk, entries),
            lambda ours, written: self._write_ledger(
                ours, chunk.ranges, entries, written, fence, kind
            ),
        )

    def write(
        self, chunk: Chunk, fence: Fence, max_rejects: int | None = None
    ) -> dict[TopicPartition, Written]:
        """Write the chunk and move no position; see :class:`oncely.sinks.base.Halves`."""
        return self._in_one_transaction(
            chunk, fence, max_rejects, lambda _: None, lambda _, __: None
        )

    def move(
        self,
        ranges: Mapping[TopicPartition, OffsetRange],
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        written: Mapping[TopicPartition, Written],
        kind: RangeKind,
    ) -> None:
        """Move positions alone; see :class:`oncely.sinks.base.Halves`."""
        with (
            session(self.dialect, self.pipeline, fence.epoch, self.connect) as ours,
            transaction(ours),
        ):
            self._write_ledger(ours, ranges, entries, written, fence, kind)

    def prepare(self) -> None:
        """Create the tables that are missing, if they may be."""
        if self.create:
            self.dialect.create_database()
        with brief_session(self.dialect, "open", self.connect) as setup:
            self._prepare(setup)

    def _prepare(self, setup: Connection) -> None:
        if self.create:
            takeover.create_tables(setup, self.ledger_tables, self.wanted)
        takeover.require_ledger(setup, self.ledger_tables)
        inspect(self.dialect, setup, self.wanted)

    def _in_one_transaction(
        self,
        chunk: Chunk,
        fence: Fence,
        max_rejects: int | None,
        still_ours: Callable[[Connection], None],
        finish: Callable[[Connection, Mapping[TopicPartition, Written]], None],
    ) -> dict[TopicPartition, Written]:
        """Rows and rejects, then ``finish``, and COMMIT."""
        check(self.target is not None or not chunk.rows.num_rows, "commit before bind")
        budget = _Budget(max_rejects)
        prepared = prepare(chunk, self.target, self.keep_source)
        budget.spend(prepared.rejections)
        # Asked of the broker outside of transactions: an idle one would be ended, and holds locks.
        # What the table refuses is written without in a transaction of its own.
        letters = _letters(chunk, prepared.rejections)
        with session(self.dialect, self.pipeline, fence.epoch, self.connect) as ours:
            while True:
                try:
                    with transaction(ours):
                        done = self._write_rows(ours, prepared, budget, partial(still_ours, ours))
                        refused = list(done.rejections[len(prepared.rejections) :])
                        if refused:
                            raise _Refused
                        self.dead_letters.add(ours, letters, fence.epoch)
                        written = tally(chunk, done)
                        finish(ours, written)
                    return written
                except _Refused:
                    letters += _letters(chunk, refused)
                    prepared = prepared.without(refused)

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Write a task's rows into a table of its own; see the port."""
        return staging.stage(self, fence, batch_id, attempt, rows)

    def publish(
        self, what: Publication, entries: Mapping[TopicPartition, Entry], fence: Fence
    ) -> None:
        """Move staged rows into the table, with rejects and positions; see the port."""
        staging.publish(self, what, entries, fence)

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> int:
        """Drop staging tables that nobody will publish; see the port."""
        return staging.sweep(self, fence, keep_batches_from)

    def write_staged(self, what: Publication, fence: Fence) -> None:
        """Move staged rows into the table, and no position."""
        staging.publish(self, what, None, fence)

    def _write_rows(
        self,
        ours: Connection,
        prepared: Prepared,
        budget: _Budget,
        still_ours: Callable[[], None],
    ) -> Prepared:
        """Send the rows; the ledger's tables are only read."""
        if self.target is None or not prepared.rows.num_rows:
            return prepared
        return write_rows(ours, self.dialect, self.target, prepared, still_ours, budget.spend)

    def _write_ledger(
        self,
        ours: Connection,
        ranges: Mapping[TopicPartition, OffsetRange],
        entries: Mapping[TopicPartition, Entry],
        written: Mapping[TopicPartition, Written],
        fence: Fence,
        kind: RangeKind,
    ) -> None:
        """The compare-and-set of each position in lock order, then the history.

        In this order, because two attempts at one range would meet in the history's key, and
        the loser would be told of a duplicate instead of a moved position.

        Raises:
            PositionMoved: a position is not what the decision was made on.
        """
        done = [(tp, ranges[tp], written[tp]) for tp in sorted(ranges)]
        for tp, range_, _ in done:
            entry = entries[tp]
            takeover.check_own(tp, entry, fence)
            if not self.ledger.move(ours, tp, entry, advance(entry, [range_])):
                raise PositionMoved(str(tp))
        self.history.append(ours, done, kind, fence.epoch)

    def _still_ours(
        self, ours: Connection, chunk: Chunk, entries: Mapping[TopicPartition, Entry]
    ) -> None:
        if self.ledger_moved(ours, chunk.ranges, entries):
            raise PositionMoved("written by another attempt")

    def ledger_moved(
        self,
        ours: Connection,
        partitions: Iterable[TopicPartition],
        entries: Mapping[TopicPartition, Entry],
    ) -> bool:
        """True when the ledger is not what a decision was made on."""
        now = self.ledger.entries(ours)
        return any(now.get(tp) != entries[tp] for tp in partitions)


class _Refused(Exception):
    """Rows of the open transaction were refused; it is undone."""


class _Budget:
    """Counts a transaction's rejects against what it may add."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._spent: list[Rejection] = []

    def spend(self, rejections: Sequence[Rejection]) -> None:
        """Count; stop the transaction when the budget is gone."""
        self._spent += rejections
        if rejections and self._limit is not None and len(self._spent) > self._limit:
            raise BudgetSpent(self._spent, "decode, transform or table")


def _letters(chunk: Chunk, rejections: Sequence[Rejection]) -> list[Reject]:
    """One dead letter for each rejection."""
    letters = chunk.dead_letters(rejections) if rejections else []
    check(len(letters) == len(rejections), "a rejection has no dead letter")
    return letters


def tally(chunk: Chunk, prepared: Prepared) -> dict[TopicPartition, Written]:
    """Count per topic-partition what became of the chunk's records."""
    groups = len(chunk.partitions)
    alive = chunk.partition >= 0
    rejected = np.array([r.record for r in prepared.rejections], dtype=np.int64)
    outcome = np.zeros(chunk.records, dtype=bool)
    outcome[prepared.row_record] = True
    outcome[rejected] = True

    def per_partition(of: np.ndarray) -> list[int]:
        return [int(n) for n in np.bincount(chunk.partition[of], minlength=groups)]

    counts = zip(
        per_partition(np.flatnonzero(alive)),
        per_partition(prepared.row_record),
        per_partition(rejected),
        per_partition(np.flatnonzero(alive & ~outcome)),
        strict=True,
    )
    by_tp = {tp: Written(*c) for tp, c in zip(chunk.partitions, counts, strict=True)}
    return {tp: by_tp.get(tp, Written(0, 0, 0, 0)) for tp in chunk.ranges}
