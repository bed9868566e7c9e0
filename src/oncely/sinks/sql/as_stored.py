"""Rows in the form in which the table returns them."""

from __future__ import annotations

import pyarrow as pa

from oncely.clients.sql.connection import Connection
from oncely.clients.sql.postgres_digest import stored_texts
from oncely.core.digest import STORED, Recipe
from oncely.sinks.sql.cast import as_text
from oncely.sinks.sql.target import Target


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
