"""What the ledger of every sink promises: epochs, positions, notes, resets."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oncely.commit.path import pass_over
from oncely.core.claim import (
    NO_RECORDS,
    Claim,
    Notes,
    PositionMoved,
    Positions,
    RangeKind,
    Takeover,
)
from oncely.core.ranges import OffsetRange, SourceIdentity, TopicPartition
from oncely.errors import Fenced, SourceMismatch, Unavailable
from tests.contracts.sinks import ALL, SinkAdapter, adapter, ready, take_over
from tests.sinktools import SOURCE, T0, T1, T2, asking_again, impatient, together

BOTH = {T0: 0, T1: 0}
U0 = TopicPartition("u", 0)


@pytest.fixture(params=ALL)
def to(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkAdapter]:
    """An empty destination of each sink."""
    yield from adapter(request.param, request.getfixturevalue, tmp_path)


# -- opening -------------------------------------------------------------------------------


def test_start_is_asked_once_and_positions_are_kept(to: SinkAdapter) -> None:
    sink = to.sink()
    first = take_over(sink, {T0: 7, T1: 200})
    assert (first.fence.epoch, dict(first.positions)) == (1, {T0: 7, T1: 200})
    assert first.first_start
    assert first.begun == {T0, T1}
    to.write(sink.bind(), first.fence, 7, 9)

    def start() -> Positions:
        pytest.fail("start was asked again")

    again = to.sink().open(Takeover(SOURCE, start, {T0: 0, T1: 0}))
    assert (again.fence.epoch, dict(again.positions)) == (2, {T0: 9, T1: 200})
    assert not again.first_start
    assert not again.begun
    assert to.positions() == {T0: 9, T1: 200}


def test_a_partition_seen_later_begins_at_its_first_offset(to: SinkAdapter) -> None:
    take_over(to.sink(), {T0: 100})
    opened = take_over(to.sink(), {T0: 5, T1: 7, T2: 0})
    assert opened.positions == {T0: 100, T1: 7, T2: 0}
    assert opened.begun == {T1, T2}


def test_a_partition_found_while_running(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink())
    sink.ledger.add_partitions(fence, {T1: 9, T0: 77}, SOURCE)
    assert {tp: one.position for tp, one in sink.ledger.positions(fence).items()} == {T0: 0, T1: 9}
    sink.ledger.add_partitions(fence, {T1: 0}, SOURCE)  # it has one already
    to.write(sink, fence, 9, 12, T1)
    assert to.positions() == {T0: 0, T1: 12}


def test_a_partition_that_a_fenced_run_finds_is_the_newer_runs(to: SinkAdapter) -> None:
    old, fence = ready(to.sink())
    new, newer = ready(to.sink())
    with pytest.raises(Fenced):
        asking_again(lambda: old.ledger.add_partitions(fence, {T0: 0}, SOURCE))
    with contextlib.suppress(Fenced):  # a topic's position is taken over when the new run adds it
        asking_again(lambda: old.ledger.add_partitions(fence, {T2: 0}, SOURCE))
    new.ledger.add_partitions(newer, {T2: 0}, SOURCE)
    with pytest.raises(Fenced):
        asking_again(lambda: to.write(old, fence, 0, 3, T2))
    to.write(new, newer, 0, 2, T2)
    assert to.ids() == [0, 1]


def test_a_further_topic_is_taken_in(to: SinkAdapter) -> None:
    take_over(to.sink(), source=SourceIdentity(SOURCE.cluster_id, {"t": SOURCE.topic_ids["t"]}))
    assert take_over(to.sink(), {T0: 0, U0: 4}).positions == {T0: 0, U0: 4}


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (SourceIdentity("cluster-2", SOURCE.topic_ids), r"'cluster-1'.*'cluster-2'"),
        (SourceIdentity("cluster-1", {"t": "another-id", "u": "id-of-u"}), "recreated"),
    ],
    ids=["cluster", "topic"],
)
def test_another_source_is_refused(to: SinkAdapter, other: SourceIdentity, match: str) -> None:
    sink, fence = ready(to.sink())
    with pytest.raises(SourceMismatch, match=match) as caught:
        take_over(to.sink(), source=other)
    assert "new name" in caught.value.way_out
    to.write(sink, fence, 0, 2)  # the run goes on
    assert take_over(to.sink()).positions == {T0: 2}


# -- fencing -------------------------------------------------------------------------------


def test_a_newer_run_fences_the_older(to: SinkAdapter) -> None:
    old, fence = ready(to.sink())
    to.write(old, fence, 0, 3)
    new, newer = ready(to.sink())
    with pytest.raises(Fenced) as caught:
        asking_again(lambda: to.write(old, fence, 3, 6))
    assert (caught.value.ours, caught.value.theirs) == (fence.epoch, newer.epoch)
    with pytest.raises(Fenced):
        take_over(old, expected=fence.epoch)
    assert to.ids() == [0, 1, 2]
    to.write(new, newer, 3, 6)
    assert to.ids() == [*range(6)]


def test_a_move_decided_before_a_takeover_moves_nothing(to: SinkAdapter) -> None:
    old, fence = ready(to.sink())
    claim = Claim(fence, {T0: OffsetRange(0, 5)}, old.ledger.positions(fence), "hole")
    new, newer = ready(to.sink())
    with pytest.raises(PositionMoved):
        asking_again(lambda: old.ledger.move(claim, {T0: NO_RECORDS}))
    assert to.positions() == {T0: 0}
    to.write(new, newer, 0, 3)
    assert to.ids() == [0, 1, 2]


def test_a_run_opens_again_unless_a_newer_one_has(to: SinkAdapter) -> None:
    ours = to.sink()
    first = take_over(ours).fence.epoch
    second = take_over(ours, expected=first).fence.epoch
    newer = to.sink()
    third = take_over(newer).fence.epoch
    assert first < second < third
    with pytest.raises(Fenced) as caught:
        take_over(ours, expected=second)
    assert (caught.value.ours, caught.value.theirs) == (second, third)
    assert take_over(newer, expected=third).fence.epoch > third


def test_runs_that_open_at_the_same_time(to: SinkAdapter) -> None:
    """Each gets an epoch of its own, or an error. The newest alone writes."""
    take_over(to.sink(), {T0: 0, T1: 5})
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(take_over, to.sink(), {T0: 1, T1: 1}) for _ in range(3)]
    for one in asked:
        assert one.exception() is None or isinstance(one.exception(), Fenced | Unavailable)
    won = [one.result() for one in asked if one.exception() is None]
    newest, fence = ready(to.sink(), {T0: 7, T1: 7})
    epochs = [one.fence.epoch for one in won] + [fence.epoch]
    assert len(set(epochs)) == len(epochs)
    assert fence.epoch == max(epochs)
    assert to.positions() == {T0: 0, T1: 5}
    for one in won:
        with pytest.raises(Fenced):
            asking_again(lambda old=one.fence: to.write(to.sink().bind(), old, 0, 2))
    to.write(newest, fence, 0, 2)
    assert to.ids() == [0, 1]


# -- ranges without records ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hole", "gap"])
def test_ranges_that_hold_no_records(to: SinkAdapter, kind: RangeKind) -> None:
    sink, fence = ready(to.sink(), {T0: 0, T1: 3})
    to.write(sink, fence, 0, 2)
    nothing = {T0: OffsetRange(2, 9), T1: OffsetRange(3, 4)}
    for replayed in (False, True):
        done = pass_over(together(sink), nothing, fence, kind, impatient())
        assert {one.replayed for one in done} == {replayed}
    assert to.positions() == {T0: 9, T1: 4}
    assert to.history() == [(0, 0, 2, "data"), (0, 2, 9, kind), (1, 3, 4, kind)]


def test_a_hole_that_is_closed_in_part_already(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink(), BOTH)
    for ends in ({T0: 4}, {T0: 9, T1: 2}):
        nothing = {tp: OffsetRange(0, end) for tp, end in ends.items()}
        pass_over(together(sink), nothing, fence, "hole", impatient())
    assert to.positions() == {T0: 9, T1: 2}


# -- resets --------------------------------------------------------------------------------


def test_a_reset_back_and_forward(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink(), BOTH)
    to.write(sink, fence, 0, 5)
    to.write(sink, fence, 5, 10)
    assert take_over(to.sink(), BOTH, reset=lambda _: {T0: 5}).positions == {T0: 5, T1: 0}
    sink, fence = ready(to.sink(), BOTH)
    assert not to.write(sink, fence, 5, 10)
    assert to.ids() == [*range(5), *itertools.chain(*((n, n) for n in range(5, 10)))]
    take_over(to.sink(), BOTH, reset=lambda _: {T0: 50})
    sink, fence = ready(to.sink(), BOTH)
    to.write(sink, fence, 50, 51)
    assert to.positions() == {T0: 51, T1: 0}


def test_a_reset_fences_what_still_runs(to: SinkAdapter) -> None:
    old, fence = ready(to.sink(), BOTH)
    to.write(old, fence, 0, 10)
    take_over(to.sink(), BOTH, reset=lambda _: {T0: 0})
    for start, end in ((10, 12), (0, 10)):
        with pytest.raises(Fenced):
            asking_again(lambda start=start, end=end: to.write(old, fence, start, end))
    assert to.ids() == [*range(10)]


def test_a_reset_is_asked_where_the_old_run_has_ended(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink(), BOTH)
    to.write(sink, fence, 0, 7)
    to.write(sink, fence, 0, 2, T1)
    seen = []

    def shift(positions: Positions) -> Positions:
        seen.append(dict(positions))
        return {tp: max(0, at - 3) for tp, at in positions.items()}

    assert take_over(to.sink(), BOTH, reset=shift).positions == {T0: 4, T1: 0}
    assert seen == [{T0: 7, T1: 2}]


def test_a_reset_into_the_middle_of_a_committed_range(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink(), BOTH)
    to.write(sink, fence, 0, 10)
    take_over(to.sink(), BOTH, reset=lambda _: {T0: 4})
    sink, fence = ready(to.sink(), BOTH)
    assert not to.write(sink, fence, 4, 6)
    assert to.positions() == {T0: 6, T1: 0}


def test_a_reset_of_a_pipeline_that_never_ran(to: SinkAdapter) -> None:
    moved = take_over(to.sink(), BOTH, reset=lambda _: {T0: 33})
    assert moved.positions == {T0: 33, T1: 0}
    opened = take_over(to.sink(), {T0: 1, T1: 1})
    assert not opened.first_start
    assert opened.positions == {T0: 33, T1: 0}


# -- notes ---------------------------------------------------------------------------------


def noted(to: SinkAdapter) -> dict[TopicPartition, int]:
    """The leader epochs that the next run finds."""
    return dict(take_over(to.sink(), BOTH).leader_epochs)


def test_leader_epochs_outlive_commits_and_runs(to: SinkAdapter) -> None:
    take_over(to.sink(), BOTH)
    assert noted(to) == {}
    sink, fence = ready(to.sink(), BOTH)
    sink.ledger.note(fence, Notes(leader_epochs={T0: 3, T1: 5}))
    sink.ledger.note(fence, Notes(leader_epochs={T0: 4}))
    to.write(sink, fence, 0, 3)
    assert noted(to) == {T0: 4, T1: 5}
    assert noted(to) == {T0: 4, T1: 5}


def test_a_fenced_run_notes_nothing(to: SinkAdapter) -> None:
    old, fence = ready(to.sink(), BOTH)
    old.ledger.note(fence, Notes(leader_epochs={T0: 3, T1: 5}))
    new, newer = ready(to.sink(), BOTH)
    new.ledger.note(newer, Notes(leader_epochs={T0: 9}))
    with pytest.raises(Fenced):
        asking_again(lambda: old.ledger.note(fence, Notes(leader_epochs={T0: 1, T1: 1})))
    assert noted(to) == {T0: 9, T1: 5}


def test_a_reset_forgets_the_leader_epochs_that_it_moves(to: SinkAdapter) -> None:
    sink, fence = ready(to.sink(), BOTH)
    sink.ledger.note(fence, Notes(leader_epochs={T0: 3, T1: 5}))
    take_over(to.sink(), BOTH, reset=lambda _: {T0: 0})
    assert noted(to) == {T1: 5}
