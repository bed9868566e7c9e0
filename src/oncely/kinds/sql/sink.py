"""The SQL sink: rows, rejects, history and positions in one transaction of the database.

In a batch commit the driver writes the rows of a Spark transform, and all positions, at once. Tasks
cast the rows to the table's types and compute their digests; the driver reads them from Spark
while it writes them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa

from oncely.core.batch import Batch, Chunk, CommitBudget, Formed, Packet, Reject, Staged
from oncely.core.claim import Claim, Counts, Fence, Opened, PositionMoved, QueryBatch, Takeover
from oncely.core.digest import digest_sum
from oncely.core.ranges import TopicPartition
from oncely.errors import GivenUp, InvariantViolation, TableMismatch, WrongInput, check
from oncely.kinds.rows import NO_SINGLE_RECORD, digests_of, row_digests, row_refused
from oncely.kinds.sql.form import prepare
from oncely.kinds.sql.table import BoundTable, TableSpec, check_unaltered, create_tables, inspect
from oncely.kinds.sql.write import RowWriter, write_rows
from oncely.kinds.sql_ledger import Refused
from oncely.stores.sql.cast import cast_rows
from oncely.stores.sql.connection import (
    BadData,
    Connect,
    Connection,
    Dialect,
    brief_session,
    connect,
)
from oncely.stores.sql.ledger import SqlLedger
from oncely.stores.sql.takeover import check_known_table, require_ledger

_PREPARED = "sql"


@dataclass(frozen=True)
class SqlSink:
    """A table in a SQL database, with the ledger beside it.

    Attributes:
        pipeline: the ledger's key.
        dialect: the kind of database, and its address.
        wanted: table, row schema, keys.
        keep_source: also write topic, partition and offset of each row.
        create: create missing tables.
        target: the result of :meth:`bind`; required for commits.
        connect: opens sessions; tests inject faults here.
        run: a unique name of this run, which identifies it in the ledger.
    """

    pipeline: str
    dialect: Dialect
    wanted: TableSpec
    keep_source: bool = False
    create: bool = True
    target: BoundTable | None = None
    connect: Connect = connect
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    @cached_property
    def ledger(self) -> SqlLedger:
        """Epochs, positions, history and dead letters, in the database of the table."""
        return SqlLedger(
            self.pipeline, self.dialect, self.wanted.table, self.create, self.connect, self.run
        )

    @property
    def needs(self) -> frozenset[str]:
        """Nothing: a table stores only rows and their origin."""
        return frozenset()

    def bind(self) -> SqlSink:
        """Inspect the present table; executors use the result."""
        with brief_session(self.dialect, "bind", self.connect) as look:
            return replace(self, target=inspect(self.dialect, look, self.wanted))

    def prepare(self) -> None:
        """Create missing tables, if permitted."""
        with self._setup() as setup:
            self._prepare(setup)

    @contextmanager
    def _setup(self) -> Iterator[Connection]:
        if self.create:
            self.dialect.create_database()
        with brief_session(self.dialect, "open", self.connect) as setup:
            yield setup

    def _prepare(self, setup: Connection) -> None:
        if self.create:
            create_tables(setup, self.ledger.tables, self.wanted)
        else:
            require_ledger(setup, self.ledger.tables)
        inspect(self.dialect, setup, self.wanted)

    def open(self, takeover: Takeover) -> Opened:
        """Create missing tables and take over the ledger; a reset does not check the table."""
        if takeover.reset is not None:
            return self.ledger.open(takeover)
        with self._setup() as setup:
            # Before anything is created; repeated under the pipeline's lock.
            check_known_table(setup, self.ledger.tables)
            self._prepare(setup)
            return self.ledger.take_over(setup, takeover)

    def close(self) -> None:
        """Does nothing: sessions end with their process, or in a takeover."""

    def commit(
        self, chunk: Chunk, fence: Fence, claim: Claim | None, max_rejects: int | None = None
    ) -> dict[TopicPartition, Counts]:
        """Write rows and rejects, then compare-and-set, then COMMIT.

        Nothing of the ledger is locked while rows are sent. The compare-and-set comes last, and its
        row locks are held from there to COMMIT only.
        """
        check(self.target is not None or not chunk.rows.num_rows, "commit before bind")
        budget = CommitBudget(max_rejects, "decode, transform or table")
        target, formed = chunk.prepared.pop(_PREPARED, (None, None))
        if formed is None or target is not self.target:
            formed = self.formed(chunk)
        budget.spend(formed.rejections)
        # Dead letters are fetched from the broker outside of transactions: an idle transaction
        # would be ended, and holds locks.
        letters = chunk.letters(formed.rejections)
        while True:
            try:
                return self._commit_once(chunk, formed, letters, fence, claim, budget)
            except Refused as refused:
                formed = formed.without(refused.rejections)
                letters += chunk.letters(refused.rejections)

    def _commit_once(
        self,
        chunk: Chunk,
        formed: Formed[pa.Table],
        letters: Sequence[Reject],
        fence: Fence,
        claim: Claim | None,
        budget: CommitBudget,
    ) -> dict[TopicPartition, Counts]:
        """Execute one transaction.

        Raises:
            Refused: the database refuses rows; the transaction was rolled back.
        """
        counts = formed.counts(chunk)
        with self.ledger.transaction(fence) as ours:

            def still_ours() -> None:
                if chunk.given_up is not None and chunk.given_up(0):
                    raise GivenUp("refused rows were isolated: nobody waits for them any more")
                if claim is not None and self.ledger.has_moved(ours, claim):
                    raise PositionMoved("written by another attempt")

            done = formed
            if self.target is not None and formed.rows.num_rows:
                done = write_rows(ours, self.dialect, self.target, formed, still_ours, budget.spend)
            if refused := done.rejections[len(formed.rejections) :]:
                raise Refused(refused)
            self.ledger.dead_letters.add(ours, letters, fence.epoch)
            if claim is not None:
                self.ledger.compare_and_set(ours, claim, counts)
        return counts

    def prepare_chunk(self, chunk: Chunk) -> None:
        """Convert the rows, and compute their digests."""
        chunk.prepared[_PREPARED] = self.target, self.formed(chunk)

    def formed(self, chunk: Chunk) -> Formed[pa.Table]:
        """The rows to send, with their digests."""
        found = prepare(chunk, self.target, self.keep_source)
        recipe = None if self.target is None else self.target.recipe(self.keep_source)
        if recipe is None or not found.rows.num_rows:
            return found
        return replace(found, digests=digests_of(chunk, found.rows, found.row_record, recipe))

    # -- batch commit --------------------------------------------------------------------------

    def pack(self, rows: pa.Table) -> list[Packet]:
        """Rows of a Spark transform, cast to the table's types; in an executor."""
        return pack(self, rows)

    def publish(self, batch: Batch, fence: Fence, claim: Claim | None) -> None:
        """Write the rows of a batch, with rejects and positions; in the driver."""
        publish(self, batch, fence, claim)


