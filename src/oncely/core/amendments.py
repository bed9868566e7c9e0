"""Amendments of the history: what a replay of dead letters changes in committed ranges. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from oncely.core.batch import Chunk, IntArray
from oncely.core.claim import UNKNOWN, Amendment, Counts
from oncely.core.digest import Digests, digest_sums
from oncely.core.ranges import OffsetRange, TopicPartition

Containing = Callable[[TopicPartition, Sequence[int]], Mapping[int, OffsetRange]]
"""Returns the committed range of each offset; offsets of none are left out."""


def changed(new: Counts, old: Counts) -> Counts:
    """What replacing the content of a range changes.

    If the digest of the change is not known, neither is that of a sum with it.
    """
    counts = (
        new.records - old.records,
        new.rows - old.rows,
        new.rejects - old.rejects,
        new.filtered - old.filtered,
    )
    with_rows = [one for one in (new, old) if one.rows]
    recipes = {one.recipe for one in with_rows}
    if len(recipes) > 1 or any(one.digest is None for one in with_rows):
        return Counts(*counts, None, UNKNOWN)
    digests = [one.digest or 0 if one.rows else 0 for one in (new, old)]
    return Counts(*counts, (digests[0] - digests[1]) % (1 << 64), "".join(recipes))


def replayed(
    chunk: Chunk,
    row_record: IntArray,
    failed: Collection[int],
    digests: Digests | None,
    containing: Containing,
) -> list[Amendment]:
    """One amendment for each committed range of which dead letters were replayed.

    Args:
        chunk: the replayed records.
        row_record: the record of each row that was written.
        failed: the records that are dead letters still.
        digests: the digests of these rows.
        containing: finds committed ranges. The letters of no range have an amendment together.
    """
    rows = np.bincount(row_record, minlength=chunk.records).tolist()
    sums: Sequence[int | None] = [None] * chunk.records
    recipe = ""
    if digests is not None:
        sums = digest_sums(digests.of_row, row_record, chunk.records)
        recipe = digests.recipe
    moved: dict[TopicPartition, dict[int, Counts]] = {}
    for record in set(range(chunk.records)).difference(failed):
        one = Counts(0, rows[record], -1, 0 if rows[record] else 1, sums[record], recipe)
        tp = chunk.partitions[chunk.partition[record]]
        moved.setdefault(tp, {})[int(chunk.offset[record])] = one
    return [one for tp, own in sorted(moved.items()) for one in _of(tp, own, containing)]


def _of(tp: TopicPartition, moved: Mapping[int, Counts], containing: Containing) -> list[Amendment]:
    ranges = containing(tp, sorted(moved))
    groups: dict[OffsetRange | None, list[int]] = {}
    for at in sorted(moved):
        groups.setdefault(ranges.get(at), []).append(at)
    return [
        Amendment(
            tp,
            OffsetRange(own[0], own[-1] + 1),
            "replay",
            sum((moved[at] for at in own[1:]), moved[own[0]]),
        )
        for own in groups.values()
    ]
