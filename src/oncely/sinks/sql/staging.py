"""Batch commit: tasks stage rows in tables of their own, the driver publishes all at once.

A staging table is named by pipeline, epoch, batch and attempt, so two attempts never share one, and
tables of failed attempts are recognised by their names. Only tables that successful attempts
reported are published; the publishing transaction checks that all of their rows exist (an unlogged
table is emptied by a crash of the server, a zombie's sweep could drop it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from oncely.clients.sql.connection import (
    BadData,
    Connection,
    Contention,
    Dialect,
    RowsDropped,
    TableName,
)
from oncely.clients.sql.session import transaction
from oncely.core.batch import Batch, Staged, StagedRowsGone
from oncely.core.claim import NO_RECORDS, Claim, Counts, Fence, PositionMoved, QueryBatch
from oncely.core.digest import digest_sum, row_digests
from oncely.errors import InvariantViolation, TableMismatch, WrongInput
from oncely.sinks.base import NO_SINGLE_RECORD, row_refused
from oncely.sinks.sql.cast import cast_rows
from oncely.sinks.sql.prepare import DELETED, ORDINAL
from oncely.sinks.sql.target import Target, check_unaltered
from oncely.sinks.sql.write import insert_select, quoted, staging_columns, upsert

if TYPE_CHECKING:
    from oncely.sinks.sql.sink import SqlSink


def staging_prefix(pipeline: str) -> str:
    """The prefix of every staging table of a pipeline (a name has 63 bytes at most)."""
    return f"oncely_s_{hashlib.sha256(pipeline.encode()).hexdigest()[:12]}_"


def stage(
    sink: SqlSink, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]
) -> Staged:
    """Write a task's rows into a table of its own; in an executor.

    Raises:
        Stopped: the table refuses a value. After a transform a row belongs to no single record, so
            it cannot become a reject.
    """
    target = _target(sink)
    table = sink.wanted.table.sibling(
        f"{staging_prefix(sink.pipeline)}{fence.epoch}_{batch_id}_{attempt}"
    )
    staged = NO_RECORDS
    with sink.ledger.session(fence) as ours:
        for part in rows:
            if not part.num_rows:
                continue
            if not staged.rows:
                ours.execute(
                    sink.dialect.create_staging(
                        table, staging_columns(sink.dialect, target, ordered=True), temporary=False
                    )
                )
            staged += _copy(ours, table, target, part, staged.rows)
    if not staged.rows:
        return Staged(None, 0)
    return Staged(table.name, staged.rows, staged.digest, staged.recipe)


def _copy(ours: Connection, table: TableName, target: Target, part: pa.Table, first: int) -> Counts:
    """Append a part; returns the number of its rows and their digest."""
    cast, bad = cast_rows(part.select(target.columns), target.fits)
    if bad:
        raise row_refused(next(iter(bad.values())), NO_SINGLE_RECORD)
    recipe = target.recipe(keep_source=False)
    digest = None if recipe is None else digest_sum(row_digests(cast, None, recipe))
    numbers = pa.array(range(first, first + part.num_rows), pa.int64())
    cast = cast.append_column(ORDINAL, numbers)
    cast = cast.append_column(DELETED, pa.array([0] * part.num_rows, pa.int64()))
    try:
        with transaction(ours):  # one sync to disk for the part, not for each row
            ours.copy(table, cast)
    except BadData as error:
        raise row_refused(error.reason, NO_SINGLE_RECORD) from None
    return Counts(0, part.num_rows, 0, 0, digest, str(recipe or ""))


def publish(sink: SqlSink, batch: Batch, fence: Fence, claim: Claim | None) -> None:
    """Move staged rows, rejects, history and every position in one transaction; in the driver.

    The compare-and-sets come last, in lock order, and require that NO position has moved since the
    claim was decided: Append for all, or nothing at all.

    Raises:
        PositionMoved: the ledger has moved; nothing was published.
        StagedRowsGone: nothing was published; the batch can be repeated.
    """
    target = _target(sink)
    with sink.ledger.transaction(fence) as ours:
        if claim is not None and claim.query is not None:
            _move_query(
                ours, sink, claim.fence, claim.query
            )  # first: a takeover locks in the same order
        ours.execute("SAVEPOINT oncely_publish")
        try:
            moved = _publish_rows(ours, sink.dialect, target, batch.staged)
        except (BadData, TableMismatch) as error:
            ours.execute("ROLLBACK TO SAVEPOINT oncely_publish")
            if claim is not None and sink.ledger.has_moved(ours, claim):
                raise PositionMoved("published meanwhile") from None
            check_unaltered(sink.dialect, ours, target)
            if isinstance(error, BadData):
                raise row_refused(error.reason, NO_SINGLE_RECORD) from None
            raise StagedRowsGone(f"a staging table is gone: {error.message}") from None
        if moved != batch.rows:
            raise StagedRowsGone(
                f"tasks staged {batch.rows} rows, {moved} were there to publish: the database"
                " restarted or the staging tables were removed; the batch is repeated"
            )
        sink.ledger.dead_letters.add(ours, batch.rejects, fence.epoch)
        if claim is not None:
            sink.ledger.compare_and_set(ours, claim.data, batch.history)


def _publish_rows(
    ours: Connection, dialect: Dialect, target: Target, staged: Sequence[Staged]
) -> int:
    """Move staged rows into the target; the staging tables are dropped in the same transaction.

    Returns:
        The number of staged rows.
    """
    rows = {
        quoted(dialect, target.table.sibling(one.name)): one.rows
        for one in staged
        if one.name is not None
    }
    if target.keys:
        count = _publish_upsert(ours, dialect, target, list(rows))
    else:
        count = sum(_publish_append(ours, dialect, target, *one) for one in rows.items())
    check_unaltered(dialect, ours, target)
    ours.check_constraints()
    for name in rows:
        ours.execute(f"DROP TABLE {name}")
    return count


def _publish_append(
    ours: Connection, dialect: Dialect, target: Target, name: str, expected: int
) -> int:
    """Move one staging table into the target, and return its number of rows.

    Raises:
        RowsDropped: all rows were staged, but the target has not stored all.
    """
    taken = ours.execute(insert_select(dialect, target, name))
    if taken == expected:
        return taken
    held = int(ours.query(f"SELECT COUNT(*) FROM {name}")[0][0])
    if held != taken:
        raise RowsDropped(target.table, held, taken)
    return held


def _publish_upsert(
    ours: Connection, dialect: Dialect, target: Target, names: Sequence[str]
) -> int:
    """Move all tables at once, because a key may be in several of them.

    Raises:
        WrongInput: two rows of a batch have the same key and no version determines the newer one.
    """
    if not names:
        return 0
    union = "(" + " UNION ALL ".join(f"SELECT * FROM {name}" for name in names) + ") u"
    keys = ", ".join(dialect.quote(key) for key in target.keys)
    count = int(ours.query(f"SELECT COUNT(*) FROM {union}")[0][0])
    if target.version is None:
        twice = ours.query(f"SELECT 1 FROM {union} GROUP BY {keys} HAVING COUNT(*) > 1 LIMIT 1")
        if twice:
            raise WrongInput(
                "transform.spark made two rows with the same sink.keys in one batch",
                way_out="aggregate them, or name a sink.version column that determines the newer "
                "one",
            )
    upsert(ours, dialect, target, union)
    return count


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


def sweep(sink: SqlSink, fence: Fence, keep_batches_from: int | None = None) -> int:
    """Drop staging tables that will not be published, and return their number.

    Tables of older epochs are always dropped, and of our own epoch those of batches before
    ``keep_batches_from``. A task of an older epoch that still writes into its table fails then, and
    could not have been published anyway.
    """
    prefix = staging_prefix(sink.pipeline)
    dropped = 0
    with sink.ledger.session(fence) as ours:
        for name in sink.dialect.tables_like(ours, sink.wanted.table.sibling(prefix)):
            epoch, batch, _ = (int(part) for part in name.removeprefix(prefix).split("_"))
            ours_and_done = (
                epoch == fence.epoch and keep_batches_from is not None and batch < keep_batches_from
            )
            if epoch < fence.epoch or ours_and_done:
                # A paused attempt may hold its table forever: a separate transaction waits for the
                # lock a bounded time, and the next sweep tries the table again.
                left = quoted(sink.dialect, sink.wanted.table.sibling(name))
                with suppress(Contention), transaction(ours):
                    ours.execute(f"DROP TABLE IF EXISTS {left}")
                    dropped += 1
    return dropped


def _target(sink: SqlSink) -> Target:
    if sink.target is None:
        raise InvariantViolation("staging before bind")
    return sink.target
