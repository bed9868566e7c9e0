"""Resets: positions elsewhere, by a new epoch, so that whatever still runs is fenced."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from oncely.core.claim import Opened, Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import TableMismatch
from oncely.kinds.sql.sink import SqlSink
from tests.sinktools import (
    SOURCE,
    T0,
    T1,
    Place,
    Rec,
    at_t0,
    chunk,
    commit_all,
    numbered,
    open_sink,
    ready,
    sink_to,
)

START = {T0: 0, T1: 0}


def reset(sink: SqlSink, to: Mapping[TopicPartition, int]) -> Opened:
    return sink.open(Takeover(SOURCE, lambda: START, START, reset=lambda _: to))


def ids(place: Place) -> list[int]:
    return [n for (n,) in place.sql("SELECT id FROM rows ORDER BY id")]


def history(place: Place) -> list[tuple[int, int, int, int]]:
    return place.sql(  # type: ignore[return-value]
        "SELECT range_start, range_end, epoch, superseded FROM oncely_ranges"
        ' WHERE "partition" = 0 ORDER BY epoch, range_start'
    )


def test_back_and_forward(place: Place) -> None:
    sink, fence = ready(sink_to(place), START)
    commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    commit_all(sink, at_t0(5, numbered(5, 10)), fence)
    opened = reset(sink, {T0: 5})
    assert opened.fence.epoch == 2
    assert opened.positions == {T0: 5, T1: 0}
    assert history(place) == [(0, 5, 1, 0), (5, 10, 1, 2)]
    fence = open_sink(sink, START).fence
    commit_all(sink, at_t0(5, numbered(5, 10)), fence)
    assert ids(place) == [0, 1, 2, 3, 4, *sorted([5, 6, 7, 8, 9] * 2)]  # as was asked for
    assert history(place) == [(0, 5, 1, 0), (5, 10, 1, 2), (5, 10, 3, 0)]
    reset(sink, {T0: 50})
    fence = open_sink(sink, START).fence
    commit_all(sink, at_t0(50, numbered(50, 51)), fence)
    assert history(place)[-1] == (50, 51, 5, 0)


def skipped(place: Place) -> list[tuple[int, int, int]]:
    return place.sql(  # type: ignore[return-value]
        "SELECT range_start, range_end, epoch FROM oncely_ranges WHERE kind = 'skipped' ORDER BY 1"
    )


def test_what_was_passed_over_is_noted(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 3, T1: 0})
    commit_all(sink, at_t0(3, numbered(3, 5)), fence)
    assert skipped(place) == [(0, 3, 1)]
    reset(sink, {T0: 50})
    assert skipped(place) == [(0, 3, 1), (5, 50, 2)]
    reset(sink, {T0: 20})
    assert skipped(place) == [(0, 3, 1), (5, 20, 2)]
    reset(sink, {T0: 30})
    assert skipped(place) == [(0, 3, 1), (5, 20, 2), (20, 30, 4)]
    reset(sink, {T0: 5})
    assert skipped(place) == [(0, 3, 1)]
    reset(sink, {T0: 1})
    assert skipped(place) == [(0, 1, 1)]


def test_ranges_ahead_of_the_position_are_not_passed_over(place: Place) -> None:
    sink, _ = ready(sink_to(place), {T0: 0})
    place.sql(
        'INSERT INTO oncely_ranges (pipeline, topic, "partition", range_start, range_end, epoch,'
        " kind, records, written, rejected, filtered) VALUES ('p', 't', 0, 2, 4, 1, 'ahead', 2, 2,"
        " 0, 0)"
    )
    reset(sink, {T0: 9})
    assert skipped(place) == [(0, 2, 2), (4, 9, 2)]


def test_without_create_and_ledger_nothing_is_written(place: Place) -> None:
    if not place.is_postgres:
        place.sql("CREATE TABLE other (id INT) STRICT")
    with pytest.raises(TableMismatch):
        reset(sink_to(place, create=False), {T0: 0})


def test_dead_letters_from_the_position_on_go(place: Place) -> None:
    sink, fence = ready(sink_to(place), START)
    bad = [Rec(offset, bad="no") for offset in range(4)]
    commit_all(sink, chunk({T0: (0, bad), T1: (0, bad)}), fence)
    reset(sink, {T0: 2})
    kept = place.sql('SELECT "partition", "offset" FROM oncely_rejects ORDER BY 1, 2')
    assert kept == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
