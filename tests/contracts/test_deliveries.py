"""What each delivery shows when the process dies between its two steps, and when a server is away.

Records and positions on every kind of sink, positions also in every kind of store.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from oncely.commit.path import commit_chunk, pass_over
from oncely.core.claim import Claim, Counts, Notes, RejectCount, Takeover
from oncely.core.ranges import OffsetRange, SourceIdentity
from oncely.errors import Fenced, SourceMismatch, TooManyRejects, Unavailable
from oncely.stores.offsets.base import OffsetStore, StoreLedger
from oncely.stores.offsets.file import FileStore
from oncely.stores.sql.ledger import SqlLedger
from tests.deliverytools import (
    KINDS,
    Crash,
    Hurt,
    Target,
    opened,
    positions_in,
    put,
    ready,
    run_of,
    target,
    twice,
)
from tests.sinktools import SOURCE, T0, T1, Place, Rec, at_t0, commit_all, numbered, sink_to
from tests.storetools import KINDS as STORES
from tests.storetools import Shelf


@pytest.fixture(params=KINDS)
def to(request: pytest.FixtureRequest) -> Iterator[Target]:
    """An empty destination of each kind."""
    yield from target(request.param, request.getfixturevalue)


BY_LEDGER = {False: {"postgresql", "delta"}, True: {"sqlite", "kafka"}}
"""Destinations whose positions are in the ledger, by ``position_first``; else in a store."""


def pairs(*deliveries: bool) -> pytest.MarkDecorator:
    """Each destination with each delivery: :data:`BY_LEDGER`. The rest of the product is long."""
    names = ["to", "where", "position_first"][: 1 + len(deliveries)]
    given = [
        pytest.param(
            *(kind, where, first)[: len(names)],
            marks=[pytest.mark.long] * ((where == "ledger") != (kind in BY_LEDGER[first])),
        )
        for first in deliveries
        for kind in KINDS
        for where in ("ledger", "file")
    ]
    return pytest.mark.parametrize(names, given, indirect=["to", "where"])


@dataclass(frozen=True)
class Where:
    """Where positions live: None for the ledger."""

    make: Callable[[], OffsetStore | None]


@pytest.fixture(params=["ledger", "file"])
def where(request: pytest.FixtureRequest, tmp_path: Any) -> Where:
    """The sink's ledger, and a store."""
    if request.param == "ledger":
        return Where(lambda: None)
    return Where(lambda: FileStore(tmp_path / "positions", "p"))


def restarted(to: Target, where: Where, *, position_first: bool) -> tuple[Any, Any]:
    """What a new process makes of the same settings."""
    return ready(run_of(to.make(), where.make(), position_first=position_first))


# -- a crash between the two steps ---------------------------------------------------------


