"""Records and rows of two sides as findings, without Spark."""

from __future__ import annotations

from oncely.audit.matching import Difference
from oncely.audit.outcome import Compared, Outcome
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition

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
