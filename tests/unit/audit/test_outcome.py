"""Records and rows of two sides as findings, without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from oncely.audit.matching import Difference, Line
from oncely.audit.outcome import Compared, Outcome
from oncely.core.ranges import OffsetRange, TopicPartition

PARTITIONS = [TopicPartition("t", number) for number in range(3)]


def compared() -> Compared:
    ends = dict.fromkeys(PARTITIONS, 1_000)
    return Compared({tp: OffsetRange(0, end) for tp, end in ends.items()}, ends, by_offset=True)


def test_a_place_names_each_offset_that_a_log_can_have() -> None:
    one = compared()
    for at, tp in enumerate(PARTITIONS):
        for offset in (0, 999, 99_999, 1 << 48):
            place = (at << one.bits) + offset
            assert place < 1 << 63
            assert one.record(place) == (tp, offset)


def test_an_offset_that_no_log_can_have_is_not_named() -> None:
    one = compared()
    places = [(1 << one.bits) + min(offset, one.largest) for offset in (99_999, (1 << 63) - 1)]
    found = [
        Outcome([], one)._finding(
            "unexpected", Difference(id="", left=0, right=1, place=place, at=None)
        )
        for place in places
    ]
    assert [(f.partition, f.offset) for f in found] == [
        (PARTITIONS[1], 99_999), (PARTITIONS[1], None),
    ]  # fmt: skip


def test_rows_without_an_id_bound_what_is_lost() -> None:
    """20 of 21 ids without a row may be those of the rows without an id: one record is lost."""
    lost = [Difference(f"k{n}", 1, 0, None, None) for n in range(21)]

    def outcome(number: int, rows: int) -> Outcome:
        lines = [Line("lost", None, None, number, number, 0, 0, 0)]
        lines += [Line("no id", None, None, 0, 0, rows, 0, 0)] * bool(rows)
        sides: Any = SimpleNamespace(
            lines=lambda: lines, differences=lambda kind, limit: lost[:number][:limit]
        )
        return Outcome.of(sides, None, 100, keyed=False)

    assert (outcome(21, 0).found["lost"], len(outcome(21, 0).findings)) == (21, 21)
    found = outcome(21, 20)
    assert found.found["lost"] == 1
    assert [one.detail.partition(";")[0] for one in found.findings] == [
        "at least 1 of 21 ids: 20 rows without an id may be theirs"
    ]
    assert "21 ids would be lost, but 20 rows" in found.undecided[-1].reason
    assert (outcome(20, 20).found["lost"], outcome(20, 20).findings) == (0, [])
