"""The starts of files: at another group, at the target size, and never inside a record."""

from __future__ import annotations

import numpy as np

from oncely.lake.gathered import Gathered, Ints


def file_starts(rows: Gathered, order: Ints, target: int) -> Ints:
    """The starts of files among rows in this order.

    Args:
        rows: all rows.
        order: indices of the rows that are written, sorted by group.
        target: approximate number of rows of a file.
    """
    codes = rows.codes[order]
    groups = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
    sizes = np.diff(np.append(groups, len(order)))
    files = np.maximum(1, np.rint(sizes / target).astype(np.int64))
    if not (files > 1).any():
        return groups
    begins = np.zeros(len(order), bool)
    begins[groups] = True
    inside = _same_record(rows, order)
    for which in np.flatnonzero(files > 1).tolist():
        start, size, parts = int(groups[which]), int(sizes[which]), int(files[which])
        for part in range(1, parts):
            cut = start + size * part // parts
            while cut < start + size and inside[cut]:
                cut += 1
            if cut < start + size:
                begins[cut] = True
    starts: Ints = np.flatnonzero(begins)
    return starts


def whole_records(rows: Gathered, gone: Ints) -> Ints:
    """The dropped rows, and all adjacent rows of the same records."""
    inside = _same_record(rows, np.arange(rows.count))
    record = np.cumsum(~inside)
    whole: Ints = np.isin(record, record[gone])
    return whole


def _same_record(rows: Gathered, order: Ints) -> Ints:
    """True for each row that has the same record as the row before it."""
    same = np.zeros(len(order), bool)
    if rows.source is not None and rows.offset is not None:
        source, offset = rows.source[order], rows.offset[order]
        same[1:] = (source[1:] == source[:-1]) & (offset[1:] == offset[:-1])
    return same
