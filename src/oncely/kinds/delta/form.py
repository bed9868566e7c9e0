"""A task's rows for a Delta table: Parquet files that are not committed yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Chunk, Formed, IntArray, Rejection, Staged
from oncely.core.digest import Digests, Recipe, digest_sum, digest_sums, kind_of
from oncely.core.ranges import TopicPartition
from oncely.extras import polars as pl
from oncely.kinds.conform import conform
from oncely.kinds.data_file import FileFormat
from oncely.kinds.partitions import NO_VALUE, is_cut, parse_partition_by
from oncely.kinds.rows import DELETED, NO_SINGLE_RECORD, Form, digests_of, row_digests, row_refused
from oncely.kinds.staged_files import FilesTask
from oncely.kinds.tables import (
    SOURCE_COLUMNS,
    refuse_missing_keys,
    rejections_of,
    rows_with_source,
    with_tombstones,
)

TOPIC, PARTITION, OFFSET, CLEARED = (
    f"_oncely_{name}" for name in ("topic", "partition", "offset", "cleared")
)
ORDER = pa.schema(
    [(TOPIC, pa.string()), (PARTITION, pa.int32()), (OFFSET, pa.int64()), (DELETED, pa.bool_())]
)
"""Additional columns of staged upserts: the driver sorts by them and merges."""

SOURCE_NAMES = frozenset(SOURCE_COLUMNS.names)
_NULL = f"an empty text, or {NO_VALUE}, is no partition: readers take it for no value"
_LONG = "the text is too long for the name of a partition's directory, from which readers take it"


@dataclass(frozen=True)
class DeltaFormat:
    """The rows of a table.

    Attributes:
        schema: their columns, of types that files support.
        partition_by: the partition columns.
        keys, version: the columns of an upsert; no keys in append mode.
        target_bytes: the target size of a file, in bytes.
        keep_source: add topic, partition and offset to each row; they are in the schema.
    """

    schema: pa.Schema
    partition_by: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    version: str | None = None
    target_bytes: int = 64 << 20
    keep_source: bool = False

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of digests; None for an upsert, which replaces rows of earlier ranges."""
        return None if self.keys else self.recipe_of_rows

    @property
    def recipe_of_rows(self) -> Recipe:
        """The recipe of single rows."""
        own = [one for one in self.schema if not self.keep_source or one.name not in SOURCE_NAMES]
        return Recipe.of({one.name: kind_of(one.type) for one in own}, offset=self.keep_source)

    def digests(self, chunk: Chunk, rows: pa.Table, record: IntArray) -> Digests | None:
        """The digests of rows that have the table's types; ``record`` is the record of each."""
        return None if self.recipe is None else digests_of(chunk, rows, record, self.recipe)

    @property
    def staged(self) -> FileFormat:
        """The files that tasks write: those of the table, or those to be merged into it."""
        columns = () if self.keys else parse_partition_by(self.partition_by)
        return FileFormat("parquet", columns, self.staged_schema, self.target_bytes)

    @property
    def staged_schema(self) -> pa.Schema:
        """The columns of these files."""
        return pa.schema([*self.schema, *ORDER]) if self.keys else self.schema


class DeltaTask(FilesTask):
    """Files of plain rows, or of an upsert's rows and tombstones.

    Args:
        form: the format of the table.
        inner: the other arguments of :class:`FilesTask`.
    """

    def __init__(self, form: DeltaFormat, *inner: Any) -> None:
        super().__init__(*inner)
        self._table, self._keys = form, form.keys
        self._tombstones = 0
        self._digests: dict[TopicPartition, int] = {}
        self._whole = 0

    def add(self, chunk: Chunk) -> list[Rejection]:
        """Write the rows of a chunk, and return the records that cannot be written."""
        formed = prepare(self._table, chunk)
        if self._keys:
            self._tombstones += int(formed.rows[DELETED].to_numpy().sum())
        kept = replace(chunk, rows=formed.rows, row_record=formed.row_record)
        more = super().add(kept)
        self._add_digests(kept, [one.record for one in more])
        return sorted([*formed.rejections[len(chunk.rejections) :], *more])

    def _add_digests(self, chunk: Chunk, refused: Sequence[int]) -> None:
        digests = self._table.digests(chunk, chunk.rows, chunk.row_record)
        if digests is None:
            return
        written = ~np.isin(chunk.row_record, refused)
        group = chunk.partition[chunk.row_record[written]]
        sums = digest_sums(digests.of_row[written], group, len(chunk.partitions))
        for tp, digest in zip(chunk.partitions, sums, strict=True):
            self._digests[tp] = (self._digests.get(tp, 0) + digest) % (1 << 64)

    def add_rows(self, rows: pa.Table) -> None:
        """Write rows that belong to no single record."""
        rows = conform(rows, self._table.schema)
        if bad := _unpartitioned(self._table, rows):
            raise row_refused(next(iter(bad.values())), NO_SINGLE_RECORD)
        super().add_rows(rows)
        if self._table.recipe is not None:
            self._whole += digest_sum(row_digests(rows, None, self._table.recipe))

    def finish(self) -> Staged:
        """Write the remaining rows; tombstones are not counted as rows."""
        done = super().finish()
        done = replace(done, rows=done.rows - self._tombstones)
        if self._table.recipe is None:
            return done
        whole = (self._whole + sum(self._digests.values())) % (1 << 64)
        return replace(
            done, digest=whole, recipe=str(self._table.recipe), digests=dict(self._digests)
        )


