"""The ranges of a batch, and their division into tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.runtimes.batches.commit import OFFSETS_A_TASK, offsets_of, plan_ranges, shares_of

T = [TopicPartition("t", number) for number in range(6)]
SIZES = st.dictionaries(st.sampled_from(T), st.integers(0, 400_000))


def test_all_that_is_there_is_planned_below_the_limit() -> None:
    ranges = plan_ranges({T[0]: 5, T[1]: 7, T[2]: 0}, {T[0]: 9, T[1]: 7, T[2]: 1}, 5)
    assert ranges == {T[0]: OffsetRange(5, 9), T[2]: OffsetRange(0, 1)}


def test_beyond_it_each_partition_has_its_share() -> None:
    """As Spark's Kafka source does with maxOffsetsPerTrigger, of 0.1 offsets it makes one."""
    ranges = plan_ranges(dict.fromkeys(T[:3], 0), {T[0]: 900, T[1]: 90, T[2]: 1}, 100)
    assert {tp: range_.end for tp, range_ in ranges.items()} == {T[0]: 90, T[1]: 9, T[2]: 1}


def test_an_end_below_the_position_and_an_unknown_partition_are_no_ranges() -> None:
    assert plan_ranges({T[0]: 5, T[1]: 3}, {T[0]: 4, T[2]: 9}, 5) == {}


@given(SIZES, st.integers(1, 100_000))
def test_a_plan_is_within_what_is_there_and_its_limit(
    sizes: dict[TopicPartition, int], limit: int
) -> None:
    starts = {tp: 10 * tp.partition for tp in sizes}
    ends = {tp: starts[tp] + size for tp, size in sizes.items()}
    ranges = plan_ranges(starts, ends, limit)
    assert ranges.keys() == {tp for tp, size in sizes.items() if size}
    for tp, range_ in ranges.items():
        assert starts[tp] == range_.start < range_.end <= ends[tp]
    assert offsets_of(ranges) <= max(limit, len(ranges)) + len(ranges)
    if sum(sizes.values()) <= limit:
        assert offsets_of(ranges) == sum(sizes.values())


@given(SIZES, st.none() | st.integers(1, 8))
def test_shares_have_every_range_once(sizes: dict[TopicPartition, int], most: int | None) -> None:
    ranges = {tp: OffsetRange(3, 3 + size) for tp, size in sizes.items() if size}
    if not ranges:
        return
    shares = shares_of(ranges, most)
    assert all(shares)
    assert sorted(tp for share in shares for tp in share) == sorted(ranges)
    assert {tp: one for share in shares for tp, one in share.items()} == ranges
    wanted = most or -(-offsets_of(ranges) // OFFSETS_A_TASK)
    assert len(shares) == min(len(ranges), wanted)
    loads = [offsets_of(share) for share in shares]
    assert max(loads) - min(loads) <= max(one.end - one.start for one in ranges.values())
