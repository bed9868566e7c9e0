"""Digests of rows that were read from a destination that does not contain their offsets."""

from __future__ import annotations

import pyarrow as pa

from oncely.audit.content import Rows
from oncely.core.digest import Recipe, kind_of, row_digests


def recipe_of(schema: pa.Schema) -> Recipe:
    """The recipe of all columns that a digest can cover."""
    return Recipe.of({one.name: kind_of(one.type) for one in schema}, offset=False)


def digests_of(rows: pa.Table, recipe: Recipe, at: str) -> Rows:
    """The digest of each row. A column that the rows lack is null in all of them."""
    there = tuple(one for one in recipe.columns if one[0] in rows.column_names)
    uncovered = frozenset(rows.column_names) - {name for name, _ in there}
    return Rows(row_digests(rows, None, Recipe(there, recipe.offset)), lambda _: at, uncovered)
