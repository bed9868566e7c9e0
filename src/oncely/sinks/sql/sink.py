"""The SQL sink: rows, rejects, history and positions in one transaction of the database."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from oncely.clients.sql.connection import Connect, Dialect, connect
from oncely.clients.sql.session import brief_session
from oncely.core.batch import Batch, BudgetSpent, Chunk, Reject, Rejection, Staged
from oncely.core.claim import NO_RECORDS, Claim, Counts, Fence, Opened, PositionMoved, Takeover
from oncely.core.topics import TopicPartition
from oncely.errors import check
from oncely.ledgers.sql.ledger import SqlLedger
from oncely.ledgers.sql.takeover import require_ledger
from oncely.sinks.sql import staging
from oncely.sinks.sql.prepare import Prepared, prepare
from oncely.sinks.sql.target import Target, Wanted, create_tables, inspect
from oncely.sinks.sql.write import write_rows


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
    def ledger(self) -> SqlLedger:
        """Epochs, positions, history and dead letters, in the database of the table."""
        return SqlLedger(
            self.pipeline, self.dialect, self.wanted.table, self.create, self.connect, self.run
        )

    @property
    def needs(self) -> frozenset[str]:
        """A table takes nothing but rows and where they come from."""
        return frozenset()

    def bind(self) -> SqlSink:
        """Look at the table as it is now; executors work with what was found."""
        with brief_session(self.dialect, "bind", self.connect) as look:
            return replace(self, target=inspect(self.dialect, look, self.wanted))

    def prepare(self) -> None:
        """Create the tables that are missing, if they may be."""
        if self.create:
            self.dialect.create_database()
        with brief_session(self.dialect, "open", self.connect) as setup:
            if self.create:
                create_tables(setup, self.ledger.tables, self.wanted)
            require_ledger(setup, self.ledger.tables)
            inspect(self.dialect, setup, self.wanted)

    def open(self, takeover: Takeover) -> Opened:
        """Create what is missing and take the ledger over; a reset does not look at the table."""
        if takeover.reset is None:
            if self.create:
                self.dialect.create_database()
            # Before anything is created; asked again under the pipeline's lock.
            self.ledger.check_table()
            self.prepare()
        return self.ledger.open(takeover)

    def close(self) -> None:
        """Sessions end with their process, or are ended by whoever takes over."""

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> dict[TopicPartition, Counts]:
        """Rows and rejects, then the compare-and-set, and COMMIT.

        Nothing of the ledger is locked while rows are sent. The compare-and-set comes last, and
        its row locks are held from there to COMMIT only.
        """
        check(self.target is not None or not chunk.rows.num_rows, "commit before bind")
        budget = _Budget(max_rejects)
        prepared = prepare(chunk, self.target, self.keep_source)
        budget.spend(prepared.rejections)
        # Asked of the broker outside of transactions: an idle one would be ended, and holds locks.
        # What the table refuses is written without in a transaction of its own.
        letters = _letters(chunk, prepared.rejections)
        while True:
            try:
                return self._commit_once(chunk, prepared, letters, fence, claim, budget)
            except _Refused as refused:
                letters += _letters(chunk, refused.rejections)
                prepared = prepared.without(list(refused.rejections))

    def _commit_once(
        self,
        chunk: Chunk,
        prepared: Prepared,
        letters: Sequence[Reject],
        fence: Fence,
        claim: Claim | None,
        budget: _Budget,
    ) -> dict[TopicPartition, Counts]:
        """One transaction.

        Raises:
            _Refused: the database refuses rows; it was undone.
        """
        with self.ledger.transaction(fence) as ours:

            def still_ours() -> None:
                if claim is not None and self.ledger.has_moved(ours, claim):
                    raise PositionMoved("written by another attempt")

            done = prepared
            if self.target is not None and prepared.rows.num_rows:
                done = write_rows(
                    ours, self.dialect, self.target, prepared, still_ours, budget.spend
                )
            if refused := done.rejections[len(prepared.rejections) :]:
                raise _Refused(refused)
            self.ledger.dead_letters.add(ours, letters, fence.epoch)
            counts = tally(chunk, done)
            if claim is not None:
                self.ledger.compare_and_set(ours, claim, counts)
        return counts

    # -- batch commit --------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Staging tables are named by the batch."""

    def stage(self, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]) -> Staged:
        """Write a task's rows into a table of its own."""
        return staging.stage(self, fence, batch_id, attempt, rows)

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Move staged rows into the table, with rejects and positions."""
        staging.publish(self, batch, fence, claim)

    def sweep(self, fence: Fence, keep_batches_from: int | None = None) -> int:
        """Drop staging tables that nobody will publish."""
        return staging.sweep(self, fence, keep_batches_from)


class _Refused(Exception):
    """Rows of the open transaction were refused; it is undone.

    Attributes:
        rejections: their records.
    """

    def __init__(self, rejections: Sequence[Rejection]) -> None:
        self.rejections = rejections


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


def tally(chunk: Chunk, prepared: Prepared) -> dict[TopicPartition, Counts]:
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
    by_tp = {tp: Counts(*c) for tp, c in zip(chunk.partitions, counts, strict=True)}
    return {tp: by_tp.get(tp, NO_RECORDS) for tp in chunk.ranges}