def form_of(form: DeltaFormat) -> Form:
    """What records become in a table."""
    return Form(
        of=partial(prepare, form),
        recipe=form.recipe_of_rows,
        keys=form.keys,
        version=form.version,
    )


def prepare(form: DeltaFormat, chunk: Chunk) -> Formed[pa.Table]:
    """Rows and tombstones of a chunk, in the order of their records, with the table's types; those
    of an upsert with the columns of :data:`ORDER`. A tombstone has its key only."""
    if not chunk.rows.num_rows and not (form.keys and len(chunk.delete_record)):
        return Formed(form.staged_schema.empty_table(), chunk.row_record, chunk.rejections)
    rows = rows_with_source(chunk) if form.keep_source else chunk.rows
    rows, record, deleted, bad = with_tombstones(chunk, rows, form.keys)
    rows = conform(rows, form.schema)
    refuse_missing_keys(rows, deleted, form.keys, form.version, bad)
    for row, reason in _unpartitioned(form, rows).items():
        bad.setdefault(row, reason)
    if form.keys:
        rows = _ordered(rows, chunk, record, deleted == 1)
    return Formed(rows, record, chunk.rejections).without(rejections_of(record, bad))


def _unpartitioned(form: DeltaFormat, rows: pa.Table) -> dict[int, str]:
    """The rows whose text is no partition, and the reason for each."""
    found: dict[int, str] = {}
    for name in form.partition_by:
        if not pa.types.is_string(rows[name].type):
            continue
        texts = rows[name].combine_chunks().dictionary_encode()
        reasons = [_refusal(form, name, one) for one in texts.dictionary.to_pylist()]
        codes = enumerate(texts.indices.to_pylist()) if any(reasons) else ()
        found |= {at: reasons[code] for at, code in codes if code is not None and reasons[code]}
    return found


def _refusal(form: DeltaFormat, name: str, text: str) -> str:
    if text in ("", NO_VALUE):
        return _NULL
    if is_cut(form.partition_by, name, text):
        return f"column {name!r}: {_LONG}"
    return ""


def _ordered(rows: pa.Table, chunk: Chunk, record: IntArray, deleted: Any) -> pa.Table:
    """Rows with the columns of :data:`ORDER`."""
    index = pa.array(chunk.partition[record])
    topics = pa.array([tp.topic for tp in chunk.partitions], pa.string()).take(index)
    numbers = pa.array([tp.partition for tp in chunk.partitions], pa.int32()).take(index)
    offsets = pa.array(chunk.offset[record], pa.int64())
    for name, values in zip(ORDER.names, (topics, numbers, offsets, deleted), strict=True):
        rows = rows.append_column(name, pa.array(values))
    return rows


def newest(rows: pa.Table, keys: Sequence[str], version: str | None) -> pa.Table:
    """For each key the result of applying all rows and tombstones separately, in order.

    Of the rows after the key's last tombstone the highest version counts, of those the last; the
    tombstone itself if no row follows it.
    """
    compared = [*keys, *([version] if version else [])]
    rows = _with_one_nan(rows, compared)
    by = [*compared, TOPIC, PARTITION, OFFSET, DELETED]
    frame = pl.DataFrame(pl.from_arrow(rows.select(dict.fromkeys(by))))
    frame = frame.with_row_index("_oncely_row").sort(TOPIC, PARTITION, OFFSET, maintain_order=True)
    frame = frame.with_row_index("_oncely_at")
    at = pl.col("_oncely_at").cast(pl.Int64)
    gone = pl.when(pl.col(DELETED)).then(at).otherwise(-1).max().over(list(keys))
    live = frame.with_columns(gone.alias("_oncely_gone")).filter(at >= pl.col("_oncely_gone"))
    order = [pl.col(DELETED).not_(), *([pl.col(version)] if version else []), at]
    last = live.sort(order).unique(list(keys), keep="last", maintain_order=True)
    kept = rows.take(last["_oncely_row"].to_arrow())
    kept = kept.append_column(CLEARED, (last["_oncely_gone"] >= 0).to_arrow())
    return kept.drop_columns([TOPIC, PARTITION, OFFSET])


def _with_one_nan(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Rows with one NaN in these columns: delta-rs compares the bits of those of the table."""
    for at, one in enumerate(rows.schema):
        if one.name in names and pa.types.is_floating(one.type):
            values, nan = rows.column(at), pa.scalar(math.nan, one.type)
            rows = rows.set_column(at, one, pc.if_else(pc.is_nan(values), nan, values))
    return rows