def pack(sink: SqlSink, rows: pa.Table) -> list[Packet]:
    """Cast rows to the table's types.

    Raises:
        Stopped: a value does not fit. After a transform a row belongs to no single record, so it
            cannot become a reject.
    """
    target = target_of(sink)
    cast, bad = cast_rows(rows.select(target.columns), target.fits)
    if bad:
        raise row_refused(next(iter(bad.values())), NO_SINGLE_RECORD)
    recipe = target.recipe(keep_source=False)
    digest = None if recipe is None else digest_sum(row_digests(cast, None, recipe))
    return [Packet(Staged(None, rows.num_rows, digest, str(recipe or "")), cast)]


def publish(sink: SqlSink, batch: Batch, fence: Fence, claim: Claim | None) -> None:
    """Write rows, rejects, history and every position in one transaction; in the driver.

    The compare-and-sets come last, in lock order, and require that NO position has moved since the
    claim was decided: Append for all, or nothing at all.

    Raises:
        PositionMoved: the ledger has moved; nothing was published.
    """
    target = target_of(sink)
    with sink.ledger.transaction(fence) as ours:
        if claim is not None and claim.query is not None:
            # First: a takeover locks in the same order.
            _move_query(ours, sink, claim.fence, claim.query)
        ours.defer("SAVEPOINT oncely_publish")
        try:
            _write(ours, sink.dialect, target, (one.content for one in batch.packets()))
            check_unaltered(sink.dialect, ours, target)
            ours.check_constraints()
        except (BadData, TableMismatch) as error:
            ours.execute("ROLLBACK TO SAVEPOINT oncely_publish")
            if claim is not None and sink.ledger.has_moved(ours, claim):
                raise PositionMoved("published meanwhile") from None
            check_unaltered(sink.dialect, ours, target)
            if isinstance(error, BadData):
                raise row_refused(error.reason, NO_SINGLE_RECORD) from None
            raise
        sink.ledger.dead_letters.add(ours, batch.rejects, fence.epoch)
        if claim is not None:
            sink.ledger.compare_and_set(ours, claim.data, batch.history)


def _write(
    ours: Connection, dialect: Dialect, target: BoundTable, packets: Iterable[pa.Table]
) -> None:
    """Write packets as they come; for an upsert all at once, because a key may be in several.

    Raises:
        WrongInput: two rows of a batch have the same key and no version determines the newer one.
    """
    writer = RowWriter(dialect, target)
    if not target.keys:
        writer.begin(ours, ordered=False)
        for rows in packets:
            writer.insert(ours, rows, constraints=False)
        writer.end(ours)
        return
    writer.begin(ours, ordered=True)
    for rows in packets:
        writer.collect(ours, rows)
    if target.version is None and writer.has_a_key_twice(ours):
        raise WrongInput(
            "transform.spark made two rows with the same sink.keys in one batch",
            way_out="aggregate them, or name a sink.version column that determines the newer one",
        )
    writer.upsert(ours)
    writer.end(ours)


def _move_query(ours: Connection, sink: SqlSink, fence: Fence, query: QueryBatch) -> None:
    """For a query with a checkpoint of its own: its batch takes effect once, also without data.

    The pipeline's row is locked, so of two drivers that publish the same batch the second one sees
    it as published.
    """
    row = sink.ledger.statements.registered(ours, lock=True)
    if row is None or (row.held_epoch, row.held_by) != (fence.epoch, fence.run):
        raise PositionMoved("a newer run holds the pipeline")
    published = row.query_batch if row.query_id == query.query_id else None
    if published is not None and published >= query.batch_id:
        raise PositionMoved(f"batch {query.batch_id} is published already")
    sink.ledger.statements.note_query(ours, query)


def target_of(sink: SqlSink) -> BoundTable:
    """The table to which the sink is bound."""
    if sink.target is None:
        raise InvariantViolation("a batch before bind")
    return sink.target
