"""Conversion of a chunk to one table with the destination's types, before the transaction
begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from oncely.core.batch import Chunk, IntArray, Rejection
from oncely.core.claim import Counts
from oncely.core.digest import STORED, Digests, Recipe
from oncely.core.ranges import TopicPartition
from oncely.kinds.rows import refuse_missing_keys, rejections_of, with_source, with_tombstones
from oncely.kinds.sql.table import Target
from oncely.stores.sql.cast import as_text, cast_rows
from oncely.stores.sql.connection import Connection
from oncely.stores.sql.postgres_digest import stored_texts

ORDINAL = "_oncely_ord"
DELETED = "_oncely_deleted"


@dataclass(frozen=True)
class Prepared:
    """Rows to send, and the rejections so far.

    Attributes:
        rows: cast to the target's types; for an upsert in record order, tombstones among them (null
            except for the keys), with the columns ORDINAL and DELETED.
        row_record: per row, its record.
        rejections: all rejections so far.
        digests: of the rows, in the types of the table; None if they are not computed.
    """

    rows: pa.Table
    row_record: IntArray
    rejections: tuple[Rejection, ...]
    digests: Digests | None = None

    def without(self, rejections: list[Rejection]) -> Prepared:
        """Without all rows of rejected records: a record is a reject or rows, never both."""
        gone = np.array([r.record for r in rejections], dtype=np.int64)
        keep = ~np.isin(self.row_record, gone)
        return Prepared(
            self.rows.filter(pa.array(keep)),
            self.row_record[keep],
            (*self.rejections, *rejections),
            self.digests and self.digests._replace(of_row=self.digests.of_row[keep]),
        )

    def counts(self, chunk: Chunk) -> dict[TopicPartition, Counts]:
        """The counts of a transaction with these rows, and their digests."""
        return chunk.counts(self.row_record, self.rejections, self.digests)


def prepare(chunk: Chunk, target: Target | None, keep_source: bool) -> Prepared:
    """Merge rows and tombstones, cast them, and reject values that cannot be cast."""
    if target is None or not (chunk.rows.num_rows or len(chunk.delete_record)):
        return Prepared(pa.table({}), np.array([], dtype=np.int64), chunk.rejections)
    rows = with_source(chunk) if keep_source else chunk.rows
    rows, row_record, deleted, bad_keys = with_tombstones(chunk, rows, target.keys)
    cast, bad = cast_rows(rows, target.fits)
    bad |= bad_keys
    if target.keys:
        refuse_missing_keys(cast, deleted, target.keys, target.version, bad)
        cast = cast.append_column(ORDINAL, pa.array(np.arange(len(row_record))))
        cast = cast.append_column(DELETED, pa.array(deleted))
    prepared = Prepared(cast, row_record, chunk.rejections)
    return prepared.without(rejections_of(row_record, bad)) if bad else prepared


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
