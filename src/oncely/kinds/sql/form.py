"""Conversion of a chunk to one table with the destination's types, before the transaction
begins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from oncely.core.batch import Chunk, Formed
from oncely.core.digest import STORED, Kind, Recipe
from oncely.kinds.rows import DELETED, Form
from oncely.kinds.sql.table import BoundTable
from oncely.kinds.tables import (
    refuse_missing_keys,
    rejections_of,
    rows_with_source,
    with_tombstones,
)
from oncely.stores.sql.cast import as_text, cast_rows
from oncely.stores.sql.connection import Connection
from oncely.stores.sql.postgres_types import stored_texts

ORDINAL = "_oncely_ord"


def prepare(chunk: Chunk, target: BoundTable | None, keep_source: bool) -> Formed[pa.Table]:
    """Merge rows and tombstones, cast them, and reject values that cannot be cast.

    Returns:
        Rows of the target's types; for an upsert in record order, tombstones among them (null
            except for the keys), with the columns ORDINAL and DELETED.
    """
    if target is None or not (chunk.rows.num_rows or len(chunk.delete_record)):
        return Formed(pa.table({}), np.array([], dtype=np.int64), chunk.rejections)
    rows = rows_with_source(chunk) if keep_source else chunk.rows
    rows, row_record, deleted, bad_keys = with_tombstones(chunk, rows, target.keys)
    cast, bad = cast_rows(rows, target.fits)
    bad |= bad_keys
    if target.keys:
        refuse_missing_keys(cast, deleted, target.keys, target.version, bad)
        cast = cast.append_column(ORDINAL, pa.array(np.arange(len(row_record))))
        cast = cast.append_column(DELETED, pa.array(deleted))
    formed = Formed(cast, row_record, chunk.rejections)
    return formed.without(rejections_of(row_record, bad))


def form_of(
    target: BoundTable, keep_source: bool, looking: Callable[[], AbstractContextManager[Connection]]
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
    look: Connection, target: BoundTable, rows: pa.Table, recipe: Recipe
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
