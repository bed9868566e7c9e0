"""The partitions of a member: only an owned one takes records in and gives them out."""

from __future__ import annotations

import pytest

from oncely.core.claim import Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import InvariantViolation
from oncely.runtimes.worker.assignment import Assignment, BufferLimits, Fetched, PartitionState

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def fence(epoch: int, *partitions: TopicPartition) -> Fence:
    return Fence("p", epoch, "run", frozenset(partitions))


def piece(first: int, last: int, leader_epoch: int = -1) -> Fetched:
    count = last - first + 1
    return Fetched(first, last, count, 10 * count, leader_epoch=leader_epoch)


def owning(
    *partitions: TopicPartition, at: int = 0, limits: BufferLimits | None = None
) -> Assignment:
    """Partitions that were assigned and taken over by epoch 1."""
    found = Assignment(limits)
    found.assigned(partitions)
    found.taken(fence(1, *partitions), dict.fromkeys(partitions, at), {})
    return found


def test_nothing_is_buffered_before_the_ledger_has_given_a_fence() -> None:
    of = Assignment()
    assert not of.fetched(T0, piece(0, 9))
    of.assigned([T0])
    assert not of.fetched(T0, piece(0, 9))
    assert of.staged(PartitionState.TAKING) == {T0}
    of.taken(fence(1, T0), {T0: 5}, {})
    assert of.fetched(T0, piece(5, 9))
    work = of.work()
    assert work is not None
    assert (work.fence, work.ranges) == (fence(1, T0), {T0: OffsetRange(5, 10)})


def test_a_range_begins_at_the_position_and_follows_the_one_before() -> None:
    of = owning(T0, at=3)
    of.fetched(T0, piece(7, 9))  # offsets 3 to 6 hold no records
    first = of.work()
    of.fetched(T0, piece(12, 14))
    second = of.work()
    assert first is not None
    assert second is not None
    assert (first.ranges[T0], second.ranges[T0]) == (OffsetRange(3, 10), OffsetRange(10, 15))


def test_what_was_buffered_for_a_revoked_partition_is_never_given_out() -> None:
    of = owning(T0, T1)
    of.fetched(T0, piece(0, 9))
    of.fetched(T1, piece(0, 4))
    assert of.revoked([T0]) == 10
    assert not of.fetched(T0, piece(10, 19))
    work = of.work()
    assert work is not None
    assert work.ranges == {T1: OffsetRange(0, 5)}
    of.assigned([T0])
    assert not of.fetched(T0, piece(10, 19))
    assert of.work() is None


def test_an_assignment_of_a_partition_that_is_there_begins_anew() -> None:
    """The revocation between was not told."""
    of = owning(T0)
    of.fetched(T0, piece(0, 9))
    of.assigned([T0])
    assert of.work() is None
    of.taken(fence(2, T0), {T0: 4}, {})
    of.fetched(T0, piece(4, 9))
    work = of.work()
    assert work is not None
    assert work.ranges == {T0: OffsetRange(4, 10)}


def test_records_under_different_fences_are_never_committed_together() -> None:
    of = owning(T0)
    of.assigned([T1])
    of.taken(fence(2, T1), {T1: 0}, {})
    for tp in (T0, T1):
        of.fetched(tp, piece(0, 9))
    found = [of.work(), of.work()]
    assert of.work() is None
    given = {one.fence.epoch: set(one.ranges) for one in found if one is not None}
    assert given == {1: {T0}, 2: {T1}}


def test_a_late_commit_under_an_old_fence_moves_nothing() -> None:
    of = owning(T0)
    of.fetched(T0, piece(0, 9))
    of.work()
    of.lost([T0], ask=False)
    of.taken(fence(2, T0), {T0: 0}, {})
    of.committed(fence(1, T0), {T0: 10})
    assert of.positions == {T0: 0}


@pytest.mark.parametrize(
    ("ours", "stage"), [({T0}, PartitionState.TAKING), (set(), PartitionState.LEFT)]
)
def test_after_the_group_was_asked(ours: set[TopicPartition], stage: PartitionState) -> None:
    of = owning(T0)
    of.fetched(T0, piece(0, 9))
    assert of.lost([T0], ask=True) == 10
    assert of.staged(PartitionState.ASKING) == {T0}
    of.answered(ours)
    assert of.staged(stage) == {T0}
    assert of.work() is None
    of.answered({T0})  # during a rebalance a group describes no assignments
    assert of.staged(PartitionState.TAKING) == {T0}


def test_records_that_come_again_are_found() -> None:
    of = owning(T0, at=5)
    assert of.again(T0, [5, 6, 9]) == frozenset()
    of.fetched(T0, Fetched(5, 9, 3, 30, holes=(OffsetRange(7, 9),)))
    of.fetched(T0, piece(12, 14))
    assert of.again(T0, [14, 15]) == {0}
    assert of.again(T0, [9, 12, 13, 14, 15]) == {0, 1, 2, 3}
    assert of.again(T0, [15, 17, 17, 20, 15]) == {2, 4}
    assert of.again(T0, [4, 15]) == {0}  # the ledger's position is after it
    assert of.again(T1, [4]) == frozenset()


@pytest.mark.parametrize("offsets", [[7], [15, 8], [10, 11], [14, 11], [15, 18, 16]])
def test_records_that_were_skipped_are_refused(offsets: list[int]) -> None:
    of = owning(T0, at=5)
    of.fetched(T0, Fetched(5, 9, 3, 30, holes=(OffsetRange(7, 9),)))
    of.fetched(T0, piece(12, 14))
    with pytest.raises(InvariantViolation, match="came after"):
        of.again(T0, offsets)


