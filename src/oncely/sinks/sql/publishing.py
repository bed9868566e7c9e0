"""Batch commit: the driver writes the rows of a Spark transform, and all positions, at once.

Tasks cast the rows to the table's types and compute their digests; the driver reads them from Spark
while it writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa

from oncely.clients.sql.connection import BadData, Connection, Dialect
from oncely.core.batch import Batch, Packet, Staged
from oncely.core.claim import Claim, Fence, PositionMoved, QueryBatch
from oncely.core.digest import digest_sum
from oncely.errors import InvariantViolation, TableMismatch, WrongInput
from oncely.sinks.base import NO_SINGLE_RECORD, row_refused
from oncely.sinks.row_digests import row_digests
from oncely.sinks.sql.cast import cast_rows
from oncely.sinks.sql.target import Target, check_unaltered
from oncely.sinks.sql.write import RowWriter

if TYPE_CHECKING:
    from oncely.sinks.sql.sink import SqlSink


def pack(sink: SqlSink, rows: pa.Table) -> list[Packet]:
    """Cast rows to the table's types.

    Raises:
        Stopped: a value does not fit. After a transform a row belongs to no single record, so it
            cannot become a reject.
    """
    target = _target(sink)
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
    target = _target(sink)
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


def _write(ours: Connection, dialect: Dialect, target: Target, packets: Iterable[pa.Table]) -> None:
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


def _target(sink: SqlSink) -> Target:
    if sink.target is None:
        raise InvariantViolation("a batch before bind")
    return sink.target
