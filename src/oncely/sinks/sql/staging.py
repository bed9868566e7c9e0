"""Batch commit: tasks stage rows in tables of their own, the driver publishes all at once.

A staging table is named by pipeline, epoch, batch and attempt, so two attempts never share
one, and what a failed attempt left is recognised by its name. Only tables that successful
attempts reported are published; the publishing transaction demands that their rows are all
there (an unlogged table is emptied by a crash of the server, a zombie's sweep would drop it).
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
from oncely.core.claim import Claim, Fence, PositionMoved, QueryBatch
from oncely.errors import (
    InvariantViolation,
    Stopped,
    TableMismatch,
    WrongInput,
)
from oncely.sinks.sql.cast import cast_rows
from oncely.sinks.sql.prepare import DELETED, ORDINAL
from oncely.sinks.sql.target import Target, check_unaltered
from oncely.sinks.sql.write import insert_select, quoted, staging_columns, upsert

if TYPE_CHECKING:
    from oncely.sinks.sql.sink import SqlSink


def staging_prefix(pipeline: str) -> str:
    """How every staging table of a pipeline begins (63 bytes are all that a name may have)."""
    return f"oncely_s_{hashlib.sha256(pipeline.encode()).hexdigest()[:12]}_"


def stage(
    sink: SqlSink, fence: Fence, batch_id: int, attempt: int, rows: Iterable[pa.Table]
) -> Staged:
    """Write a task's rows into a table of its own; in an executor.

    Raises:
        Stopped: the table refuses a value. After a transform no record answers for a row, so
            it can't become a reject.
    """
    target = _target(sink)
    table = sink.wanted.table.sibling(
        f"{staging_prefix(sink.pipeline)}{fence.epoch}_{batch_id}_{attempt}"
    )
    count = 0
    with sink.ledger.session(fence) as ours:
        for part in rows:
            if not part.num_rows:
                continue
            if not count:
                ours.execute(
                    sink.dialect.create_staging(
                        table, staging_columns(sink.dialect, target, ordered=True), temporary=False
                    )
                )
            _copy(ours, table, target, part, count)
            count += part.num_rows
    return Staged(table.name if count else None, count)


def _copy(ours: Connection, table: TableName, target: Target, part: pa.Table, first: int) -> None:
    cast, bad = cast_rows(part.select(target.columns), target.fits)
    if bad:
        raise _refused(next(iter(bad.values())))
    numbers = pa.array(range(first, first + part.num_rows), pa.int64())
    cast = cast.append_column(ORDINAL, numbers)
    cast = cast.append_column(DELETED, pa.array([0] * part.num_rows, pa.int64()))
    try:
        with transaction(ours):  # one sync to disk for the part, not one for each row
            ours.copy(table, cast)
    except BadData as error:
        raise _refused(error.reason) from None


def _refused(reason: str) -> Stopped:
    return Stopped(
        f"a row of the Spark transform can't be written: {reason}",
        way_out="cast or filter it in the transform; after a Spark transform no single record"
        " answers for a row, so it can't be set aside as a reject",
    )


def publish(sink: SqlSink, batch: Batch, fence: Fence, claim: Claim | None) -> None:
    """Move staged rows, rejects, history and every position in one transaction; in the driver.

    The compare-and-sets stand at the end, in lock order, and demand that NO position has moved
    since the claim was decided: Append for all, or nothing at all.

    Raises:
        PositionMoved: the ledger has moved; nothing was published.
        StagedRowsGone: nothing was published; the batch can be repeated.
    """
    target = _target(sink)
    with sink.ledger.transaction(fence) as ours:
        if claim is not None and claim.query is not None:
            _move_query(ours, sink, claim.fence, claim.query)  # first: a takeover locks so
        ours.execute("SAVEPOINT oncely_publish")
        try:
            moved = _publish_rows(ours, sink.dialect, target, batch.staged)
        except (BadData, TableMismatch) as error:
            ours.execute("ROLLBACK TO SAVEPOINT oncely_publish")
            if claim is not None and sink.ledger.has_moved(ours, claim):
                raise PositionMoved("published meanwhile") from None
            check_unaltered(sink.dialect, ours, target)
            if isinstance(error, BadData):
                raise _refused(error.reason) from None
            raise StagedRowsGone(f"a staging table is gone: {error.message}") from None
        if moved != batch.rows:
            raise StagedRowsGone(
                f"tasks staged {batch.rows} rows, {moved} were there to publish: the database"
                " restarted or the staging tables were removed; the batch is done again"
            )
        sink.ledger.dead_letters.add(ours, batch.rejects, fence.epoch)
        if claim is not None:
            sink.ledger.compare_and_set(ours, claim.data, batch.history)


def _publish_rows(
    ours: Connection, dialect: Dialect, target: Target, staged: Sequence[Staged]
) -> int:
    """Staged rows into the target; the staging tables go in the same transaction.

    Returns:
        How many staged rows there were.
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
    """One staging table into the target; how many rows it held.

    Raises:
        RowsDropped: they were all there, and the target has not taken them all.
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
    """All tables as one, because a key may stand in several of them.

    Raises:
        WrongInput: two rows of a batch have the same key and no version says which is newer.
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
                way_out="aggregate them, or name a sink.version column that says which is newer",
            )
    upsert(ours, dialect, target, union)
    return count


def _move_query(ours: Connection, sink: SqlSink, fence: Fence, query: QueryBatch) -> None:
    """For a query with a checkpoint of its own: its batch takes effect once, also without data.

    The pipeline's row is locked, so of two drivers that publish the same batch the second one
    finds it published.
    """
    row = sink.ledger.statements.registered(ours, lock=True)
    if row is None or (row.held_epoch, row.held_by) != (fence.epoch, fence.run):
        raise PositionMoved("a newer run holds the pipeline")
    published = row.query_batch if row.query_id == query.query_id else None
    if published is not None and published >= query.batch_id:
        raise PositionMoved(f"batch {query.batch_id} is published already")
    sink.ledger.statements.note_query(ours, query)


def sweep(sink: SqlSink, fence: Fence, keep_batches_from: int | None = None) -> int:
    """Drop staging tables that nobody will publish; the number dropped.

    Tables of older epochs always; of our own epoch those of batches before
    ``keep_batches_from``. A task of an older epoch that still writes into its table fails then,
    and could not have been published anyway.
    """
    prefix = staging_prefix(sink.pipeline)
    dropped = 0
    with sink.ledger.session(fence) as ours:
        for name in sink.dialect.tables_like(ours, sink.wanted.table, prefix):
            epoch, batch, _ = (int(part) for part in name.removeprefix(prefix).split("_"))
            ours_and_done = (
                epoch == fence.epoch and keep_batches_from is not None and batch < keep_batches_from
            )
            if epoch < fence.epoch or ours_and_done:
                # A paused attempt may hold its table for ever: a transaction of its own waits
                # for the lock a bounded time, and the next sweep finds the table again.
                left = quoted(sink.dialect, sink.wanted.table.sibling(name))
                with suppress(Contention), transaction(ours):
                    ours.execute(f"DROP TABLE IF EXISTS {left}")
                    dropped += 1
    return dropped


def _target(sink: SqlSink) -> Target:
    if sink.target is None:
        raise InvariantViolation("staging before bind")
    return sink.target
