"""Records of fixed offsets, compared by id with rows that may be of later records, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING

from oncely.audit.evidence import Bounds, Log
from oncely.audit.matching import excused, matched, same_kind
from oncely.audit.outcome import Compared, Outcome
from oncely.audit.report import Undecided
from oncely.core.ranges import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Records = Callable[[Mapping[TopicPartition, OffsetRange]], "DataFrame"]
"""The side of the records of some offsets, as of :func:`oncely.audit.matching.side`."""


def by_id(
    records: Records,
    rows: DataFrame,
    compared: Compared,
    bounds: Callable[[], Mapping[TopicPartition, Bounds]],
    *,
    keyed: bool,
    limit: int,
) -> Outcome:
    """Compare the records of fixed offsets with all rows.

    Args:
        records: the left side.
        rows: the right side.
        compared: the offsets.
        bounds: the offsets whose rows the destination may have now.
        keyed: True if the right side keeps one row of each id.
        limit: the number of findings of each kind that are named.
    """
    from pyspark.sql import DataFrame

    left, right = same_kind(compared.only(records(compared.ranges)), rows)

    def excuse(found: DataFrame) -> DataFrame:
        """Rows of skipped records, and of records before or beyond the compared offsets. The rows
        were read before the present ends are, so these include every record that a row is of."""
        parts = _not_compared(bounds(), compared)
        if not parts:
            return found
        others = reduce(DataFrame.unionAll, map(records, parts))
        return excused(found, same_kind(others, right)[0], keyed=keyed)

    with matched(left, right, keyed=keyed, place_bits=compared.bits, excuse=excuse) as found:
        return Outcome.of(found, compared, limit, keyed=keyed)


def doubt_deleted(
    outcome: Outcome,
    log: Log,
    deleted: Mapping[TopicPartition, OffsetRange],
    *,
    of_rows: bool = True,
    of_records: bool = True,
) -> None:
    """What retention and compaction have removed proves nothing.

    Args:
        outcome: is changed.
        log: the topics.
        deleted: offsets that were removed.
        of_rows: rows of no record may be of these.
        of_records: these records should have been compared.
    """
    if log.compacted():
        outcome.doubt("unexpected", "the topic is compacted: their records may have been removed")
    if deleted and of_rows:
        reason = "their records may be among those that were deleted from the topic"
        outcome.doubt("unexpected", reason)
    if of_records:
        reason = "these records were deleted from the topic"
        outcome.undecided += [Undecided(tp, range_, reason) for tp, range_ in deleted.items()]


def _not_compared(
    bounds: Mapping[TopicPartition, Bounds], compared: Compared
) -> list[dict[TopicPartition, OffsetRange]]:
    """The offsets before the compared ones, those beyond, and skipped ones."""
    before, beyond = {}, {}
    for tp, one in bounds.items():
        range_ = compared.ranges.get(tp, OffsetRange(one.first, one.first))
        before[tp] = OffsetRange(one.first, max(one.first, range_.start))
        beyond[tp] = OffsetRange(range_.end, max(one.end, range_.end))
    parts = ({tp: r for tp, r in part.items() if not r.is_empty} for part in (before, beyond))
    skipped = ({tp: one} for tp, own in compared.skipped.items() for one in own)
    return [part for part in (*parts, *skipped) if part]
