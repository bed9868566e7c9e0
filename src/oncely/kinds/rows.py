"""Rows as destinations get them: their form, their digests, and refusals that no record accounts
for. Every kind makes them by these functions, and audits, repairs and ``plan`` ask a :class:`Form`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from oncely.core import digest
from oncely.core.batch import Chunk, Formed, IntArray
from oncely.core.digest import Digests, Recipe, UInt64
from oncely.errors import Stopped
from oncely.extras import native

DELETED = "_oncely_deleted"
"""The column of an upsert's rows that is true, or 1, for a tombstone."""


def as_made(chunk: Chunk) -> Formed[pa.Table]:
    """The rows that decode and transform have made."""
    return Formed(chunk.rows, chunk.row_record, chunk.rejections)


def as_sent(rows: pa.Table, recipe: Recipe) -> tuple[pa.Table, list[int]]:
    """The rows as they are: the destination changes no value."""
    del recipe
    return rows, []


@dataclass(frozen=True)
class Form:
    """What records become in a destination, for audits, repairs and ``plan``: nothing is written.
    By default the rows that decode and transform have made, without a digest.

    Attributes:
        of: the rows of a chunk as a commit sends them. Those of an upsert are in the order of their
            records, tombstones among them, with the column :data:`DELETED`.
        sampled: a sample with the columns that the destination infers from its rows.
        stored: the rows as the destination returns them, by the columns of a recipe; and the
            numbers of those with a value that it does not accept, which stays as it is sent.
        recipe: of single rows; None: they have no digest.
        others: the recipe of the columns that the digests of ranges do not cover, if there are any.
        keys: the columns of the key by which later rows replace earlier ones; none if none do.
        version: the column of which the highest value is kept, of rows with the same key.
        lacks_are_null: a column of an earlier recipe that rows lack is null in the destination.
    """

    of: Callable[[Chunk], Formed[pa.Table]] = as_made
    sampled: Callable[[Chunk], Chunk] = lambda chunk: chunk
    stored: Callable[[pa.Table, Recipe], tuple[pa.Table, list[int]]] = as_sent
    recipe: Recipe | None = None
    others: Recipe | None = None
    keys: tuple[str, ...] = ()
    version: str | None = None
    lacks_are_null: bool = True


def row_refused(reason: str, way_out: str) -> Stopped:
    """The error for a row of a Spark transform that the destination refuses."""
    return Stopped(f"a row of the Spark transform can't be written: {reason}", way_out=way_out)


LETTERS_STAY = "correct the transform; all of these rejects were left as they are"
NO_SINGLE_RECORD = (
    "correct or filter it in the transform; after a Spark transform a row belongs to no single"
    " record, so it can't be kept as a reject"
)


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


def digests_of(chunk: Chunk, rows: pa.Table, row_record: IntArray, recipe: Recipe) -> Digests:
    """The digests of a chunk's rows; ``row_record`` is the record of each."""
    offsets = chunk.offset[row_record] if recipe.offset else None
    return Digests(row_digests(rows, offsets, recipe), str(recipe))


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
