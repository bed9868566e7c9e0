"""Values of the core: what can't be made, how they read, what decides by example."""

from __future__ import annotations

import pytest

from oncely.core.claim import Ahead, Append, Entry, FencedOff, Skip, Trim, advance, decide
from oncely.core.ranges import OffsetRange, TopicPartition, gaps, normalize
from oncely.errors import InvariantViolation


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (3, 2), (-5, -1)])
def test_a_range_can_t_be_backwards_or_negative(start: int, end: int) -> None:
    with pytest.raises(InvariantViolation, match="not an offset range"):
        OffsetRange(start, end)


def test_ranges_with_a_gap_between_can_t_be_joined() -> None:
    with pytest.raises(InvariantViolation, match=r"a gap lies between \[0, 2\) and \[3, 4\)"):
        OffsetRange(0, 2).join(OffsetRange(3, 4))


def test_how_they_read() -> None:
    assert str(OffsetRange(3, 9)) == "[3, 9)"
    assert str(TopicPartition("flights", 2)) == "flights-2"


def test_partitions_sort_in_the_order_that_locks_are_taken() -> None:
    found = sorted([TopicPartition("b", 0), TopicPartition("a", 10), TopicPartition("a", 9)])
    assert found == [TopicPartition("a", 9), TopicPartition("a", 10), TopicPartition("b", 0)]


DONE = Entry(10, 3, (OffsetRange(14, 16), OffsetRange(20, 22)))


@pytest.mark.parametrize(
    ("wanted", "decision"),
    [
        (OffsetRange(10, 14), Append(OffsetRange(10, 14))),
        (OffsetRange(10, 11), Append(OffsetRange(10, 11))),
        (OffsetRange(0, 10), Skip()),
        (OffsetRange(3, 7), Skip()),
        (OffsetRange(10, 10), Skip()),
        (OffsetRange(5, 12), Trim((OffsetRange(10, 12),))),
        (OffsetRange(10, 21), Trim((OffsetRange(10, 14), OffsetRange(16, 20)))),
        (OffsetRange(0, 30),
         Trim((OffsetRange(10, 14), OffsetRange(16, 20), OffsetRange(22, 30)))),
        (OffsetRange(11, 12), Ahead(OffsetRange(10, 11))),
        (OffsetRange(14, 16), Ahead(OffsetRange(10, 14))),
    ],
    ids=str,
)  # fmt: skip
def test_decide_by_example(wanted: OffsetRange, decision: object) -> None:
    assert decide(DONE, wanted, 3) == decision


def test_an_older_epoch_is_fenced_whatever_it_wants() -> None:
    for wanted in (OffsetRange(0, 5), OffsetRange(10, 12), OffsetRange(50, 60)):
        assert decide(DONE, wanted, 2) == FencedOff(3)


def test_the_position_goes_over_what_is_done_beyond_it() -> None:
    assert advance(DONE, [OffsetRange(10, 14)]) == 16
    assert advance(DONE, [OffsetRange(10, 13)]) == 13
    assert advance(DONE, []) == 10


def test_the_position_does_not_jump_over_offsets_that_nobody_read() -> None:
    assert advance(Entry(0, 1), []) == 0
    assert advance(Entry(0, 1), [OffsetRange(5, 9)]) == 0
    assert advance(Entry(0, 1, (OffsetRange(5, 9),)), []) == 0


def test_normalize_and_gaps_by_example() -> None:
    many = [OffsetRange(5, 7), OffsetRange(0, 2), OffsetRange(2, 3), OffsetRange(4, 4)]
    assert normalize(many) == (OffsetRange(0, 3), OffsetRange(5, 7))
    assert gaps(many) == (OffsetRange(3, 5),)
    assert gaps([]) == ()
