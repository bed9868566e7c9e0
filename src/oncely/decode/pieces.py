"""Rows in the order in which they were decoded, put together by scope and in record order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from oncely.decode.columns import Columns, leaf
from oncely.decode.gather import Records
from oncely.decode.plans import Plan
from oncely.decode.scopes import Codes
from oncely.decode.widening import widen


class Piece(NamedTuple):
    """Rows of a fast decoder, of any scopes that share a plan."""

    plan: Plan
    records: Records
    codes: Codes
    rows: pa.RecordBatch


def groups(keys: Records) -> Iterator[tuple[int, Records]]:
    """The distinct keys, and where each is, ascending."""
    if not len(keys):
        return
    if (keys == keys[0]).all():
        yield int(keys[0]), np.arange(len(keys))
        return
    order = np.argsort(keys, kind="stable")
    for positions in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        yield int(keys[positions[0]]), positions


def taken(piece: Piece, positions: Records) -> Piece:
    """Some rows of a piece."""
    if len(positions) == len(piece.records):
        return piece
    rows = piece.rows.take(pa.array(positions))
    return Piece(piece.plan, piece.records[positions], piece.codes[positions], rows)


def by_scope(schema: pa.Schema, pieces: list[Piece]) -> Iterator[tuple[int, pa.Table, Records]]:
    """Rows of one schema, cut by scope."""
    tables = [widen(pa.Table.from_batches([piece.rows]), schema) for piece in pieces]
    records = np.concatenate([piece.records for piece in pieces])
    codes = np.concatenate([piece.codes for piece in pieces])
    table = pa.concat_tables(tables)
    order = np.lexsort((records, codes))
    if (order[1:] < order[:-1]).any():
        table = table.combine_chunks().take(pa.array(order))
        records, codes = records[order], codes[order]
    for start, end in pairwise([0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]):
        yield int(codes[start]), table.slice(start, end - start), records[start:end]


def _double(values: Any, arrow: pa.DataType) -> pa.Array:
    # A whole number from before the column was a DOUBLE, or one beyond 2^53 that equals a DOUBLE.
    return pa.array([None if value is None else float(value) for value in values], arrow)


_BY_NAME = Columns(
    pick=lambda _, name: lambda members: members.get(name),
    leaves={pa.float64().id: leaf(_double)},
)


def batch(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Columns of rows that were looked at one by one; what they leave out is null."""
    return _BY_NAME.batch(schema, [[row.get(name) for row in rows] for name in schema.names])