def test_the_holes_that_are_remembered_are_bounded() -> None:
    of = owning(T0)
    for at in range(1, 4_001, 2):
        of.fetched(T0, piece(at, at))
    assert of.again(T0, [3_999]) == {0}
    for old in (1, 2, 3_998):
        with pytest.raises(InvariantViolation):
            of.again(T0, [old])


def test_a_full_partition_is_paused_until_half_of_it_is_left() -> None:
    of = owning(T0, limits=BufferLimits(records=4, buffered_records=10))
    of.fetched(T0, piece(0, 3))
    assert of.paused() == set()
    of.fetched(T0, piece(4, 7))
    of.fetched(T0, piece(8, 11))
    assert of.paused() == {T0}
    of.work()
    assert of.paused() == {T0}  # 8 of 10 are left
    of.work()
    assert of.paused() == set()


def test_the_partitions_share_the_bytes_of_all_buffers() -> None:
    limits = BufferLimits(buffered_bytes=1 << 20)
    alone, shared = owning(T0, limits=limits), owning(T0, T1, limits=limits)
    for of in (alone, shared):
        of.fetched(T0, Fetched(0, 0, 1, 600_000))
    assert (alone.paused(), shared.paused()) == (set(), {T0})
    shared.revoked([T1])
    shared.work()
    assert shared.paused() == set()
    both = owning(T0, T1, limits=limits)
    both.fetched(T0, Fetched(0, 0, 1, 2_000_000))
    assert both.paused() == {T0, T1}  # nothing more of any of them
    both.work()
    assert both.paused() == set()


def test_a_partition_is_paused_while_it_is_not_owned() -> None:
    of = owning(T0)
    of.lost([T0], ask=True)
    assert of.paused() == {T0}
    of.answered({T0})
    of.taken(fence(2, T0), {T0: 0}, {})
    assert of.paused() == set()


def test_a_hole_is_passed_over_when_nothing_else_is_to_do() -> None:
    of = owning(T0)
    of.fetched(T0, piece(0, 9))
    of.ended(T0, 12)
    assert of.holes() is None
    work = of.work()
    assert work is not None
    assert of.holes() is None  # the commit has not ended
    of.committed(work.fence, {T0: 10})
    assert of.holes() == (fence(1, T0), {T0: OffsetRange(10, 12)})
    of.pass_over({T0: OffsetRange(10, 12)})
    assert of.holes() is None


def test_the_ledger_learns_a_new_leader_epoch_with_its_first_records() -> None:
    of = Assignment()
    of.assigned([T0])
    of.taken(fence(1, T0), {T0: 0}, {T0: 3})
    of.fetched(T0, piece(0, 9, leader_epoch=3))
    assert of.work().leader_epochs == {}  # type: ignore[union-attr]
    of.fetched(T0, piece(10, 19, leader_epoch=4))
    assert of.work().leader_epochs == {T0: 4}  # type: ignore[union-attr]


def test_records_that_go_back_are_a_defect() -> None:
    of = owning(T0)
    of.fetched(T0, piece(0, 9))
    with pytest.raises(InvariantViolation):
        of.fetched(T0, piece(5, 12))


def test_work_that_is_put_back_is_given_out_again_before_the_rest() -> None:
    of = owning(T0, T1)
    of.fetched(T0, piece(0, 9, leader_epoch=3))
    of.fetched(T1, piece(0, 4))
    ahead = of.work()
    assert ahead is not None
    of.fetched(T0, piece(10, 12, leader_epoch=3))
    of.put_back(ahead)
    of.revoked([T1])
    again = of.work()
    assert again is not None
    assert again.ranges == {T0: OffsetRange(0, 13)}
    assert again.leader_epochs == {T0: 3}  # the first time it was not noted


def test_work_of_a_fence_that_is_gone_is_not_put_back() -> None:
    of = owning(T0)
    of.fetched(T0, piece(0, 9))
    ahead = of.work()
    assert ahead is not None
    of.assigned([T0])
    of.taken(fence(2, T0), {T0: 0}, {})
    of.put_back(ahead)
    assert of.work() is None


def test_as_much_as_is_wanted_at_least_is_counted_by_fence() -> None:
    of = owning(T0)
    of.assigned([T1])
    of.taken(fence(2, T1), {T1: 0}, {})
    of.fetched(T0, piece(0, 4))
    of.fetched(T1, piece(0, 6))
    assert of.work(8) is None
    work = of.work(6)
    assert work is not None
    assert work.ranges == {T1: OffsetRange(0, 7)}


def test_a_fence_without_records_has_no_work() -> None:
    """A quarter of a small ``worker.max_records`` is 0."""
    ours = owning(T0, T1)
    assert ours.work(0) is None
    ours.fetched(T0, piece(0, 0))
    assert ours.work(0) is not None


def test_a_commit_of_several_pieces_does_not_exceed_its_records() -> None:
    """But for one that is larger alone."""
    ours = owning(T0, limits=BufferLimits(records=5))
    for first, last in ((0, 2), (3, 4), (5, 5), (6, 15)):
        ours.fetched(T0, piece(first, last))
    ends = [work.ranges[T0].end for _ in range(4) if (work := ours.work())]
    assert ends == [5, 6, 16]
