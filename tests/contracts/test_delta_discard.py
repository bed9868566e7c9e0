"""Discarded dead letters of a Delta table: without content in any file, and still accounted for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from oncely.commit.backoff import Backoff
from oncely.commit.change import replay
from oncely.core.batch import DISCARDED, Reject
from oncely.errors import Unavailable, WrongInput
from oncely.kinds.delta.change import DeltaReplay, discard_letters
from oncely.kinds.delta.sink import DeltaSink
from oncely.pipeline.rejects import RejectFilter
from oncely.pipeline.rejects import discard as discard_by
from oncely.stores.delta import DeltaTables
from tests.contracts.test_audit_delta import BAD, COMMITS, EACH, World, a_world
from tests.deltatools import Committing, DeltaPlace, make_place
from tests.replaytools import bad, judging, pipeline_of
from tests.sinktools import SOURCE, T0, Rec, Takeover, at_t0, commit_all, numbered, ready

ALL = RejectFilter()


@pytest.fixture
def place(tmp_path: Path) -> DeltaPlace:
    """Two files of dead letters: 1 to 3, and 5 to 7."""
    place = make_place(tmp_path)
    sink, fence = ready(Committing(place.sink()), {T0: 0})
    commit_all(sink, at_t0(0, [*numbered(0, 1), *bad(1, 2, 3)]), fence)
    commit_all(sink, at_t0(4, [*numbered(4, 5), *bad(5, 6, 7)]), fence)
    return place


def odd(one: Reject) -> bool:
    return one.offset % 2 == 1


def discard(sink: DeltaSink, which: Callable[[Reject], bool] = odd) -> int:
    """As the pipeline does, until the outcome is known."""
    chosen: Any = which
    return discard_by(pipeline_of(partial(discard_letters, sink)), chosen, execute=True).total


def replayed(sink: DeltaSink, at_once: int = 100) -> tuple[int, int]:
    done = replay(DeltaReplay(sink), judging(), Backoff(0.01, 0.1, 10), at_once)
    return done.moved, done.kept


def states(place: DeltaPlace) -> tuple[list[int], list[int]]:
    """The offsets of pending and of discarded dead letters.

    The ledger's counts are of the pending ones, and no file below the root, named by the ledger or
    not, has content of the others.
    """
    ledger = place.sink().ledger
    named = ledger.read().document.rejects
    letters = [one for path, _ in named for one in ledger.letters(path)]
    pending, gone = (
        sorted(one.offset for one in letters if one.pending is wanted) for wanted in (True, False)
    )
    assert sum(count for _, count in named) == len(pending)
    for file in (place.root / "_oncely").rglob("*.parquet"):
        for row in pq.read_table(file).to_pylist():
            if row["offset"] in gone:
                kept = row["key"], row["value"], row["headers"], row["stage"]
                assert kept == (None, None, [], DISCARDED)
    return pending, gone


def test_content_is_removed(place: DeltaPlace) -> None:
    assert discard_letters(place.sink(), odd, False) == {"no JSON": 4}
    assert states(place) == ([1, 2, 3, 5, 6, 7], [])
    before = place.table.version()
    assert discard(place.sink()) == 4
    assert states(place) == ([2, 6], [1, 3, 5, 7])
    assert place.table.version() == before + 1
    assert discard(place.sink()) == 0
    assert place.table.version() == before + 1


def test_others_than_were_shown_stay(place: DeltaPlace) -> None:
    pipeline = pipeline_of(partial(discard_letters, place.sink()))
    was = discard_by(pipeline, ALL, execute=False).shown
    discard(place.sink(), lambda one: one.offset == 1)
    with pytest.raises(WrongInput, match="are not those that the dry run has shown"):
        discard_by(pipeline, ALL, execute=True, shown=was)
    assert states(place) == ([2, 3, 5, 6, 7], [1])
    now = discard_by(pipeline, ALL, execute=False).shown
    assert discard_by(pipeline, ALL, execute=True, shown=now).total == 5
    assert states(place) == ([], [1, 2, 3, 5, 6, 7])


def test_only_pending_ones_are_replayed(place: DeltaPlace) -> None:
    discard(place.sink(), lambda one: one.offset in (1, 3, 5, 6, 7))
    assert replayed(place.sink(), 1) == (1, 0)
    assert place.ids() == [0, 2, 4]
    assert states(place) == ([], [1, 3, 5, 6, 7])


def test_a_kept_dead_letter_is_tried_once(place: DeltaPlace) -> None:
    discard(place.sink(), lambda one: one.offset == 1)
    judge = judging(lambda one: one.offset != 2)
    done = replay(DeltaReplay(place.sink()), judge, Backoff(0.01, 0.1, 10), 1)
    assert (done.moved, done.kept) == (4, 1)
    assert place.ids() == [0, 3, 4, 5, 6, 7]
    assert states(place) == ([2], [1])


def test_a_reset_keeps_those_before_it(place: DeltaPlace) -> None:
    discard(place.sink())
    back = Takeover(SOURCE, lambda: {}, {T0: 0}, reset=lambda _: {T0: 3})
    place.sink().open(back)
    place.sink().ledger.tidy(place.sink().open(Takeover(SOURCE, lambda: {}, {T0: 0})).fence)
    assert states(place) == ([2], [1])


def test_a_lost_answer(place: DeltaPlace) -> None:
    class Losing(DeltaTables):
        lost = False

        def commit(self, table: Any, change: Any) -> None:
            super().commit(table, change)
            if not Losing.lost:
                Losing.lost = True
                raise Unavailable("no answer")

    discard(place.sink(delta=Losing))
    assert Losing.lost
    assert states(place) == ([2, 6], [1, 3, 5, 7])


def beside(meanwhile: Callable[[], object]) -> Any:
    """A client that does something before its first commit."""

    class Interrupted(DeltaTables):
        done = False

        def commit(self, table: Any, change: Any) -> None:
            if not Interrupted.done:
                Interrupted.done = True
                meanwhile()
            super().commit(table, change)

    return Interrupted


def test_a_replay_beside_a_discard(place: DeltaPlace) -> None:
    sink = place.sink(delta=beside(lambda: replayed(place.sink())))
    assert discard(sink, lambda _: True) == 0
    assert place.ids() == [*range(8)]
    assert states(place) == ([], [])


def test_a_discard_beside_a_replay(place: DeltaPlace) -> None:
    """The replay leaves the files that the discard has replaced."""
    sink = place.sink(delta=beside(lambda: discard(place.sink(), lambda one: one.offset < 3)))
    assert replayed(sink) == (3, 0)
    assert place.ids() == [0, 4, 5, 6, 7]
    assert states(place) == ([3], [1, 2])


@pytest.mark.parametrize("keep_source", [False, True], ids=["by commit", "by offset"])
def test_an_audit_is_clean(tmp_path: Path, keep_source: bool) -> None:
    """Also after a replay of a dead letter that was beside a discarded one."""
    world = a_world(tmp_path, keep_source=keep_source)
    at = COMMITS * EACH
    commit_all(world.sink, at_t0(at, records := bad(at, at + 1)), world.fence)
    world.topic.records = {**world.topic.records, T0: [*world.topic.records[T0], *records]}
    sink = world.sink.inner
    assert discard(sink, lambda one: one.offset in (BAD, at)) == 2
    assert_clean(world, keep_source)
    judge = judging(lambda one: one.offset == at + 1)
    done = replay(DeltaReplay(sink), judge, Backoff(0.01, 0.1, 10), 100)
    assert (done.moved, done.kept) == (1, COMMITS - 1)
    again = Rec(at + 1, ({"id": at + 1, "name": "again"},))
    world.topic.records = {**world.topic.records, T0: [*world.topic.records[T0][:-1], again]}
    assert_clean(world, keep_source)


def assert_clean(world: World, keep_source: bool) -> None:
    if keep_source:
        report = world.by_offset()
        assert report.verdict == "clean", report.as_json()
        return
    for download in (False, True):
        found = world.audit(download=download)
        assert found.is_clean, (found.findings, found.reasons)
