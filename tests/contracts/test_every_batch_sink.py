"""What every sink promises to which a driver publishes a batch: all of it, or nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oncely.commit.path import pass_over
from oncely.core.batch import Packet, StagedRowsGone
from oncely.core.claim import PositionMoved
from oncely.core.ranges import OffsetRange
from oncely.errors import Unavailable
from oncely.kinds.base import PacksRows
from oncely.phases import into
from tests.contracts.sinks import (
    BATCHES,
    CHUNKS,
    SinkAdapter,
    adapter,
    ready,
    rows,
    staged_batch,
    take_over,
)
from tests.filestools import publish_all
from tests.sinktools import T0, T1, asking_again, impatient, publish_on, together

BOTH = {T0: 0, T1: 0}
RANGES = {T0: (0, 10), T1: (20, 25)}
BAD = frozenset({4})
IDS = [0, 1, 2, 3, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24]
AT = {T0: 0, T1: 20}


@pytest.fixture(params=BATCHES)
def to(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkAdapter]:
    """An empty destination of each sink."""
    yield from adapter(request.param, request.getfixturevalue, tmp_path)


def untouched(to: SinkAdapter) -> bool:
    """Nothing of a batch is there."""
    return (to.ids(), to.rejects(), to.history(), to.positions()) == ([], [], [], AT)


def published(to: SinkAdapter) -> bool:
    """All of it is there, once."""
    ranges = [(0, 0, 10, "data"), (1, 20, 25, "data")]
    there = to.ids(), to.rejects(), to.history(), to.positions()
    return there == (IDS, [4], ranges, {T0: 10, T1: 25})


def test_rows_rejects_history_and_positions_take_effect_together(to: SinkAdapter) -> None:
    sink, fence = ready(to.staging_sink(), AT)
    shipped = pickle.loads(pickle.dumps(sink))
    if not isinstance(sink, PacksRows):
        sink.begin_batch()
        shipped.stage(fence, 0, 7, [rows(range(0, 9))])  # an attempt that failed afterwards
    batch = staged_batch(sink, fence, RANGES, bad=BAD)
    assert [one.rows for one in batch.staged] == [9, 5]
    assert untouched(to)
    with into(seconds := {}):
        assert not publish_all(sink, batch, fence)
    assert all(seconds[name] > 0 for name in ("write", "commit"))
    assert published(to)
    assert publish_all(sink, batch, fence)  # a replay
    assert published(to)


def test_a_batch_of_no_rows_moves_the_positions(to: SinkAdapter) -> None:
    sink, fence = ready(to.staging_sink())
    batch = staged_batch(sink, fence, {T0: (0, 1)}, bad=frozenset({0}))
    assert batch.rows == 0
    assert not publish_all(sink, batch, fence)
    assert (to.ids(), to.rejects(), to.positions()) == ([], [0], {T0: 1})


def test_published_twice_takes_effect_once(to: SinkAdapter) -> None:
    sink, fence = ready(to.staging_sink(), AT)
    batch = staged_batch(sink, fence, RANGES, bad=BAD)
    decided = sink.ledger.positions(fence)
    publish_on(sink, batch, decided, fence)
    with pytest.raises((PositionMoved, Unavailable)):
        publish_on(sink, batch, decided, fence)
    assert published(to)


def test_a_position_that_moved_leaves_nothing(to: SinkAdapter) -> None:
    sink, fence = ready(to.staging_sink(), AT)
    batch = staged_batch(sink, fence, RANGES, bad=BAD)
    decided = sink.ledger.positions(fence)
    pass_over(together(sink), {T1: OffsetRange(20, 22)}, fence, "hole", impatient())
    with pytest.raises(PositionMoved):
        publish_on(sink, batch, decided, fence)
    assert (to.ids(), to.rejects()) == ([], [])
    assert to.positions() == {T0: 0, T1: 22}


def test_a_newer_run_fences_a_publication(to: SinkAdapter) -> None:
    old, fence = ready(to.staging_sink(), AT)
    batch = staged_batch(old, fence, RANGES, bad=BAD)
    decided = old.ledger.positions(fence)
    new, newer = ready(to.staging_sink(), AT)
    for _ in range(2):
        with pytest.raises((PositionMoved, Unavailable)):
            asking_again(lambda: publish_on(old, batch, decided, fence))
        assert untouched(to)
        if not isinstance(new, PacksRows):
            new.sweep(newer)
    assert not publish_all(new, staged_batch(new, newer, RANGES, bad=BAD), newer)
    assert published(to)


@pytest.mark.parametrize("to", [one for one in CHUNKS if one != "delta"], indirect=True)
def test_rows_that_end_early_publish_nothing(to: SinkAdapter) -> None:
    """Spark has lost the rest, after some were written."""
    sink, fence = ready(to.staging_sink(), AT)
    batch = staged_batch(sink, fence, RANGES, bad=BAD)

    def ending() -> Iterator[Packet]:
        yield next(batch.packets())
        raise StagedRowsGone("the rest is lost")

    with pytest.raises(StagedRowsGone):
        publish_all(sink, replace(batch, packets=ending), fence)
    assert untouched(to)
    assert not publish_all(sink, batch, fence)
    assert published(to)


def test_a_batch_after_a_hole(to: SinkAdapter) -> None:
    sink, fence = ready(to.staging_sink())
    pass_over(together(sink), {T0: OffsetRange(0, 3)}, fence, "hole", impatient())
    assert not publish_all(sink, staged_batch(sink, fence, {T0: (3, 6)}), fence)
    assert to.history() == [(0, 0, 3, "hole"), (0, 3, 6, "data")]


def test_runs_of_both_kinds_in_turn(to: SinkAdapter) -> None:
    """A run that commits by chunks, and one whose tasks stage, take over from each other."""
    at = 0
    for run in range(4):
        sink = to.sink() if run % 2 else to.staging_sink()
        opened = take_over(sink)
        assert opened.positions == {T0: at}
        sink = sink.bind()
        if run % 2:
            assert not to.write(sink, opened.fence, at, at + 5)
        else:
            batch = staged_batch(sink, opened.fence, {T0: (at, at + 5)})
            assert not publish_all(sink, batch, opened.fence)
        at += 5
    assert to.ids() == [*range(20)]
    assert to.positions() == {T0: 20}
