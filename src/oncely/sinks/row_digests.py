"""Digests of rows, by oncely-native where it is installed.

They equal those of :mod:`oncely.core.digest`, by which audits compute theirs: a defect of the
native code must show there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.core import digest
from oncely.core.digest import Recipe, UInt64
from oncely.native import native


def row_digests(
    rows: pa.Table, offsets: npt.NDArray[np.integer[Any]] | None, recipe: Recipe
) -> UInt64:
    """As :func:`oncely.core.digest.row_digests`."""
    module = native()
    if module is None:
        return digest.row_digests(rows, offsets, recipe)
    contents = pa.array(_contents(module, rows, recipe))
    at = pa.array(digest.offsets_of(offsets, recipe)) if recipe.offset else None
    return np.frombuffer(module.row_digests(contents, at), np.uint64)


def _contents(module: Any, rows: pa.Table, recipe: Recipe) -> UInt64:
    if not recipe.columns or not rows.num_rows:
        return digest.row_contents(rows, recipe)
    kinds = [kind.name for _, kind in recipe.columns]
    constants = [digest.column_constant(name) for name, _ in recipe.columns]
    found: list[bytes] = []
    left: list[int] = []
    for batch in digest.covered_columns(rows, recipe).combine_chunks().to_batches():
        data, left = module.row_contents(batch, kinds, constants)
        found.append(data)
    contents = np.frombuffer(b"".join(found) if len(found) > 1 else found[0], np.uint64)
    if left:
        others = tuple(recipe.columns[at] for at in left)
        contents = contents ^ digest.row_contents(rows, Recipe(others, recipe.offset))
    return contents