def test_exactly_once_shows_nothing_of_a_crash(to: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the sink as it is. Its second half fails in the middle of a commit."""
    run, fence = ready(to.make())

    def die(*_: Any, **__: Any) -> None:
        raise Crash

    with monkeypatch.context() as broken:  # between the records and the commit
        if to.kind == "kafka":
            broken.setattr("oncely.kinds.kafka.sink.write_positions", die)
        elif to.kind == "delta":
            broken.setattr("oncely.stores.delta.DeltaTables.commit", die)
        else:
            broken.setattr(SqlLedger, "compare_and_set", die)
        with pytest.raises(Crash):
            commit_all(run, at_t0(0, numbered(0, 5)), fence)
    assert to.ids() == []
    again, fence = ready(to.make())
    assert positions_in(again, fence) == {T0: 0}
    commit_all(again, at_t0(0, numbered(0, 5)), fence)
    assert to.ids() == [*range(5)]


@pairs(False)
def test_at_least_once_writes_the_records_first(to: Target, where: Where) -> None:
    run, fence = restarted(to, where, position_first=False)
    what = at_t0(0, [*numbered(0, 4), Rec(4, bad="no JSON")])
    put(run, store=Hurt(run.context.ledger, "move", Crash()))
    with pytest.raises(Crash):
        commit_all(run, what, fence)
    assert to.ids() == [*range(4)]
    assert to.rejects() == 1
    again, fence = restarted(to, where, position_first=False)
    assert positions_in(again, fence) == {T0: 0}, "the position is where it was"
    (outcome,) = commit_all(again, what, fence)
    assert outcome.counts == Counts(5, 4, 1, 0)
    assert to.ids() == twice(range(4)), "nothing lost, and written again"
    assert positions_in(again, fence) == {T0: 5}


@pairs(True)
def test_at_most_once_moves_the_position_first(to: Target, where: Where) -> None:
    run, fence = restarted(to, where, position_first=True)
    put(run, sink=Hurt(run.context.sink, "commit", Crash()))
    what = at_t0(0, numbered(0, 5))
    with pytest.raises(Crash):
        commit_all(run, what, fence)
    assert to.ids() == []
    again, fence = restarted(to, where, position_first=True)
    assert positions_in(again, fence) == {T0: 5}, "the position is ahead of the records"
    (outcome,) = commit_all(again, what, fence)
    assert outcome.replayed
    assert to.ids() == [], "lost, and nobody tries again"
    commit_all(again, at_t0(5, numbered(5, 8)), fence)
    assert to.ids() == [5, 6, 7]


@pairs(False, True)
def test_without_a_crash_both_are_exact(to: Target, where: Where, position_first: bool) -> None:
    run, fence = restarted(to, where, position_first=position_first)
    for at in range(0, 9, 3):
        what = at_t0(at, [*numbered(at, at + 2), Rec(at + 2, bad="no JSON")])
        assert [one.counts for one in commit_all(run, what, fence)] == [Counts(3, 2, 1, 0)]
        assert [one.replayed for one in commit_all(run, what, fence)] == [True]
    assert to.ids() == [0, 1, 3, 4, 6, 7]
    assert to.rejects() == 3
    assert positions_in(run, fence) == {T0: 9}


@pairs(False, True)
def test_holes_move_positions_alone(to: Target, where: Where, position_first: bool) -> None:
    run, fence = restarted(to, where, position_first=position_first)
    pass_over(run.context.delivery, {T0: OffsetRange(0, 7)}, fence, "hole")
    assert positions_in(run, fence) == {T0: 7}
    assert to.ids() == []


def test_at_least_once_with_every_store(shelf: Shelf, on_sqlite: Place) -> None:
    """The two steps and the crash between them, with each kind of store."""

    def process() -> tuple[Any, Any]:
        return ready(run_of(sink_to(on_sqlite), shelf.make("p")), {T0: 0, T1: 3})

    run, fence = process()
    commit_all(run, at_t0(0, numbered(0, 3)), fence)
    put(run, store=Hurt(run.context.ledger, "move", Crash()))
    with pytest.raises(Crash):
        commit_all(run, at_t0(3, numbered(3, 5)), fence)
    again, fence = process()
    assert fence.epoch == 2
    assert positions_in(again, fence) == {T0: 3, T1: 3}
    commit_all(pickle.loads(pickle.dumps(again.context.delivery)), at_t0(3, numbered(3, 5)), fence)
    assert positions_in(again, fence) == {T0: 5, T1: 3}
    again.close()
    assert positions_in(again, fence) == {T0: 5, T1: 3}, "closed, and connected anew"
    rows = [i for (i,) in on_sqlite.sql("SELECT id FROM rows ORDER BY id")]
    assert rows == [0, 1, 2, 3, 3, 4, 4]


# -- a server that does not answer ---------------------------------------------------------


@pairs(True)
def test_at_most_once_and_a_write_without_an_answer(
    to: Target, where: Where, caplog: pytest.LogCaptureFixture
) -> None:
    """Told, not written again, and the run goes on."""
    run, fence = restarted(to, where, position_first=True)
    records = run.context.sink
    for after, at in ((False, 0), (True, 5)):
        put(run, sink=Hurt(records, "commit", Unavailable("no answer"), after=after))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            (outcome,) = commit_all(run, at_t0(at, numbered(at, at + 5)), fence)
        assert outcome.counts == Counts(0, 0, 0, 0)
        assert f"records of t-0 [{at}, {at + 5}) are lost: no answer" in caplog.text
        assert len(run.context.sink.calls) == 1
    assert to.ids() == [*range(5, 10)], "written, though nobody knew; and only once"
    commit_all(run, at_t0(10, numbered(10, 12)), fence)
    assert to.ids() == [*range(5, 12)]


@pairs(True)
def test_at_most_once_and_a_position_without_an_answer(
    to: Target, where: Where, caplog: pytest.LogCaptureFixture
) -> None:
    """It was moved: asked again, the records are taken for written. That must be told, too."""
    run, fence = restarted(to, where, position_first=True)
    positions = run.context.ledger
    put(run, store=Hurt(positions, "move", Unavailable("no answer"), after=True))
    with caplog.at_level(logging.WARNING):
        (outcome,) = commit_all(run, at_t0(0, numbered(0, 5)), fence)
    assert outcome.replayed
    assert "the records of t-0 [0, 5) are lost if their position was moved" in caplog.text
    put(run, store=Hurt(positions, "move", Unavailable("no answer")))
    commit_all(run, at_t0(5, numbered(5, 8)), fence)
    assert to.ids() == [5, 6, 7], "it was not moved the second time, so they were written"


@pairs(False)
def test_at_least_once_asks_the_ledger_when_a_position_has_no_answer(
    to: Target, where: Where
) -> None:
    run, fence = restarted(to, where, position_first=False)
    put(run, store=Hurt(run.context.ledger, "move", Unavailable("no answer"), after=True))
    commit_all(run, at_t0(0, numbered(0, 5)), fence)
    assert to.ids() == [*range(5)], "it was moved, and nothing is written again"
    records = run.context.sink
    put(run, sink=Hurt(records, "commit", Unavailable("no answer"), after=True))
    commit_all(run, at_t0(5, numbered(5, 7)), fence)
    assert to.ids() == [*range(5), 5, 5, 6, 6], "nobody knew that they were written"


@pairs(False, True)
def test_too_many_rejects_lose_nothing(to: Target, where: Where, position_first: bool) -> None:
    """A mistake in decode is found before the position is moved."""
    run, fence = restarted(to, where, position_first=position_first)
    what = at_t0(0, [*numbered(0, 2), Rec(2, bad="a"), Rec(3, bad="b")])
    with pytest.raises(TooManyRejects, match=r"sink\.max_rejects"):
        commit_all(run, what, fence, max_rejects=1)
    assert positions_in(run, fence) == {T0: 0}
    assert (to.ids(), to.rejects()) == ([], 0)
    commit_all(run, what, fence, max_rejects=2)
    assert (to.ids(), to.rejects()) == ([0, 1], 2)


# -- positions in a store ------------------------------------------------------------------


def test_the_first_start_and_the_later_ones(shelf: Shelf) -> None:
    positions = StoreLedger(shelf.make("p"), "p")
    first = positions.open(Takeover(SOURCE, lambda: {T0: 17}, {T0: 2, T1: 3}))
    assert (first.fence.epoch, first.first_start) == (1, True)
    assert first.positions == {T0: 17, T1: 3}
    second = positions.open(Takeover(SOURCE, never, {T0: 2, T1: 4}))
    assert (second.fence.epoch, second.first_start) == (2, False)
    assert second.positions == {T0: 17, T1: 3}
    moved = positions.open(
        Takeover(SOURCE, never, {T0: 2, T1: 4}, reset=lambda at: {T0: at[T0] - 10})
    )
    assert (moved.fence.epoch, moved.positions) == (3, {T0: 7, T1: 3})


@pytest.mark.parametrize(
    "shelf",
    ["file", *(pytest.param(one, marks=pytest.mark.long) for one in STORES if one != "file")],
    indirect=True,
)
def test_a_store_keeps_no_count_of_rejects(shelf: Shelf) -> None:
    """Each process counts for itself."""
    positions = StoreLedger(shelf.make("p"), "p")
    fence = positions.open(Takeover(SOURCE, lambda: {T0: 17}, {T0: 2})).fence
    positions.note(fence, Notes(counted=RejectCount("10", 1_000, 4)))
    assert positions.open(Takeover(SOURCE, never, {T0: 2})).counted == RejectCount()


def never() -> Any:
    raise AssertionError("start is asked once in a pipeline's life")


def test_another_cluster_or_topic_is_refused(shelf: Shelf) -> None:
    store = shelf.make("p")
    positions = StoreLedger(store, "p")
    positions.open(Takeover(SOURCE, lambda: {T0: 17}, {T0: 2}))
    before = store.load()
    other = SourceIdentity("another", SOURCE.topic_ids)
    again = SourceIdentity("cluster-1", {"t": "another-id", "u": "id-of-u"})
    for source, word in ((other, "another"), (again, "recreated")):
        with pytest.raises(SourceMismatch, match=word):
            positions.open(Takeover(source, never, {T0: 0}))
        with pytest.raises(SourceMismatch, match=word):
            positions.open(Takeover(source, never, {T0: 0}, reset=lambda _: {T0: 0}))
    assert store.load() == before


@pytest.mark.parametrize(
    ("shelf", "position_first"),
    [
        pytest.param(kind, first, marks=[pytest.mark.long] * ((number + first) % 2))
        for number, kind in enumerate(STORES)
        for first in (False, True)
    ],
    indirect=["shelf"],
)
def test_of_two_runs_the_older_is_stopped(
    shelf: Shelf, on_sqlite: Place, position_first: bool
) -> None:
    old, fence = ready(run_of(sink_to(on_sqlite), shelf.make("p"), position_first=position_first))
    commit_all(old, at_t0(0, numbered(0, 3)), fence)
    new, newer = ready(run_of(sink_to(on_sqlite), shelf.make("p"), position_first=position_first))
    with pytest.raises(Fenced):
        commit_all(old, at_t0(3, numbered(3, 5)), fence)
    with pytest.raises(Fenced):
        old.context.ledger.add_partitions(fence, {T1: 0}, SOURCE)
    with pytest.raises(Fenced):
        opened(old, expected=fence.epoch)
    commit_all(new, at_t0(3, numbered(3, 5)), newer)
    assert positions_in(new, newer) == {T0: 5}
    assert on_sqlite.sql("SELECT id FROM rows ORDER BY id") == [(i,) for i in range(5)]


def test_a_newer_run_that_comes_between_the_steps_keeps_its_position(
    shelf: Shelf, on_sqlite: Place
) -> None:
    """The older run's records are written by then: the store fences nobody for certain."""
    old, fence = ready(run_of(sink_to(on_sqlite), shelf.make("p")))
    chunk = at_t0(0, numbered(0, 3))
    claim = Claim(fence, chunk.ranges, old.context.ledger.positions(fence))
    newer = opened(run_of(sink_to(on_sqlite), shelf.make("p"))).fence
    with pytest.raises(Fenced):
        commit_chunk(old.context.delivery, chunk, claim, None)
    assert positions_in(old, newer) == {T0: 0}


def test_a_run_finds_itself_when_the_answer_to_its_takeover_was_lost(
    shelf: Shelf, on_sqlite: Place
) -> None:
    """Else it would take itself for a newer run, and end with "do not restart"."""
    store = Hurt(shelf.make("p"), "save", Unavailable("no answer"), after=True, times=0)
    run, fence = ready(run_of(sink_to(on_sqlite), store))  # type: ignore[arg-type]
    store.times = len(store.calls) + 1
    with pytest.raises(Unavailable):
        opened(run, expected=fence.epoch)
    again = opened(run, expected=fence.epoch)
    commit_all(run, at_t0(0, numbered(0, 3)), again.fence)
    assert positions_in(run, again.fence) == {T0: 3}


def test_a_partition_that_is_added_keeps_what_it_has(shelf: Shelf) -> None:
    positions = StoreLedger(shelf.make("p"), "p")
    fence = positions.open(Takeover(SOURCE, lambda: {T0: 17}, {T0: 2})).fence
    positions.add_partitions(fence, {T0: 1, T1: 9}, SOURCE)
    assert {tp: e.position for tp, e in positions.positions(fence).items()} == {T0: 17, T1: 9}
