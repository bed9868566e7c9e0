"""Histories of ledger topics; compaction may have removed any message but the newest of a key."""

from __future__ import annotations

from oncely.audit.layout import disorder
from oncely.audit.stored.topic_ledger import LedgerMessage, PositionEntry, StoredTotals, TopicLedger
from oncely.audit.topic_snapshot import entries
from oncely.core.ranges import TopicPartition

T0 = TopicPartition("t", 0)
KEY = ("position", "p", "t", 0)


def moved(at: int, epoch: int, start: int, end: int, kind: str = "data") -> LedgerMessage:
    """The message of a commit that has one record for each offset."""
    totals = StoredTotals(since=0, records=end, rows=end, digest=None)
    counts = end - start, end - start, 0, 0
    entry = PositionEntry(end, epoch, "c", "i", start, end, kind, *counts, "partition", totals)
    return LedgerMessage(at, 1_000 + at, KEY, entry)


HISTORY = [
    moved(0, 1, 0, 5),
    moved(1, 1, 5, 9),
    moved(2, 2, 9, 9, "taken"),
    moved(3, 2, 9, 12),
    moved(4, 3, 12, 12, "taken"),
]


def told(*left: int) -> list[tuple[int, int, str]]:
    """Ranges and kinds that an audit takes from these messages of the history."""
    ledger = TopicLedger([HISTORY[at] for at in left])
    found = entries(ledger, T0)
    assert disorder(found) == []
    assert sum(one.counts.rows for one in found) == 12
    return [(one.span.range.start, one.span.range.end, one.kind) for one in found]


def test_a_whole_history_is_taken_as_it_is() -> None:
    assert told(0, 1, 2, 3, 4) == [(0, 5, "data"), (5, 9, "data"), (9, 12, "data")]


def test_removed_messages_are_one_range_of_no_known_epoch() -> None:
    """The newest epoch is later than those of the ranges that are left, and proves no disorder."""
    assert told(1, 2, 3, 4) == [(0, 5, "joined"), (5, 9, "data"), (9, 12, "data")]
    assert told(0, 3, 4) == [(0, 9, "joined"), (9, 12, "data")]
    assert told(4) == [(0, 12, "joined")]
