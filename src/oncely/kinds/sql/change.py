"""Repair and backfill: rows of records below the position are replaced, in one transaction.

What the records have produced is deleted, what they produce today is written, and the history gets
an amendment. The end state does not depend on what was there before, so repeating a rewrite changes
nothing: a crash or a lost answer is settled by doing it again.

Statement by statement, and why in this order (docs/decisions/0043):

1. The lock of rewrites: two of them would both see no row of a lost record, and both write it.
2. The dead letters are deleted. A replay that has locked one ends first, so that the next statement
   sees its row; a replay that comes later finds no dead letter.
3. The rows are deleted, and the new rows are sent.
4. The position is compared and locked to COMMIT: no run and no reset has taken it since the
   decision, and it is not before the end of the offsets. After a reset the records are read again,
   and their rows would be doubled.

Rows of records beyond the position are removed with the position's lock from the beginning, so that
no commit of the same offsets can come between.

Replays of dead letters are here, too. In a replay, valid records are moved into the
table, each exactly once. The reject itself is the token. One transaction locks some rejects, writes
the rows of the valid ones and deletes exactly these rejects; those that still fail get their newer
reason. A crash before COMMIT leaves every reject in place, a crash after it leaves none of them to
be replayed, and a COMMIT whose answer was lost is settled by reading the rejects again. Of two
concurrent replays, the second waits for the row locks and then sees no rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce

import pyarrow as pa

from oncely.core.batch import Formed, Reject, Rejection
from oncely.core.change import (
    LockedDeadLetters,
    ReplayResult,
    Reprocessed,
    Rewrite,
    Rewritten,
    add_up,
    changed,
    replayed,
)
from oncely.core.claim import NO_RECORDS, Amendment, Counts, Entry, Fence, PositionMoved
from oncely.core.digest import STORED, Kind, Recipe, digest_sum, row_digests
from oncely.core.ranges import OffsetRange, TopicPartition, halved
from oncely.errors import InvariantViolation, TableMismatch, WrongInput
from oncely.kinds.rows import LETTERS_STAY, row_refused
from oncely.kinds.sql.form import as_stored
from oncely.kinds.sql.sink import SqlSink
from oncely.kinds.sql.table import BoundTable
from oncely.kinds.sql.write import write_rows
from oncely.kinds.sql_ledger import Refused, session
from oncely.kinds.tables import SOURCE_COLUMNS
from oncely.stores.sql.connection import (
    BadData,
    Connection,
    Params,
    RowsDropped,
    RowsKept,
    brief_session,
    transaction,
)
from oncely.stores.sql.dead_letters import FIRST, RejectKey, Removed
from oncely.stores.sql.statements import within

_TOPIC, _PARTITION, _OFFSET = SOURCE_COLUMNS.names


@dataclass(frozen=True)
class SqlRewrites:
    """Rewrites rows that contain their record's offset, and rows of an upsert.

    Attributes:
        sink: bound to its table.
        unfit: the error of a table that accepts no row of the pipeline now; the sink is not bound.
    """

    sink: SqlSink
    unfit: TableMismatch | None = None

    def check(self) -> None:
        """Refuse a table in which a deletion would not do what it says.

        Raises:
            WrongInput: rows may be hidden from this user, or others would be deleted with them.
        """
        dialect, table = self.sink.dialect, self.sink.wanted.table
        with session(self.sink.ledger) as look:
            if look is None:
                return
            if dialect.barred(look, table, deletes=True):
                raise WrongInput(
                    f"row-level security of {table} may hide rows from the role in"
                    " sink.url: a row that is not deleted would be there twice",
                    key="sink.table",
                    way_out="use a role with BYPASSRLS",
                )
            others = dialect.cascades(look, table)
        if others:
            raise WrongInput(
                f"rows of {', '.join(others)} refer to {table}, and would be deleted"
                " or changed with its rows (ON DELETE)",
                key="sink.table",
                way_out="drop the foreign key for the repair; without an action, only records with"
                " rows that others refer to are left as they are",
            )

    def entries(self) -> dict[TopicPartition, Entry]:
        """The present entries of the ledger."""
        return self.sink.ledger.entries()

    def committed(self, partition: TopicPartition, within: OffsetRange) -> list[OffsetRange]:
        """The present history, where it overlaps a range."""
        return self.sink.ledger.committed(partition, within)

    def present(self, partition: TopicPartition, offsets: Sequence[OffsetRange]) -> tuple[int, int]:
        """The number of rows and of dead letters of some offsets."""
        condition, params = self._condition(partition, offsets)
        with self.sink.ledger.looking() as look:
            (facts,) = self.sink.dialect.facts(look, [self.sink.wanted.table])
            rows = f"SELECT COUNT(*) FROM {facts.relation.rows} WHERE {condition}"
            letters = self.sink.ledger.dead_letters.count_within(look, partition, offsets)
            there = look.query(rows, params)[0][0] if self.sink.keep_source else 0
        return int(there), letters

    def rewrite(self, work: Rewrite) -> Rewritten:
        """Replace what the offsets have produced, in one transaction.

        A row that the table refuses today becomes a dead letter. But a repair leaves what a record
        has produced as it is, if the ledger does not count it as a dead letter: it would remove
        what it can't put back. It leaves records of which the table refuses a statement, too.
        """
        if work.kind == "backfill":
            return self._rewrite(work)
        return _apart(
            work.partition, work.offsets, lambda offsets: self._rewrite(work.only(offsets))
        )

    def _rewrite(self, work: Rewrite) -> Rewritten:
        if self.unfit and (records := {*work.chunk.row_record, *work.chunk.delete_record}):
            return self._leaving(work, {int(r): self.unfit.message for r in records})
        formed = self.sink.formed(work.chunk)
        letters = work.chunk.letters(formed.rejections)
        while True:
            sent = None if work.kind == "backfill" else self._sent(work, formed)
            try:
                return self._rewrite_once(work, formed, letters, sent)
            except Refused as refused:
                if rows := self._committed_rows(work, formed, refused):
                    return self._leaving(work, rows)
                formed = formed.without(refused.rejections)
                letters += work.chunk.letters(refused.rejections)

    def _leaving(self, work: Rewrite, refused: Mapping[int, str]) -> Rewritten:
        """Rewrite all but some refused records."""
        offset = work.chunk.offset
        reasons = {(work.partition, int(offset[one])): why for one, why in refused.items()}
        others = work.without([at for _, at in reasons])
        done = self._rewrite(others) if others else Rewritten(0, 0, NO_RECORDS)
        return done._replace(refused={**reasons, **done.refused})

    def _committed_rows(
        self, work: Rewrite, formed: Formed[pa.Table], refused: Refused
    ) -> dict[int, str]:
        """Those of the refused records that the ledger does not count as dead letters, with the
        reason: their ranges would have more than it counts. A backfill changes its counts."""
        if work.kind == "backfill":
            return {}
        ledger, tp = self.sink.ledger, work.partition
        at = {one.record: int(work.chunk.offset[one.record])
              for one in (*refused.rejections, *formed.rejections)}  # fmt: skip
        found: dict[int, str] = {}
        with ledger.looking() as look:
            ranges = ledger.history.containing(
                look, tp, [at[one.record] for one in refused.rejections]
            )
            for range_ in set(ranges.values()):
                counted = ledger.history.content(look, tp, range_) or NO_RECORDS
                others = range_.minus(work.offsets)
                there = ledger.dead_letters.count_within(look, tp, others) if others else 0
                if counted.rejects < there + sum(offset in range_ for offset in at.values()):
                    found |= {r.record: r.reason for r in refused.rejections
                              if at[r.record] in range_}  # fmt: skip
        return found

    def _sent(self, work: Rewrite, formed: Formed[pa.Table]) -> tuple[Recipe, int] | None:
        """The recipe of all columns, and the digest of rows that the table returns as they were
        sent; None if it is not known, or later records may have replaced them."""
        sink = self.sink
        if sink.target is None or sink.target.keys or not formed.rows.num_rows:
            return None
        recipe = sink.target.recipe_of_rows(sink.keep_source, Kind(STORED))
        with sink.ledger.looking() as look:
            rows, unknown = as_stored(look, sink.target, formed.rows, recipe)
        if unknown:
            return None
        offsets = work.chunk.offset[formed.row_record] if recipe.offset else None
        return recipe, digest_sum(row_digests(rows, offsets, recipe))

    def _refuse_changed(
        self, ours: Connection, work: Rewrite, sent: tuple[Recipe, int] | None
    ) -> None:
        """Refuse a repair after which the table has other values than it was sent: the next audit
        would find the same damage.

        Raises:
            BadData: nothing is repaired.
        """
        if sent is None or not self.sink.keep_source:
            return
        recipe, digest = sent
        where = self._condition(work.partition, work.offsets)
        there = self.sink.dialect.digest(ours, self._target.table, recipe, _OFFSET, where)
        if there not in (None, digest):
            raise BadData(
                f"{self._target.table} then has other values than it was sent: something in the"
                " database changes them, such as a trigger BEFORE INSERT"
            )

    def _rewrite_once(
        self,
        work: Rewrite,
        formed: Formed[pa.Table],
        letters: Sequence[Reject],
        sent: tuple[Recipe, int] | None,
    ) -> Rewritten:
        ledger, tp = self.sink.ledger, work.partition
        counts = formed.counts(work.chunk).get(tp, NO_RECORDS)
        with ledger.transaction(self._fence(work.expected)) as ours:
            self.sink.dialect.lock_for_rewrite(ours, self.sink.pipeline)
            removed = Removed(ledger.tables, keep=work.kind == "repair")
            rejects = ledger.dead_letters.remove_within(ours, tp, work.offsets, removed)
            change = self._change(ours, work, counts, rejects)
            rows = self._remove_rows(ours, tp, work.offsets, removed)
            done = self._write(ours, work, formed)
            if refused := done.rejections[len(formed.rejections) :]:
                raise Refused(refused)
            self._refuse_changed(ours, work, sent)
            ledger.dead_letters.add(ours, letters, work.expected.epoch)
            self._amend(ours, work, change)
            ledger.keep(ours, tp, work.expected, work.upto)
        return Rewritten(rows, rejects, counts)

    def remove_beyond(
        self, partition: TopicPartition, offsets: Sequence[OffsetRange], expected: Entry
    ) -> Rewritten:
        """Delete rows and dead letters of records that are not committed, in one transaction.

        Raises:
            PositionMoved: nothing was deleted; the position is no longer that of ``expected``.
        """
        return _apart(
            partition, offsets, lambda some: self._remove_beyond(partition, some, expected)
        )

    def _remove_beyond(
        self, partition: TopicPartition, offsets: Sequence[OffsetRange], expected: Entry
    ) -> Rewritten:
        ledger = self.sink.ledger
        with ledger.transaction(self._fence(expected)) as ours:
            self.sink.dialect.lock_for_rewrite(ours, self.sink.pipeline)
            ledger.keep(ours, partition, expected, expected.position)
            now = ledger.statements.entries(ours)[partition].position
            if now > offsets[0].start:
                raise PositionMoved(str(partition))
            removed = Removed(ledger.tables)
            rejects = ledger.dead_letters.remove_within(ours, partition, offsets, removed)
            rows = self._remove_rows(ours, partition, offsets, removed)
        return Rewritten(rows, rejects, NO_RECORDS)

    def _amend(self, ours: Connection, work: Rewrite, change: Counts) -> None:
        """Amend each committed range that is rewritten; a repair changes none of its counts."""
        history, tp = self.sink.ledger.history, work.partition
        ranges: dict[OffsetRange, list[OffsetRange]] = {}
        containing = history.containing(ours, tp, [one.start for one in work.offsets])
        for one in work.offsets:
            if one.start in containing:
                ranges.setdefault(containing[one.start], []).append(one)
        amendments = [
            Amendment(tp, OffsetRange(own[0].start, own[-1].end), work.kind, change)
            for own in ranges.values()
        ]
        history.amend(ours, amendments, work.expected.epoch)

    def _change(self, ours: Connection, work: Rewrite, counts: Counts, rejects: int) -> Counts:
        """What a rewrite changes in the history; the rows are not deleted yet."""
        if work.kind == "repair":
            return NO_RECORDS
        old = self.sink.ledger.history.content(ours, work.partition, work.whole)
        if old is None and self._target.keys:
            return NO_RECORDS  # rows of an upsert are replaced by later records
        return changed(counts, old or self._there(ours, work, counts, rejects))

    def _there(self, ours: Connection, work: Rewrite, counts: Counts, rejects: int) -> Counts:
        """What the table contains of a part of a committed range."""
        dialect, target = self.sink.dialect, self._target
        recipe = target.recipe(self.sink.keep_source)
        condition, params = self._condition(work.partition, work.offsets)
        ((rows, offsets),) = ours.query(
            f"SELECT COUNT(*), COUNT(DISTINCT {dialect.quote(_OFFSET)})"
            f" FROM {target.relation.rows} WHERE {condition}",
            params,
        )
        digest = None
        if recipe is not None and rows:
            digest = dialect.digest(ours, target.table, recipe, _OFFSET, (condition, params))
        filtered = max(0, counts.records - offsets - rejects)
        known = "" if digest is None else str(recipe)
        return Counts(counts.records, rows, rejects, filtered, digest, known)

    def _write(self, ours: Connection, work: Rewrite, formed: Formed[pa.Table]) -> Formed[pa.Table]:
        def still_ours() -> None:
            now = self.sink.ledger.statements.entries(ours).get(work.partition)
            if now is None or (now.epoch, now.run) != (work.expected.epoch, work.expected.run):
                raise PositionMoved(str(work.partition))

        if not formed.rows.num_rows:
            return formed
        return write_rows(ours, self.sink.dialect, self._target, formed, still_ours, lambda _: None)

    def _remove_rows(
        self,
        ours: Connection,
        partition: TopicPartition,
        offsets: Sequence[OffsetRange],
        removed: Removed,
    ) -> int:
        """Remove the rows of these offsets, and return their number; none of an upsert whose rows
        do not contain them: they are replaced.

        Raises:
            WrongInput: another pipeline has committed records of these offsets, too. Its rows and
                ranges take effect together: whoever sees the rows sees the ranges afterwards.
        """
        if not self.sink.keep_source:
            return 0
        where = self._condition(partition, offsets)
        table = self.sink.wanted.table
        rows = removed.take(ours, "row", table, SOURCE_COLUMNS.names, where)
        for name, tp, other in self.sink.ledger.history.claims(ours) if rows else ():
            if tp == partition and any(one.overlaps(other) for one in offsets):
                raise WrongInput(
                    f"{tp}: pipeline {name!r} has committed records of the same offsets into"
                    f" {table}: its rows can't be told from those of this pipeline",
                    way_out="leave these offsets out; if that pipeline has no rows there any more,"
                    " delete its ranges from oncely_ranges",
                )
        return rows

    def _condition(
        self, partition: TopicPartition, offsets: Sequence[OffsetRange]
    ) -> tuple[str, Params]:
        """The condition that a row is of these offsets, and its parameters."""
        q = self.sink.dialect.quote
        condition, bounds = within(q(_OFFSET), offsets)
        whole = f"{q(_TOPIC)} = %s AND {q(_PARTITION)} = %s AND {condition}"
        return whole, (*partition, *bounds)

    def _fence(self, expected: Entry) -> Fence:
        """The fence of the run that holds the position: a takeover ends its sessions, ours too."""
        return Fence(self.sink.pipeline, expected.epoch, expected.run)

    @property
    def _target(self) -> BoundTable:
        if self.sink.target is None:
            raise InvariantViolation("rewrite before bind")
        return self.sink.target


def _apart(
    partition: TopicPartition,
    offsets: Sequence[OffsetRange],
    repair: Callable[[Sequence[OffsetRange]], Rewritten],
) -> Rewritten:
    """Repair offsets apart from those for which the table refuses a statement: a foreign key may
    refer to one of their rows, for example."""
    try:
        return repair(offsets)
    except (BadData, RowsDropped, RowsKept) as error:
        halves = halved(offsets)
        if len(halves) == 1:
            refused = {(partition, offsets[0].start): error.message}
            return Rewritten(0, 0, NO_RECORDS, refused)
    return reduce(add_up, (_apart(partition, half, repair) for half in halves))


@dataclass
class SqlReplay:
    """A replay of all rejects, each processed once.

    Attributes:
        sink: bound to its table.
        after: the last reject of the previous transaction.
    """

    sink: SqlSink
    after: RejectKey = FIRST

    @contextmanager
    def portion(self, limit: int) -> Iterator[LockedDeadLetters | None]:
        """Rejects that follow ``after``, locked; the end of the context is the COMMIT."""
        ledger = self.sink.ledger
        with (
            brief_session(self.sink.dialect, "replay", self.sink.connect) as ours,
            transaction(ours),
        ):
            registered = ledger.statements.registered(ours)
            rejects = ledger.dead_letters.read(ours, self.after, limit, lock=True)
            if registered is None or not rejects:
                yield None
                return
            epoch = registered.epoch

            def commit(judged: Reprocessed | None) -> ReplayResult:
                failed = self._write(ours, judged, epoch) if judged else {}
                again = [judged.again(why) for why in failed.values()] if judged else []
                self._settle(ours, rejects, failed, again, epoch)
                return ReplayResult(len(rejects) - len(failed), len(failed))

            yield LockedDeadLetters(rejects, commit)
        self.after = (*rejects[-1].partition, rejects[-1].offset)

    def _write(self, ours: Connection, judged: Reprocessed, epoch: int) -> dict[int, Rejection]:
        """Write the valid rows, and amend the history; returns the rejections by record."""
        sink = self.sink
        if sink.target is None:
            raise InvariantViolation("replay before bind")
        formed = sink.formed(judged.chunk)
        if not judged.traceable:
            _none_refused(formed.rejections[len(judged.chunk.rejections) :])
        if formed.rows.num_rows:
            formed = write_rows(
                ours,
                sink.dialect,
                sink.target,
                formed,
                # The rejects are locked: no other process can have written these rows.
                still_ours=lambda: None,
                refused=(lambda _: None) if judged.traceable else _none_refused,
            )
        failed = {one.record: one for one in formed.rejections}
        self._amend(ours, judged, formed, failed, epoch)
        return failed

    def _amend(
        self,
        ours: Connection,
        judged: Reprocessed,
        formed: Formed[pa.Table],
        failed: Mapping[int, Rejection],
        epoch: int,
    ) -> None:
        chunk, history = judged.chunk, self.sink.ledger.history
        record = judged.own(formed.row_record, failed)
        containing = partial(history.containing, ours)
        changes = replayed(chunk, record, failed, formed.digests, containing)
        history.amend(ours, changes, epoch)

    def _settle(
        self,
        ours: Connection,
        rejects: Sequence[Reject],
        failed: Mapping[int, Rejection],
        again: Sequence[Reject],
        epoch: int,
    ) -> None:
        """Delete the replayed rejects; store the newer reasons of the rest."""
        letters = self.sink.ledger.dead_letters
        for index, one in enumerate(rejects):
            if index not in failed and not letters.remove(ours, one.partition, one.offset):
                raise InvariantViolation(f"{one.partition}: reject {one.offset} was locked by us")
        letters.change(ours, again, epoch)


def _none_refused(refused: Sequence[Rejection]) -> None:
    if refused:
        raise row_refused(refused[0].reason, LETTERS_STAY)
