"""What every sink promises whose tasks, or members of a group, commit what they have read."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncely.core.claim import NO_RECORDS, Counts, Fence, PositionMoved
from oncely.core.ranges import OffsetRange
from oncely.errors import Fenced, InvariantViolation, LedgerWentBack, TooManyRejects
from oncely.phases import into
from tests.contracts.sinks import CHUNKS, MEMBERS, SinkAdapter, adapter, ready, take_over
from tests.sinktools import T0, T1, Rec, asking_again, at_t0, chunk, commit_all, commit_on, numbered

BOTH = {T0: 0, T1: 0}


@pytest.fixture(params=[*CHUNKS, *MEMBERS])
def to(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkAdapter]:
    """An empty destination of each sink."""
    yield from adapter(request.param, request.getfixturevalue, tmp_path)


def test_rows_rejects_history_and_positions_take_effect_together(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink(), {T0: 10, T1: 0})
    records = [*numbered(10, 13), Rec(13), Rec(15, bad="no JSON")]
    with into(seconds := {}):
        outcomes = commit_all(sink, chunk({T0: (10, records), T1: (0, numbered(100, 102))}), fence)
    assert to.ids() == [10, 11, 12, 100, 101]
    assert to.rejects() == [15]
    assert to.history() == [(0, 10, 16, "data"), (1, 0, 102, "data")]
    assert to.positions() == {T0: 16, T1: 102}
    assert {one.partition: one.counts for one in outcomes} == {
        T0: Counts(5, 3, 1, 1),
        T1: Counts(2, 2, 0, 0),
    }
    assert not any(one.replayed for one in outcomes)
    assert all(seconds[name] > 0 for name in ("write", "commit"))


def test_consecutive_chunks(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink())
    for start in range(0, 30, 10):
        commit_all(sink, at_t0(start, numbered(start, start + 10)), fence)
    assert to.ids() == [*range(30)]
    assert [one[1:3] for one in to.history()] == [(0, 10), (10, 20), (20, 30)]


def test_a_replayed_chunk_writes_nothing(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink())
    what = at_t0(0, [*numbered(0, 5), Rec(5, bad="no JSON")])
    commit_all(sink, what, fence)
    for again in (sink, to.sink().bind()):  # the second has no memory of the first
        (one,) = commit_all(again, what, fence)
        assert (one.range, one.counts) == (OffsetRange(0, 6), Counts(0, 0, 0, 0))
        assert one.replayed
    assert to.ids() == [0, 1, 2, 3, 4]
    assert to.rejects() == [5]
    assert len(to.history()) == 1


def test_of_an_overlapping_chunk_only_what_is_new_is_written(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink(), BOTH)
    first = [*numbered(0, 4), Rec(4, bad="no JSON")]
    commit_all(sink, at_t0(0, first), fence)
    wider = [*first, Rec(5, bad="still none"), *numbered(6, 9)]
    outcomes = commit_all(sink, chunk({T0: (0, wider), T1: (0, numbered(50, 52))}), fence)
    assert to.ids() == [0, 1, 2, 3, 6, 7, 8, 50, 51]
    assert to.rejects() == [4, 5]
    assert {(one.partition, one.range, one.counts, one.replayed) for one in outcomes} == {
        (T0, OffsetRange(0, 5), NO_RECORDS, True),
        (T0, OffsetRange(5, 9), Counts(4, 3, 1, 0), False),
        (T1, OffsetRange(0, 52), Counts(2, 2, 0, 0), False),
    }


def test_one_partition_replayed_and_one_new(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink(), BOTH)
    commit_all(sink, chunk({T1: (0, numbered(50, 52))}), fence)
    both = chunk({T0: (0, numbered(0, 2)), T1: (0, numbered(50, 52))})
    outcomes = commit_all(sink, both, fence)
    assert to.ids() == [0, 1, 50, 51]
    assert {(one.partition, one.replayed) for one in outcomes} == {(T0, False), (T1, True)}


@pytest.mark.parametrize(
    ("ahead", "match"),
    [
        (at_t0(5, numbered(5, 8)), r"\[0, 5\) were not committed before"),
        (chunk({T1: (0, numbered(0, 2))}), "no position in the ledger"),
    ],
    ids=["offset", "partition"],
)
def test_a_chunk_ahead_of_the_ledger_writes_nothing(
    to: SinkAdapter, ahead: object, match: str
) -> None:
    sink, fence = ready(to.sink())
    with pytest.raises((LedgerWentBack, InvariantViolation), match=match):
        commit_all(sink, ahead, fence)  # type: ignore[arg-type]
    assert to.ids() == []
    assert to.history() == []


def test_a_run_without_an_epoch_of_the_ledger_writes_nothing(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink())
    with pytest.raises((LedgerWentBack, InvariantViolation), match=r"epoch is 1, and ours 2"):
        commit_all(sink, at_t0(0, numbered(0, 2)), Fence(fence.pipeline, fence.epoch + 1))
    assert to.ids() == []


def test_a_moved_position_leaves_nothing(to: SinkAdapter) -> None:
    """The compare-and-set alone: the claim was decided on a ledger that has moved since."""
    sink, fence = ready(to.sink())
    stale = sink.ledger.positions(fence)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    for what in (at_t0(0, numbered(0, 3)), at_t0(0, [*numbered(20, 22), Rec(22, bad="no JSON")])):
        with pytest.raises(PositionMoved):
            commit_on(sink, what, stale, fence)
    assert to.ids() == [0, 1, 2]
    assert to.rejects() == []
    assert len(to.history()) == 1


def test_an_epoch_taken_between_decision_and_commit(to: SinkAdapter) -> None:
    old, fence = ready(to.sink())
    decided = old.ledger.positions(fence)
    take_over(to.sink())
    what = at_t0(0, numbered(0, 3))
    with pytest.raises(PositionMoved):
        asking_again(lambda: commit_on(old, what, decided, fence))
    with pytest.raises(Fenced):
        commit_all(old, what, fence)
    assert to.ids() == []


def test_a_spent_budget_writes_nothing(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink())
    what = at_t0(0, [*numbered(0, 2), Rec(2, bad="a"), Rec(3, bad="b")])
    with pytest.raises(TooManyRejects, match=r"sink.max_rejects") as caught:
        commit_all(sink, what, fence, max_rejects=1)
    assert caught.value.message.count("sink.max_rejects: ") == 1
    assert "raise sink.max_rejects" in caught.value.way_out
    assert to.ids() == to.rejects() == []
    assert [str(one) for one in caught.value.refused.records] == [
        "t-0 offset 2: a; value value",
        "t-0 offset 3: b; value value",
    ]
    commit_all(sink, what, fence, max_rejects=2)
    assert (to.ids(), to.rejects()) == ([0, 1], [2, 3])


def test_the_sink_is_picklable(to: SinkAdapter) -> None:
    """It is shipped to the executors."""
    sink, fence = ready(to.sink())
    commit_all(pickle.loads(pickle.dumps(sink)), at_t0(0, numbered(0, 2)), fence)
    assert to.ids() == [0, 1]
