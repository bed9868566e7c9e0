"""A chunk's rows as the table takes them, in one table, before the transaction begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.clients.sql.connection import ColumnFit
from oncely.core.batch import Chunk, IntArray, Rejection
from oncely.errors import TableMismatch
from oncely.sinks.sql.cast import cast_rows, cast_values
from oncely.sinks.sql.target import Target

ORDINAL = "_oncely_ord"
DELETED = "_oncely_deleted"


@dataclass(frozen=True)
class Prepared:
    """Rows to send, and what is rejected already.

    Attributes:
        rows: cast to the target's types; for an upsert in record order, tombstones among them
            (null but for the keys), with the columns ORDINAL and DELETED.
        row_record: per row, its record.
        rejections: all rejections so far.
    """

    rows: pa.Table
    row_record: IntArray
    rejections: tuple[Rejection, ...]

    def without(self, rejections: list[Rejection]) -> Prepared:
        """All rows of rejected records taken out: a record is a reject or rows, never both."""
        gone = np.array([r.record for r in rejections], dtype=np.int64)
        keep = ~np.isin(self.row_record, gone)
        return Prepared(
            self.rows.filter(pa.array(keep)),
            self.row_record[keep],
            (*self.rejections, *rejections),
        )


def prepare(chunk: Chunk, target: Target | None, keep_source: bool) -> Prepared:
    """Merge rows and tombstones, cast them, and reject what no cast can save."""
    if target is None or not (chunk.rows.num_rows or len(chunk.delete_record)):
        return Prepared(pa.table({}), np.array([], dtype=np.int64), chunk.rejections)
    rows, row_record = chunk.rows, chunk.row_record
    if keep_source:
        rows = _with_source(chunk)
    deleted = np.zeros(len(row_record), dtype=np.int64)
    bad_keys: dict[int, str] = {}
    if target.keys and chunk.deletes is not None and len(chunk.delete_record):
        deletes, bad_keys = _keys_like_rows(chunk.deletes, rows.schema, target)
        rows = pa.concat_tables([rows, deletes], promote_options="default")
        row_record = np.concatenate([row_record, chunk.delete_record])
        deleted = np.concatenate([deleted, np.ones(len(chunk.delete_record), dtype=np.int64)])
        order = np.argsort(row_record, kind="stable")
        rows, row_record, deleted = rows.take(pa.array(order)), row_record[order], deleted[order]
        now_at = np.argsort(order)[-len(chunk.delete_record) :]
        bad_keys = {int(now_at[row]): reason for row, reason in bad_keys.items()}
    cast, bad = cast_rows(rows, target.fits)
    bad |= bad_keys
    if target.keys:
        _refuse_missing_keys(cast, deleted, target, bad)
        cast = cast.append_column(ORDINAL, pa.array(np.arange(len(row_record))))
        cast = cast.append_column(DELETED, pa.array(deleted))
    prepared = Prepared(cast, row_record, chunk.rejections)
    return prepared.without(_rejections(row_record, bad)) if bad else prepared


def _keys_like_rows(
    deletes: pa.Table, rows: pa.Schema, target: Target
) -> tuple[pa.Table, dict[int, str]]:
    """Tombstones bypass the transform, so their keys may have other types than the rows' keys.

    Returns:
        The keys in the types of the rows, and for each tombstone whose key can't be cast the
        reason.

    Raises:
        TableMismatch: the transform has renamed a key or made another kind of value of it.
    """
    bad: dict[int, str] = {}
    try:
        fits = [ColumnFit(key, rows.field(key).type) for key in target.keys]
        keys = [cast_values(deletes.column(fit.name), fit, bad) for fit in fits]
    except (KeyError, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise TableMismatch(
            f"sink.keys: a tombstone's key does not fit the transformed rows: {error}",
            way_out="let the transform pass the key columns through as they are",
        ) from None
    return pa.table(keys, schema=pa.schema([rows.field(key) for key in target.keys])), bad


def _with_source(chunk: Chunk) -> pa.Table:
    """Add where each row came from."""
    partition = chunk.partition[chunk.row_record]
    topics = pa.array([tp.topic for tp in chunk.partitions], pa.string())
    numbers = pa.array([tp.partition for tp in chunk.partitions], pa.int32())
    return (
        chunk.rows.append_column("kafka_topic", topics.take(pa.array(partition)))
        .append_column("kafka_partition", numbers.take(pa.array(partition)))
        .append_column("kafka_offset", pa.array(chunk.offset[chunk.row_record]))
    )


def _refuse_missing_keys(
    rows: pa.Table, deleted: IntArray, target: Target, bad: dict[int, str]
) -> None:
    """A null key names no row, and a null version can't be compared: neither may be guessed."""
    for name in target.keys:
        for row in np.flatnonzero(pc.is_null(rows.column(name)).to_numpy()):
            bad.setdefault(int(row), f"sink.keys: column {name!r} is null")
    if target.version is not None:
        missing = pc.is_null(rows.column(target.version)).to_numpy() & (deleted == 0)
        for row in np.flatnonzero(missing):
            bad.setdefault(int(row), f"sink.version: column {target.version!r} is null")


def _rejections(row_record: IntArray, bad: dict[int, str]) -> list[Rejection]:
    """One rejection a record, for the first of its bad rows."""
    first: dict[int, str] = {}
    for row in sorted(bad):
        first.setdefault(int(row_record[row]), bad[row])
    return [Rejection(record, "write", reason) for record, reason in sorted(first.items())]
