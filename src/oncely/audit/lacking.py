"""Columns that rows were written without, while their records have values of them.

A range's recipe names the columns of its rows. Rows of an earlier schema lack columns of today's,
and are right if their records have no values of them. The history does not tell; so records are
decoded again, the newest ones of each partition, behind which the column came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from oncely.audit.evidence import Expected, Span
from oncely.audit.layout import Part
from oncely.audit.report import Undecided
from oncely.core.digest import Kind, Recipe, row_digests
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.wording import plural

_LOOK = 100_000  # offsets of a partition, at most
_NULL = row_digests(pa.table({"a": pa.nulls(1, pa.string())}), None,
                    Recipe((("a", Kind("text")),), offset=False))[0]  # fmt: skip
"""The digest of a row whose values are null."""

Columns = tuple[tuple[str, Kind], ...]


def lacking(
    parts: Sequence[Part], expected: Expected | None, first: Mapping[TopicPartition, Position]
) -> Iterator[Undecided]:
    """The offsets of such rows, for each partition and the columns that they lack.

    Args:
        parts: the compared offsets.
        expected: recomputes records.
        first: the first offset that the topic holds, by partition.
    """
    if expected is None or not expected.recipe:
        return
    for (tp, columns), own in _without(parts, Recipe.parse(expected.recipe).columns).items():
        start, end = own[0].start, own[-1].end
        low, recipe = max(first[tp], end - _LOOK), str(Recipe(columns, offset=False))
        read = valued = 0
        for inside in (OffsetRange(max(one.start, low), one.end) for one in own if one.end > low):
            for records in expected.of(Span(tp, inside), recipe):
                read += len(records.offset)
                if records.digest is not None:
                    without = records.rows.astype(np.uint64) * _NULL
                    valued += int(np.count_nonzero(records.digest != without))
        if valued:
            names = ", ".join(name for name, _ in columns)
            reason = (
                f"rows were written without {names}, and {valued} of the last"
                f" {plural(read, 'record')} have values of it:"
                f" `oncely backfill FILE --offsets {tp.topic}:{tp.partition}:{start}-{end}`"
            )
            yield Undecided(tp, OffsetRange(start, end), reason)


def _without(
    parts: Sequence[Part], today: Columns
) -> dict[tuple[TopicPartition, Columns], list[OffsetRange]]:
    """The ranges with rows that lack some of today's columns, ascending."""
    found: dict[tuple[TopicPartition, Columns], list[OffsetRange]] = {}
    for part in parts:
        if part.digest is not None and part.entry and part.entry.rows:
            try:
                there = {name for name, _ in Recipe.parse(part.recipe).columns}
            except ValueError:  # of a later version
                continue
            missing = tuple(one for one in today if one[0] not in there)
            if missing:
                found.setdefault((part.span.partition, missing), []).append(part.span.range)
    return found
