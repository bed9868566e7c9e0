"""Two at once: exactly one of them writes, and the other one knows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from oncely.commit.path import commit
from oncely.core.claim import Entry, PositionMoved, Takeover
from tests.contracts.looking import history, ids
from tests.sinktools import (
    SOURCE,
    T0,
    Place,
    at_t0,
    commit_on,
    impatient,
    numbered,
    open_sink,
    ready,
    sink_to,
    together,
)

ROUNDS = 50


def test_of_two_writers_of_one_range_exactly_one_wins(place: Place) -> None:
    """Both have decided on the same ledger before either writes."""
    one, fence = ready(sink_to(place))
    other = replace(one, pipeline="p", run="another process")
    won = []
    for at in range(0, ROUNDS * 3, 3):
        entries = one.ledger.positions(fence)
        assert entries[T0] == Entry(at, fence.epoch, run=fence.run)
        results = at_once(
            lambda sink, at=at, entries=entries: commit_on(
                sink, at_t0(at, numbered(at, at + 3)), entries, fence
            ),
            one,
            other,
        )
        assert sorted(map(kind_of, results)) == ["moved", "won"], results
        won.append([kind_of(r) for r in results].index("won"))
    assert ids(place) == list(range(ROUNDS * 3))
    assert len(history(place)) == ROUNDS


@pytest.mark.parametrize("key", ["", "PRIMARY KEY"], ids=["no key", "key"])
def test_two_writers_by_the_commit_path(place: Place, key: str) -> None:
    """The loser's rows may violate a key: they are a replay, and must not become rejects."""
    if key:
        type_, strict = ("bigint", "") if place.is_postgres else ("INTEGER", " STRICT")
        place.sql(f"CREATE TABLE rows (id {type_} {key}, name TEXT){strict}")
    one, fence = ready(sink_to(place))
    other = replace(one)
    for at in range(0, ROUNDS * 3, 3):
        results = at_once(
            lambda sink, at=at: list(
                commit(together(sink), at_t0(at, numbered(at, at + 3)), fence, None, impatient())
            ),
            one,
            other,
        )
        outcomes = [outcome for result in results for outcome in result]
        assert sorted(o.replayed for o in outcomes) == [False, True], results
    assert ids(place) == list(range(ROUNDS * 3))
    assert place.sql("SELECT COUNT(*) FROM oncely_rejects") == [(0,)]


def test_an_opener_and_a_writer(place: Place) -> None:
    """Whatever the order, rows stand exactly below the position that the new run is given."""
    for _ in range(20):
        sink = sink_to(place)
        before = open_sink(sink)
        sink = sink.bind()
        at = before.positions[T0]
        results = at_once(
            lambda go: go(),
            lambda at=at, fence=before.fence, sink=sink: list(
                commit(together(sink), at_t0(at, numbered(at, at + 3)), fence, None, impatient())
            ),
            lambda: sink_to(place).open(Takeover(SOURCE, dict, {T0: 0})),
        )
        assert not isinstance(results[1], Exception), results
        assert ids(place) == list(range(results[1].positions[T0]))


def at_once(work: Callable[[Any], Any], *who: Any) -> list[Any]:
    """Run ``work(one)`` for each at the same time; answers or exceptions, in order."""
    results: list[Any] = [None] * len(who)
    barrier = threading.Barrier(len(who))

    def run(index: int, one: Any) -> None:
        barrier.wait(180)
        try:
            results[index] = work(one)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(who)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    return results


def kind_of(result: Any) -> str:
    if isinstance(result, PositionMoved):
        return "moved"
    return "won" if isinstance(result, dict) else repr(result)
