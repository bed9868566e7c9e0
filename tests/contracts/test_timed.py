"""No guarantee: positions go by a timer, by the clock or by the records handed out."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from oncely.commit.run import Interval, OpenLedger, save
from oncely.core.claim import Counts, Fence
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Unavailable
from oncely.stores.document import Ledger
from oncely.stores.offsets.base import StoredPosition
from oncely.stores.offsets.file import FileStore
from tests.deliverytools import KINDS, Hurt, Target, opened, positions_in, ready, run_of, target
from tests.sinktools import T0, T1, Place, at_t0, chunk, commit_all, numbered, sink_to


@pytest.fixture(params=KINDS)
def to(request: pytest.FixtureRequest) -> Iterator[Target]:
    """An empty destination of each kind."""
    yield from target(request.param, request.getfixturevalue)


@dataclass
class Heard:
    """A store that tells of every save. Not picklable, and need not be: tasks never save."""

    inner: FileStore
    saves: list[Mapping[TopicPartition, StoredPosition]] = field(default_factory=list)
    saved: threading.Event = field(default_factory=threading.Event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def save(self, positions: Mapping[TopicPartition, StoredPosition]) -> None:
        self.inner.save(positions)
        if positions:
            self.saves.append(positions)
            self.saved.set()


def timed(sink: Any, store: Any = None, **when: Any) -> OpenLedger[Any]:
    """Not opened."""
    return run_of(sink, store, interval=Interval(**when))


@pytest.fixture
def heard(tmp_path: Any) -> Heard:
    return Heard(FileStore(tmp_path / "positions", "p"))


@pytest.fixture
def by_hand(on_sqlite: Place, heard: Heard) -> Iterator[tuple[OpenLedger[Any], Fence]]:
    """A run whose timer fires at the end only."""
    run, fence = ready(timed(sink_to(on_sqlite), heard, seconds=3600.0), {T0: 0, T1: 0})
    heard.saves.clear()
    heard.saved.clear()
    yield run, fence
    run.close()


def upto(t0: int, t1: int = 0, start: int = 0) -> dict[TopicPartition, OffsetRange]:
    """Ranges of a batch."""
    ends = {T0: t0, T1: t1}
    return {tp: OffsetRange(start, end) for tp, end in ends.items() if end > start}


def test_records_and_positions_on_every_sink(to: Target) -> None:
    run, fence = ready(timed(to.make(), seconds=3600.0), {T0: 0, T1: 0})
    part = run.for_batch(upto(5, 3))
    task = pickle.loads(pickle.dumps(part))
    parts = {T0: (0, numbered(0, 5)), T1: (0, numbered(10, 13))}
    done = commit_all(task, chunk(parts), fence)
    assert {one.partition: one.counts for one in done} == {
        T0: Counts(5, 5, 0, 0),
        T1: Counts(3, 3, 0, 0),
    }
    assert to.ids() == [*range(5), 10, 11, 12]
    assert positions_in(run, fence) == {T0: 0, T1: 0}, "written, and no position was moved"
    run.close()
    assert positions_in(run, fence) == {T0: 5, T1: 3}


def test_a_crash_after_the_timer_loses_and_one_before_it_doubles(to: Target) -> None:
    """Not a defect: it is what ``none`` says."""
    lost, fence = ready(timed(to.make(), offsets=1, seconds=None))
    lost.for_batch({T0: OffsetRange(0, 5)})  # the process dies here, and nothing was written
    assert positions_in(lost, fence) == {T0: 5}
    doubled, fence = ready(timed(to.make(), offsets=1_000, seconds=None))
    for _ in range(2):
        task = doubled.for_batch({T0: OffsetRange(5, 7)})
        commit_all(task, at_t0(5, numbered(5, 7)), fence)  # and here, before the timer
        doubled, fence = ready(timed(to.make(), offsets=1_000, seconds=None))
    assert to.ids() == [5, 5, 6, 6]


def test_by_the_clock(on_sqlite: Place, heard: Heard) -> None:
    run, fence = ready(timed(sink_to(on_sqlite), heard, seconds=0.05))
    try:
        for end in (5, 9):
            heard.saved.clear()
            run.for_batch({T0: OffsetRange(0, end)})
            assert heard.saved.wait(180)
            assert positions_in(run, fence) == {T0: end}
        heard.saved.clear()
        assert not heard.saved.wait(0.3), "nothing new was handed out"
    finally:
        run.close()
    assert len(heard.saves) == 3, "the opening, and once for each hand-out"


def test_by_the_number_of_records(on_sqlite: Place, heard: Heard) -> None:
    run, fence = ready(timed(sink_to(on_sqlite), heard, seconds=None, offsets=10), {T0: 0, T1: 0})
    seen = []
    for batch in (upto(4), upto(0, 6), upto(5, start=4), upto(0, 15, start=6)):
        run.for_batch(batch)
        seen.append(positions_in(run, fence))
    # 4; 4 + 6: due; 1; 1 + 9: due.
    assert seen == [{T0: 0, T1: 0}, {T0: 4, T1: 6}, {T0: 4, T1: 6}, {T0: 5, T1: 15}]
    assert run._timer
    assert run._timer._thread is None
    run.for_batch(upto(7, start=5))
    run.close()
    assert positions_in(run, fence) == {T0: 7, T1: 15}, "what was not due is saved at the end"


def test_the_last_save_comes_with_an_orderly_end_and_only_once(
    by_hand: tuple[OpenLedger[Any], Fence], heard: Heard
) -> None:
    run, fence = by_hand
    run.for_batch(upto(5, 3))
    run.for_batch(upto(8))
    assert heard.saves == []
    assert run._timer
    assert run._timer._thread
    thread = run._timer._thread
    run.close()
    assert not thread.is_alive()
    assert positions_in(run, fence) == {T0: 8, T1: 3}
    assert len(heard.saves) == 1
    run.close()
    assert len(heard.saves) == 1


def test_a_position_never_goes_back(by_hand: tuple[OpenLedger[Any], Fence], heard: Heard) -> None:
    """A batch that is handed out again after a failed one ends where positions stand already."""
    run, fence = by_hand
    save(run.context.ledger, fence, {T0: 8})
    save(run.context.ledger, fence, {T0: 5})
    save(run.context.ledger, fence, {T0: 8})
    assert positions_in(run, fence) == {T0: 8, T1: 0}
    assert len(heard.saves) == 1


def test_a_partition_without_a_position_is_left_alone(
    by_hand: tuple[OpenLedger[Any], Fence], heard: Heard
) -> None:
    run, fence = by_hand
    save(run.context.ledger, fence, {TopicPartition("t", 3): 8, T0: 2})
    assert positions_in(run, fence) == {T0: 2, T1: 0}


def test_a_save_without_an_answer_is_made_up_for(
    by_hand: tuple[OpenLedger[Any], Fence], caplog: pytest.LogCaptureFixture
) -> None:
    run, fence = by_hand
    hurt = Hurt(run.context.ledger, "move", Unavailable("no answer"))
    assert run._timer
    run._timer.begin(cast(Ledger, hurt), fence)
    run.for_batch(upto(5, 3))
    assert run._timer
    with caplog.at_level(logging.WARNING):
        run._timer._save()
    assert "positions were not saved, and are saved again later: no answer" in caplog.text
    run.for_batch(upto(8))
    run.close()
    assert positions_in(run, fence) == {T0: 8, T1: 3}


def test_a_run_that_was_taken_over_moves_nothing(
    to: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when its timer fires late."""
    old, _ = ready(timed(to.make(), seconds=3600.0))
    old.for_batch({T0: OffsetRange(0, 5)})
    new, newer = ready(timed(to.make(), seconds=3600.0))
    with caplog.at_level(logging.WARNING):
        old.close()
    assert positions_in(new, newer) == {T0: 0}
    assert f"epoch {newer.epoch}" in caplog.text
    assert "saved again later" not in caplog.text
    assert "another epoch's entry" not in caplog.text, "it is no defect"


def test_opening_again_forgets_what_was_handed_out(
    by_hand: tuple[OpenLedger[Any], Fence],
) -> None:
    """A batch has failed: what it was to read is read again from where positions stand."""
    run, fence = by_hand
    run.for_batch(upto(5, 3))
    again = opened(run, {T0: 0, T1: 0}, expected=fence.epoch).fence
    run.close()
    assert positions_in(run, again) == {T0: 0, T1: 0}
