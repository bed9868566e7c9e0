"""The ledger in tables of a SQL database, beside the table that the rows go to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from oncely.clients.sql.connection import Connect, Connection, Dialect, TableName, connect
from oncely.clients.sql.session import brief_session, session, transaction
from oncely.core.claim import (
    Claim,
    Counts,
    Fence,
    Notes,
    Opened,
    PositionMoved,
    Positions,
    Takeover,
)
from oncely.core.ledger import Entry
from oncely.core.topics import SourceIdentity, TopicPartition
from oncely.errors import Fenced, InvariantViolation
from oncely.ledgers.same_source import same_topics
from oncely.ledgers.sql import takeover as takeovers
from oncely.ledgers.sql.dead_letters import DeadLetters
from oncely.ledgers.sql.history import History
from oncely.ledgers.sql.same_table import check_known_table
from oncely.ledgers.sql.statements import LedgerStatements, Registered
from oncely.ledgers.sql.tables import LedgerTables

_HISTORY_KEPT = 1_000  # ranges of a partition
_HISTORY_JOINED_FROM = 1_500  # so that not every batch pays for it


@dataclass(frozen=True)
class SqlLedger:
    """Epochs, positions, history and dead letters of one pipeline.

    Attributes:
        pipeline: the ledger's key.
        dialect: which database, and where.
        target: the table that the rows go to.
        create: create missing tables of the ledger.
        connect: how sessions are opened; the one place where a test puts faults.
        run: a name of this run's own, by which it finds itself in the ledger.
    """

    pipeline: str
    dialect: Dialect
    target: TableName
    create: bool = True
    connect: Connect = connect
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def tables(self) -> LedgerTables:
        """The tables beside the target."""
        return LedgerTables(self.dialect, self.target, self.pipeline)

    @property
    def statements(self) -> LedgerStatements:
        """Epoch and positions, over a connection that the caller holds."""
        return LedgerStatements(self.tables)

    @property
    def history(self) -> History:
        """The committed ranges."""
        return History(self.tables)

    @property
    def dead_letters(self) -> DeadLetters:
        """The rejects."""
        return DeadLetters(self.tables)

    @property
    def one_store(self) -> bool:
        """The ledger stands in the database of the rows."""
        return True

    @contextmanager
    def session(self, fence: Fence) -> Iterator[Connection]:
        """The session of a run in this process; a takeover ends it."""
        with session(self.dialect, self.pipeline, fence.epoch, self.connect) as ours:
            yield ours

    @contextmanager
    def transaction(self, fence: Fence) -> Iterator[Connection]:
        """A transaction in the session of a run."""
        with self.session(fence) as ours, transaction(ours):
            yield ours

    # -- the port --------------------------------------------------------------------------

    def open(self, takeover: Takeover) -> Opened:
        """Take the next epoch and the positions, each in a transaction of its own.

        With a reset the target is not looked at, and the ledger's tables are created.
        """
        if self.create:
            self.dialect.create_database()
        reset = takeover.reset
        opener = takeovers.Opener(self.run, takeover.expected, None if reset else self.target)
        with brief_session(self.dialect, "reset" if reset else "open", self.connect) as setup:
            if self.create:
                takeovers.create_ledger(setup, self.tables)
            takeovers.require_ledger(setup, self.tables)
            fence = takeovers.take_epoch(setup, self.tables, takeover.source, opener)
            return takeovers.take_positions(setup, self.tables, fence, opener, takeover)

    def positions(self, fence: Fence, *, settled: bool = False) -> dict[TopicPartition, Entry]:
        """What has been committed, read now: a COMMIT that was answered is seen by everybody.

        Raises:
            Fenced: another run has been given our epoch, and holds a position.
        """
        del settled
        with self.session(fence) as ours:
            entries = self.statements.entries(ours)
        if any(one.epoch == fence.epoch and one.run != fence.run for one in entries.values()):
            raise Fenced(self.pipeline, fence.epoch, fence.epoch)
        return entries

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Move positions alone."""
        with self.transaction(claim.fence) as ours:
            self.compare_and_set(ours, claim, counts)

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Give partitions their position; our epoch may not be mixed with a newer one."""
        with self.holding_the_pipeline(fence) as ours:
            self.statements.add_positions(ours, positions, source.topic_ids, fence)

    def note(self, fence: Fence, notes: Notes) -> None:
        """Note leader epochs beside positions that are ours, the count in the pipeline's row.

        A newer run is noticed by the next commit when leader epochs alone are noted.
        """
        if notes.leader_epochs:
            with self.transaction(fence) as ours:
                self.statements.note_leader_epochs(ours, notes.leader_epochs, fence)
        if notes.counted is not None:
            with self.holding_the_pipeline(fence) as ours:
                self.statements.note_rejects(ours, notes.counted)

    def tidy(self, fence: Fence) -> None:
        """Join old adjacent ranges of the history where it has become long.

        Raises:
            Fenced: a newer run has opened.
        """
        self.join_history(fence, _HISTORY_KEPT, _HISTORY_JOINED_FROM)

    def close(self) -> None:
        """Sessions end with their process, or are ended by whoever takes over."""

    # -- inside the transaction of a sink ------------------------------------------------------

    def compare_and_set(
        self, ours: Connection, claim: Claim, counts: Mapping[TopicPartition, Counts]
    ) -> None:
        """The compare-and-set of each position in lock order, then the history.

        In this order, because two attempts at one range would meet in the history's key, and
        the loser would be told of a duplicate instead of a moved position.

        Raises:
            PositionMoved: a position is not what the decision was made on.
        """
        for tp in sorted(claim.ranges):
            if not self.statements.move(ours, tp, claim.expected[tp], claim.end(tp)):
                raise PositionMoved(str(tp))
        done = [(tp, claim.ranges[tp], counts[tp]) for tp in sorted(claim.ranges)]
        self.history.append(ours, done, claim.kind, claim.fence.epoch)

    def has_moved(self, ours: Connection, claim: Claim) -> bool:
        """True when the ledger is not what the claim was decided on; locks nothing."""
        now = self.statements.entries(ours)
        return any(now.get(tp) != claim.expected[tp] for tp in claim.ranges)

    # -- beside the port -----------------------------------------------------------------------

    def check_table(self) -> None:
        """Refuse another table than the one that the positions belong to; nothing is created.

        Raises:
            TableMismatch: the table was dropped, made again or renamed, or is not durable.
        """
        with brief_session(self.dialect, "open", self.connect) as look:
            check_known_table(look, self.tables)

    def registered(self) -> Registered:
        """The pipeline's row, read now.

        Raises:
            InvariantViolation: it is missing though the pipeline was opened.
        """
        with brief_session(self.dialect, "look", self.connect) as look:
            row = self.statements.registered(look)
        if row is None:
            raise InvariantViolation(f"pipeline {self.pipeline!r} is not in the ledger")
        return row

    def same_topics(self, topic_ids: Mapping[str, str]) -> None:
        """Compare topic ids, as far as they are known, with the ledger's.

        Raises:
            SourceMismatch: a topic was deleted and made again.
        """
        with brief_session(self.dialect, "look", self.connect) as look:
            known = self.statements.topic_ids(look)
        same_topics(known, SourceIdentity("", topic_ids), self.pipeline)

    def join_history(self, fence: Fence, keep_newest: int, more_than: int = 0) -> int:
        """Join old adjacent ranges of partitions that have ``more_than`` so many.

        A partition is a transaction of its own: nobody who takes the pipeline over waits long.

        Returns:
            How many rows the history lost.
        """
        with self.session(fence) as ours:
            takeovers.require_held(self.statements.registered(ours), fence)
            crowded = self.history.crowded(ours, max(keep_newest, more_than))
        saved = 0
        for tp in crowded:
            with self.holding_the_pipeline(fence) as ours:
                saved += self.history.join(ours, tp, keep_newest)
        return saved

    @contextmanager
    def holding_the_pipeline(self, fence: Fence) -> Iterator[Connection]:
        """A transaction that no other run of the pipeline can open into.

        Raises:
            Fenced: a newer run has opened.
        """
        with self.transaction(fence) as ours:
            takeovers.require_held(self.statements.registered(ours, lock=True), fence)
            yield ours
