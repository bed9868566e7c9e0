"""The ledger in tables of a SQL database, beside the destination table of the rows."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from oncely.core.claim import (
    Claim,
    Counts,
    Entry,
    Fence,
    Finished,
    Notes,
    Opened,
    PositionMoved,
    Positions,
    RangeKind,
    Takeover,
    Trim,
    advance,
    decide_parts,
)
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.errors import InvariantViolation, check
from oncely.stores.document import same_topics
from oncely.stores.sql import takeover as takeovers
from oncely.stores.sql.connection import (
    Connect,
    Connection,
    Dialect,
    TableName,
    brief_session,
    connect,
    session,
    transaction,
)
from oncely.stores.sql.dead_letters import DeadLetterTable
from oncely.stores.sql.history import History
from oncely.stores.sql.statements import LedgerStatements, Registered
from oncely.stores.sql.tables import LedgerTables

_HISTORY_KEPT = 1_000  # ranges of a partition
_HISTORY_JOINED_FROM = 1_500  # so that not every batch pays for it


@dataclass(frozen=True)
class SqlLedger:
    """Epochs, positions, history and dead letters of one pipeline.

    Attributes:
        pipeline: the ledger's key.
        dialect: the kind of database, and its address.
        target: the destination table of the rows.
        create: create missing tables of the ledger.
        connect: opens sessions; tests inject faults here.
        run: a unique name of this run, which identifies it in the ledger.
    """

    pipeline: str
    dialect: Dialect
    target: TableName
    create: bool = True
    connect: Connect = connect
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @cached_property
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
    def dead_letters(self) -> DeadLetterTable:
        """The rejects."""
        return DeadLetterTable(self.tables)

    @property
    def one_store(self) -> bool:
        """The ledger is in the database of the rows."""
        return True

    @contextmanager
    def session(self, fence: Fence) -> Iterator[Connection]:
        """The session of a run in this process; a takeover ends it."""
        several = fence.partitions is not None
        with session(
            self.dialect, self.pipeline, fence.epoch, self.connect, several=several
        ) as ours:
            yield ours

    @contextmanager
    def transaction(self, fence: Fence) -> Iterator[Connection]:
        """A transaction in the session of a run."""
        with self.session(fence) as ours, transaction(ours):
            yield ours

    # -- the port --------------------------------------------------------------------------

    def open(self, takeover: Takeover) -> Opened:
        """Take the next epoch and the positions, each in a transaction of its own.

        With a reset the target is not checked, and the ledger's tables are created.
        """
        if self.create:
            self.dialect.create_database()
        purpose = "open" if takeover.reset is None else "reset"
        with brief_session(self.dialect, purpose, self.connect) as setup:
            if self.create:
                takeovers.create_ledger(setup, self.tables)
            else:
                takeovers.require_ledger(setup, self.tables)
            return self.take_over(setup, takeover)

    def take_over(self, setup: Connection, takeover: Takeover) -> Opened:
        """As :meth:`open`, in a session, where the ledger's tables exist."""
        opener = takeovers.SqlTakeover(
            self.run, takeover.expected, self.target if takeover.reset is None else None,
            takeover.partitions, takeover.since,
        )  # fmt: skip
        fence = takeovers.take_epoch(setup, self.tables, takeover.source, opener)
        return takeovers.take_positions(setup, self.tables, fence, opener, takeover)

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """The committed positions, read now: a COMMIT that was answered is visible to all sessions.

        Raises:
            Fenced: another run was given our epoch, and holds a position.
        """
        del settled
        with self.session(fence) as ours:
            entries = self.statements.entries(ours, of)
        fence.refuse_taken({tp: one for tp, one in entries.items() if one.epoch == fence.epoch})
        return entries

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Move positions alone."""
        with self.transaction(claim.fence) as ours:
            self.compare_and_set(ours, claim, counts)

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Add positions; our epoch must not be mixed with a newer one."""
        check(fence.partitions is None, "a run of some partitions takes others over")
        with self.holding_the_pipeline(fence) as ours:
            self.statements.add_positions(ours, positions, source.topic_ids, fence)

    def note(self, fence: Fence, notes: Notes) -> None:
        """Store leader epochs beside positions that are ours, the count in the pipeline's row."""
        with self.holding_the_pipeline(fence) as ours:
            if notes.leader_epochs:
                self.statements.note_leader_epochs(ours, notes.leader_epochs, fence)
            if notes.counted is not None:
                counted = notes.counted
                if fence.partitions is not None:
                    counted = counted.added_to(self.statements.counted(ours), notes.noted)
                self.statements.note_rejects(ours, counted)

    def tidy(self, fence: Fence) -> None:
        """Join old adjacent ranges of a long history.

        Raises:
            Fenced: a newer run has opened.
        """
        self.join_history(fence, _HISTORY_KEPT, _HISTORY_JOINED_FROM)

    def close(self) -> None:
        """Does nothing: sessions end with their process, or in a takeover."""

    # -- inside the transaction of a sink ------------------------------------------------------

    def compare_and_set(
        self, ours: Connection, claim: Claim, counts: Mapping[TopicPartition, Counts]
    ) -> None:
        """The compare-and-set of each position in lock order, then the history; in one round trip.

        In this order, because two attempts at one range would conflict in the history's key, and
        the loser would get an error about a duplicate instead of a moved position.

        Raises:
            PositionMoved: a position differs from that of the decision.
        """
        moves = {tp: (claim.expected[tp], claim.end(tp)) for tp in claim.ranges}
        done = [(tp, claim.ranges[tp], counts[tp]) for tp in sorted(claim.ranges)]
        history = self.history.inserts(done, claim.kind, claim.fence.epoch)
        ours.execute_all([*self.statements.moves(moves), *history])

    def finish(
        self,
        ours: Connection,
        claim: Claim,
        counts: Mapping[TopicPartition, Sequence[Counts]],
    ) -> dict[TopicPartition, list[Finished]]:
        """The compare-and-set of ``claim.parts``, which may begin beyond the positions.

        Other threads of this run commit other parts at the same time and move the position, so it
        is not compared. With its row locked, the run is compared, the ranges that have taken effect
        since are read, and the position moves to the end of the contiguous ones. The lock is held
        from here to COMMIT: the threads' transactions end one after the other.

        Args:
            ours: a transaction at READ COMMITTED.
            claim: the claim.
            counts: of each part.

        Raises:
            PositionMoved: another run has taken the partition over, or a part has taken effect.
        """
        done: dict[TopicPartition, list[Finished]] = {}
        for tp, parts in sorted(claim.parts.items()):
            entry = self.statements.locked(ours, tp)
            if entry is None or not claim.fence.is_held(entry):
                raise PositionMoved(str(tp))
            if decide_parts(entry, parts, claim.fence.epoch) != Trim(parts):
                raise PositionMoved(str(tp))
            to = advance(entry, parts)
            if to != entry.position:
                ours.execute_all(self.statements.moves({tp: (entry, to)}))
            reached = advance(entry, ())
            done[tp] = [
                Finished(part, one, "ahead" if part.start > reached else "data")
                for part, one in zip(parts, counts[tp], strict=True)
            ]
        kinds: tuple[RangeKind, ...] = ("data", "ahead")
        for kind in kinds:
            own = [(tp, r, one) for tp, all_ in done.items() for r, one, of in all_ if of == kind]
            if own:
                self.history.append(ours, own, kind, claim.fence.epoch)
        return done

    def has_moved(self, ours: Connection, claim: Claim) -> bool:
        """True if the ledger differs from that of the claim's decision; locks nothing."""
        now = self.statements.entries(ours, claim.ranges)
        if not claim.parts:
            return any(now.get(tp) != claim.expected[tp] for tp in claim.ranges)
        return any(
            tp not in now
            or not claim.fence.is_held(now[tp])
            or decide_parts(now[tp], parts, claim.fence.epoch) != Trim(parts)
            for tp, parts in claim.parts.items()
        )

    def keep(
        self, ours: Connection, partition: TopicPartition, entry: Entry, upto: Position
    ) -> None:
        """The compare of a rewrite: the position's row lock is held from here to COMMIT.

        Raises:
            PositionMoved: a run or a reset has taken the position since, or it is before ``upto``.
        """
        if not self.statements.keep(ours, partition, entry, upto):
            raise PositionMoved(str(partition))

    # -- beside the port -----------------------------------------------------------------------

    def registered(self) -> Registered:
        """The pipeline's row, read now.

        Raises:
            InvariantViolation: it is missing although the pipeline was opened.
        """
        with brief_session(self.dialect, "look", self.connect) as look:
            row = self.statements.registered(look)
        if row is None:
            raise InvariantViolation(f"pipeline {self.pipeline!r} is not in the ledger")
        return row

    def identity(self) -> str:
        """Distinguishes the opened ledger from others, by whatever address it is reached."""
        with self.looking() as look:
            return self.statements.identity(look)

    @contextmanager
    def looking(self) -> Iterator[Connection]:
        """A session of a process that holds no position; no takeover ends it."""
        with brief_session(self.dialect, "look", self.connect) as look:
            yield look

    def entries(self) -> dict[TopicPartition, Entry]:
        """The entries of all positions, read now by a process that holds none of them."""
        with self.looking() as look:
            return self.statements.entries(look)

    def committed(self, partition: TopicPartition, within: OffsetRange) -> list[OffsetRange]:
        """The ranges of the history that overlap a range, ascending, read now."""
        with self.looking() as look:
            return self.history.committed(look, partition, within)

    def same_topics(self, topic_ids: Mapping[str, str]) -> None:
        """Compare topic ids, if they are known, with those in the ledger.

        Raises:
            SourceMismatch: a topic was deleted and recreated.
        """
        with brief_session(self.dialect, "look", self.connect) as look:
            known = self.statements.topic_ids(look)
        same_topics(known, SourceIdentity("", topic_ids), self.pipeline)

    def join_history(self, fence: Fence, keep_newest: int, more_than: int = 0) -> int:
        """Join old adjacent ranges of partitions that have more than ``more_than`` ranges.

        Each partition has a transaction of its own, so a takeover does not wait long.

        Returns:
            The number of rows that were removed from the history.
        """
        with self.session(fence) as ours:
            self._require_held(ours, fence)
            crowded = self.history.crowded(ours, max(keep_newest, more_than))
        saved = 0
        for tp in filter(fence.covers, crowded):
            with self.holding_the_pipeline(fence) as ours:
                saved += self.history.join(ours, tp, keep_newest)
        return saved

    @contextmanager
    def holding_the_pipeline(self, fence: Fence) -> Iterator[Connection]:
        """A transaction during which no other run of the pipeline can open.

        Raises:
            Fenced: a newer run has opened, for a run of some partitions at all of them.
        """
        with self.transaction(fence) as ours:
            self._require_held(ours, fence, lock=True)
            yield ours

    def _require_held(self, ours: Connection, fence: Fence, *, lock: bool = False) -> None:
        registered = self.statements.registered(ours, lock=lock)
        if fence.partitions is None:
            takeovers.require_held(registered, fence)
        else:
            takeovers.require_some(self.statements.entries(ours), fence)
