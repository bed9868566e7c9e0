"""The history is kept small by joining old neighbours; evidence is never joined."""

from __future__ import annotations

import pytest

from oncely.commit.path import pass_over
from oncely.core.ranges import OffsetRange
from oncely.errors import Fenced
from oncely.stores.sql.connection import close_all
from tests.contracts.looking import history
from tests.sinktools import (
    T0,
    T1,
    Place,
    Rec,
    at_t0,
    chunk,
    commit_all,
    impatient,
    numbered,
    open_sink,
    ready,
    sink_to,
    together,
)


def test_joining_history_keeps_sums_gaps_and_the_newest(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0})

    def at(start: int, end: int) -> None:
        left_out = [Rec(end - 2), Rec(end - 1, bad="no")]
        commit_all(sink, at_t0(start, [*numbered(start, end - 2), *left_out]), fence)

    at(0, 5)
    at(5, 10)
    pass_over(together(sink), {T0: OffsetRange(10, 14)}, fence, "gap", impatient())
    at(14, 20)
    pass_over(together(sink), {T0: OffsetRange(20, 22)}, fence, "hole", impatient())
    at(22, 30)
    at(30, 40)
    at(40, 50)
    commit_all(sink, chunk({T1: (0, numbered(100, 102))}), fence)
    assert sink.ledger.join_history(fence, keep_newest=2) == 3
    assert history(place) == [
        (0, 0, 10, 1, "joined", 10, 6, 2, 2),
        (0, 10, 14, 1, "gap", 0, 0, 0, 0),
        (0, 14, 30, 1, "joined", 14, 10, 2, 2),
        (0, 30, 40, 1, "data", 10, 8, 1, 1),
        (0, 40, 50, 1, "data", 10, 8, 1, 1),
        (1, 0, 102, 1, "data", 2, 2, 0, 0),
    ]
    assert sink.ledger.join_history(fence, keep_newest=2) == 0
    assert sink.ledger.join_history(fence, keep_newest=0) == 2
    assert [row[1:3] for row in history(place) if row[0] == 0] == [(0, 10), (10, 14), (14, 50)]


def test_joining_history_crosses_epochs_and_leaves_what_was_superseded(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    fence = open_sink(sink).fence
    commit_all(sink, at_t0(5, numbered(5, 10)), fence)
    place.sql("UPDATE oncely_ranges SET superseded = 3 WHERE range_start = 5")
    place.sql('UPDATE oncely_positions SET "position" = 5')
    fence = open_sink(sink).fence
    commit_all(sink, at_t0(5, numbered(5, 10)), fence)
    assert sink.ledger.join_history(fence, keep_newest=0) == 1
    assert [row[1:5] for row in history(place)] == [(0, 10, 3, "joined"), (5, 10, 2, "data")]
    newer = open_sink(sink).fence
    close_all()
    with pytest.raises(Fenced):
        sink.ledger.join_history(fence, keep_newest=0)
    assert newer.epoch == 4
