"""What each delivery shows of files when the process dies between naming them and the position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncely.commit.run import Interval
from oncely.core.claim import Fence
from oncely.errors import Unavailable
from oncely.testing.servers.kafka import Broker
from tests.deliverytools import Crash, Hurt, positions_in, put, ready, run_of
from tests.filestools import ENDS, IDS, START, FilesPlace, make_place, publish_all, stage, what
from tests.kafkatools import SHARED_LEDGER

_LONG_AGO = 10_000.0  # seconds; more than sink.max_staging_age


@pytest.fixture
def place(broker: Broker, tmp_path: Path) -> FilesPlace:
    return make_place(broker, tmp_path, SHARED_LEDGER)


def started(place: FilesPlace, *, position_first: bool) -> tuple[Any, Fence]:
    """What a new process makes of the same settings."""
    return ready(run_of(place.sink(), position_first=position_first), START)


def batch(sink: Any, fence: Fence) -> bool:
    """The batch, staged anew and published; whether there was nothing to do."""
    delivery = sink.for_batch(what([]).ranges)
    sink.context.sink.begin_batch()
    return publish_all(delivery, what(stage(sink.context.sink, fence)), fence)


def test_at_least_once_names_files_first(place: FilesPlace) -> None:
    sink, fence = started(place, position_first=False)
    put(sink, store=Hurt(sink.context.ledger, "move", Crash()))
    with pytest.raises(Crash):
        batch(sink, fence)
    assert place.ids() == IDS
    again, fence = started(place, position_first=False)
    assert positions_in(again, fence) == START
    assert not batch(again, fence)
    assert place.ids() == sorted(2 * IDS), "nothing lost, and named again in files of their own"
    assert positions_in(again, fence) == ENDS


def test_at_most_once_moves_the_position_first(
    place: FilesPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, fence = started(place, position_first=True)

    def die(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr(sink.context.sink, "publish", die)
    with pytest.raises(Crash):
        batch(sink, fence)
    again, fence = started(place, position_first=True)
    assert positions_in(again, fence) == ENDS
    assert batch(again, fence), "taken for written"
    assert place.ids() == [], "lost, and nobody tries again"


@pytest.mark.parametrize("position_first", [False, True])
def test_files_are_no_older_than_their_batch(place: FilesPlace, position_first: bool) -> None:
    """A run that is older than ``max_staging_age`` goes on: what counts is when a batch began."""
    sink, fence = started(place, position_first=position_first)
    sink.context.sink._began -= _LONG_AGO
    assert not batch(sink, fence)
    assert place.ids() == IDS
    assert positions_in(sink, fence) == ENDS


def test_without_a_guarantee_neither(place: FilesPlace) -> None:
    records = place.sink()
    sink, fence = ready(run_of(records, interval=Interval(seconds=3600.0)), START)
    records._began -= _LONG_AGO
    try:
        assert not batch(sink, fence)
        assert place.ids() == IDS
        assert positions_in(sink, fence) == START, "named, and no position was moved"
    finally:
        sink.close()
    assert positions_in(sink, fence) == ENDS


def test_files_that_may_have_been_vacuumed_are_not_named(place: FilesPlace) -> None:
    """The control of the two above: the age does count."""
    sink, fence = started(place, position_first=False)
    staged = stage(sink.context.sink, fence)
    sink.context.sink._began -= _LONG_AGO
    with pytest.raises(Unavailable, match="max_staging_age"):
        publish_all(sink.context.delivery, what(staged), fence)
    assert place.ids() == []
    assert positions_in(sink, fence) == START
