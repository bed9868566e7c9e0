"""Conversion of a chunk to one table with the destination's types, before the transaction
begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Chunk, Formed, IntArray, Rejection
from oncely.core.digest import STORED, Kind, Recipe
from oncely.errors import TableMismatch
from oncely.kinds.base import DELETED, Form
from oncely.kinds.sql.table import Target
from oncely.stores.sql.cast import as_text, cast_rows, cast_values
from oncely.stores.sql.connection import ColumnFit, Connection
from oncely.stores.sql.postgres_digest import stored_texts

ORDINAL = "_oncely_ord"


def prepare(chunk: Chunk, target: Target | None, keep_source: bool) -> Formed[pa.Table]:
    """Merge rows and tombstones, cast them, and reject values that cannot be cast.

    Returns:
        Rows of the target's types; for an upsert in record order, tombstones among them (null
            except for the keys), with the columns ORDINAL and DELETED.
    """
    if target is None or not (chunk.rows.num_rows or len(chunk.delete_record)):
        return Formed(pa.table({}), np.array([], dtype=np.int64), chunk.rejections)
    rows = with_source(chunk) if keep_source else chunk.rows
    rows, row_record, deleted, bad_keys = with_tombstones(chunk, rows, target.keys)
    cast, bad = cast_rows(rows, target.fits)
    bad |= bad_keys
    if target.keys:
        refuse_missing_keys(cast, deleted, target.keys, target.version, bad)
        cast = cast.append_column(ORDINAL, pa.array(np.arange(len(row_record))))
        cast = cast.append_column(DELETED, pa.array(deleted))
    formed = Formed(cast, row_record, chunk.rejections)
    return formed.without(rejections_of(row_record, bad))


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


def form_of(
    target: Target, keep_source: bool, looking: Callable[[], AbstractContextManager[Connection]]
) -> Form:
    """What records become in a table.

    Args:
        target: the table.
        keep_source: rows contain their origin.
        looking: opens a session without a transaction.
    """
    every = target.recipe_of_rows(keep_source, Kind(STORED))
    others = replace(every, columns=tuple(one for one in every.columns if one[1].name == STORED))

    def stored(rows: pa.Table, recipe: Recipe) -> tuple[pa.Table, list[int]]:
        if all(kind.name != STORED for _, kind in recipe.columns):
            return rows, []
        with looking() as look:
            return as_stored(look, target, rows, recipe)

    return Form(
        of=partial(prepare, target=target, keep_source=keep_source),
        stored=stored,
        # The rows of an upsert are not those of a range: no ledger has a digest of them.
        recipe=every if target.keys else target.recipe(keep_source),
        others=others if others.columns else None,
        keys=target.keys,
        version=target.version,
        lacks_are_null=False,
    )


def as_stored(
    look: Connection, target: Target, rows: pa.Table, recipe: Recipe
) -> tuple[pa.Table, list[int]]:
    """Rows with the server's texts of the columns of kind :data:`STORED`.

    Args:
        look: without an open transaction.
        target: the table.
        rows: cast to its types.
        recipe: the columns of digests.

    Returns:
        The rows, and the numbers of those with a value that the server does not accept: it stays
            as it is sent.
    """
    unknown: list[int] = []
    types = dict(zip(target.columns, target.types, strict=True))
    for name in [name for name, kind in recipe.columns if kind.name == STORED]:
        sent = as_text(rows.column(name))
        texts = stored_texts(look, types[name], sent)
        unknown += [at for at, (a, b) in enumerate(zip(sent, texts, strict=True))
                    if b is None and a is not None]  # fmt: skip
        known = [a if b is None else b for a, b in zip(sent, texts, strict=True)]
        rows = rows.set_column(
            rows.schema.get_field_index(name), name, pa.array(known, pa.string())
        )
    return rows, unknown
