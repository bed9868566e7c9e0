"""Rows of a chunk as tables and topics take them: with tombstones, their keys and their origin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Chunk, IntArray, Rejection
from oncely.errors import TableMismatch
from oncely.stores.sql.cast import cast_values
from oncely.stores.sql.connection import ColumnFit


def with_tombstones(
    chunk: Chunk, rows: pa.Table, keys: Sequence[str]
) -> tuple[pa.Table, IntArray, IntArray, dict[int, str]]:
    """Rows and tombstones in the order of their records; without keys the rows alone.

    Returns:
        The rows, the record of each, 1 for each tombstone and 0 for the others, and the reason for
            each row whose key cannot be cast.
    """
    row_record = chunk.row_record
    deleted = np.zeros(len(row_record), dtype=np.int64)
    if not keys or chunk.deletes is None or not len(chunk.delete_record):
        return rows, row_record, deleted, {}
    deletes, bad = keys_like_rows(chunk.deletes, rows.schema, keys)
    rows = pa.concat_tables([rows, deletes], promote_options="default")
    row_record = np.concatenate([row_record, chunk.delete_record])
    deleted = np.concatenate([deleted, np.ones(len(chunk.delete_record), dtype=np.int64)])
    order = np.argsort(row_record, kind="stable")
    now_at = np.argsort(order)[-len(chunk.delete_record) :]
    bad = {int(now_at[row]): reason for row, reason in bad.items()}
    return rows.take(pa.array(order)), row_record[order], deleted[order], bad


def keys_like_rows(
    deletes: pa.Table, rows: pa.Schema, keys: Sequence[str]
) -> tuple[pa.Table, dict[int, str]]:
    """Cast the keys of tombstones, which bypass the transform and may have other types than the
    rows' keys.

    Returns:
        The keys in the types of the rows, and the reason for each tombstone whose key cannot be
            cast.

    Raises:
        TableMismatch: the transform has renamed a key or changed its kind of value.
    """
    bad: dict[int, str] = {}
    try:
        fits = [ColumnFit(key, rows.field(key).type) for key in keys]
        values = [cast_values(deletes.column(fit.name), fit, bad) for fit in fits]
    except (KeyError, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise TableMismatch(
            f"a tombstone's key does not fit the transformed rows: {error}",
            way_out="let the transform pass the key columns through as they are",
        ) from None
    return pa.table(values, schema=pa.schema([rows.field(key) for key in keys])), bad


def with_source(chunk: Chunk) -> pa.Table:
    """Add the origin of each row."""
    partition = chunk.partition[chunk.row_record]
    topics = pa.array([tp.topic for tp in chunk.partitions], pa.string())
    numbers = pa.array([tp.partition for tp in chunk.partitions], pa.int32())
    return (
        chunk.rows.append_column("kafka_topic", topics.take(pa.array(partition)))
        .append_column("kafka_partition", numbers.take(pa.array(partition)))
        .append_column("kafka_offset", pa.array(chunk.offset[chunk.row_record]))
    )


def refuse_missing_keys(
    rows: pa.Table,
    deleted: IntArray,
    keys: Sequence[str],
    version: str | None,
    bad: dict[int, str],
) -> None:
    """Refuse null keys, which identify no row, and null versions, which cannot be compared."""
    for name in keys:
        for row in np.flatnonzero(pc.is_null(rows.column(name)).to_numpy()):
            bad.setdefault(int(row), f"sink.keys: column {name!r} is null")
    if version is not None:
        missing = pc.is_null(rows.column(version)).to_numpy() & (deleted == 0)
        for row in np.flatnonzero(missing):
            bad.setdefault(int(row), f"sink.version: column {version!r} is null")


def rejections_of(row_record: IntArray, bad: dict[int, str]) -> list[Rejection]:
    """One rejection for each record, for the first of its bad rows."""
    first: dict[int, str] = {}
    for row in sorted(bad):
        first.setdefault(int(row_record[row]), bad[row])
    return [Rejection(record, "write", reason) for record, reason in sorted(first.items())]
