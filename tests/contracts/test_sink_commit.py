"""Committing: rows, history and position take effect together, once, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oncely.clients.sql.session import close_all
from oncely.commit.path import pass_over
from oncely.core.batch import Chunk
from oncely.core.claim import Claim, Counts, Fence, PositionMoved
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.errors import Fenced, LedgerWentBack, Unavailable
from oncely.sinks.sql.sink import SqlSink
from tests.contracts.looking import history, ids, positions
from tests.sinktools import (
    T0,
    T1,
    Place,
    Rec,
    at_t0,
    chunk,
    commit_all,
    commit_on,
    impatient,
    numbered,
    offsets,
    open_sink,
    ready,
    rec,
    sink_to,
    together,
    with_faults,
)


def test_rows_history_and_position_take_effect_together(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 10, T1: 0})
    records = [*numbered(10, 13), Rec(13), Rec(15, bad="no JSON")]
    outcomes = commit_all(sink, chunk({T0: (10, records), T1: (0, numbered(100, 102))}), fence)
    assert ids(place) == [10, 11, 12, 100, 101]
    assert history(place) == [
        (0, 10, 16, 1, "data", 5, 3, 1, 1),
        (1, 0, 102, 1, "data", 2, 2, 0, 0),
    ]
    assert positions(place) == [(0, 16), (1, 102)]
    assert {o.partition: o.counts for o in outcomes} == {
        T0: Counts(5, 3, 1, 1),
        T1: Counts(2, 2, 0, 0),
    }
    assert not any(o.replayed for o in outcomes)


def test_consecutive_chunks(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    for start in range(0, 30, 10):
        commit_all(sink, at_t0(start, numbered(start, start + 10)), fence)
    assert ids(place) == list(range(30))
    assert [row[1:3] for row in history(place)] == [(0, 10), (10, 20), (20, 30)]


def test_more_rows_than_one_message_and_one_batch(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 40_000)), fence)
    assert place.sql("SELECT COUNT(*), MIN(id), MAX(id) FROM rows") == [(40_000, 0, 39_999)]
    order = "ctid" if place.is_postgres else "rowid"
    assert offsets(place.sql(f"SELECT id FROM rows ORDER BY {order}")) == list(range(40_000))


def test_a_replayed_chunk_writes_nothing(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    what = at_t0(0, [*numbered(0, 5), Rec(5, bad="no JSON")])
    commit_all(sink, what, fence)
    again = commit_all(sink, what, fence)
    assert ids(place) == [0, 1, 2, 3, 4]
    assert [(o.range, o.counts, o.replayed) for o in again] == [
        (OffsetRange(0, 6), Counts(0, 0, 0, 0), True)
    ]
    assert place.sql("SELECT COUNT(*) FROM oncely_rejects") == [(1,)]
    assert len(history(place)) == 1


def test_of_an_overlapping_chunk_only_what_is_new_is_written(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0})
    first = [*numbered(0, 4), Rec(4, bad="no JSON")]
    commit_all(sink, at_t0(0, first), fence)
    wider = [*first, Rec(5, bad="still none"), *numbered(6, 9)]
    outcomes = commit_all(sink, chunk({T0: (0, wider), T1: (0, numbered(50, 52))}), fence)
    assert ids(place) == [0, 1, 2, 3, 6, 7, 8, 50, 51]
    assert {(o.partition, o.range, o.counts) for o in outcomes} == {
        (T0, OffsetRange(5, 9), Counts(4, 3, 1, 0)),
        (T1, OffsetRange(0, 52), Counts(2, 2, 0, 0)),
    }
    assert place.sql('SELECT "offset" FROM oncely_rejects ORDER BY 1') == [(4,), (5,)]


def test_one_partition_replayed_and_one_new(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0})
    commit_all(sink, chunk({T1: (0, numbered(50, 52))}), fence)
    both = chunk({T0: (0, numbered(0, 2)), T1: (0, numbered(50, 52))})
    outcomes = commit_all(sink, both, fence)
    assert ids(place) == [0, 1, 50, 51]
    assert {(o.partition, o.replayed) for o in outcomes} == {(T0, False), (T1, True)}


def test_work_that_was_done_beyond_the_position_is_left_out(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    place.sql(
        'INSERT INTO oncely_ranges (pipeline, topic, "partition", range_start, range_end, epoch,'
        " kind, records, written, rejected, filtered)"
        " VALUES ('p', 't', 0, 4, 6, 1, 'data', 2, 2, 0, 0),"
        " ('p', 't', 0, 8, 9, 1, 'data', 1, 1, 0, 0)"
    )
    place.sql("INSERT INTO rows (id, name) VALUES (4, 'done'), (5, 'done'), (8, 'done')")
    outcomes = commit_all(sink, at_t0(0, numbered(0, 12)), fence)
    assert ids(place) == list(range(12))
    assert [o.range for o in outcomes] == [
        OffsetRange(0, 4),
        OffsetRange(6, 8),
        OffsetRange(9, 12),
    ]
    assert positions(place) == [(0, 12)]


def test_a_chunk_ahead_of_the_ledger_writes_nothing(place: Place) -> None:
    """The database has gone back, and rows with it: whoever opens again goes on from there."""
    sink, fence = ready(sink_to(place))
    with pytest.raises(LedgerWentBack, match=r"\[0, 5\) were not committed before"):
        commit_all(sink, at_t0(5, numbered(5, 8)), fence)
    with pytest.raises(LedgerWentBack, match="no position in the ledger"):
        commit_all(sink, chunk({T1: (0, numbered(0, 2))}), fence)
    assert ids(place) == []
    assert history(place) == []


def test_a_moved_position_leaves_nothing(place: Place) -> None:
    """The compare-and-set, seen alone: decided on a ledger that has moved since."""
    sink, fence = ready(sink_to(place))
    stale = sink.ledger.positions(fence)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    for what in (at_t0(0, numbered(0, 3)), at_t0(0, [*numbered(20, 22), Rec(22, bad="no JSON")])):
        with pytest.raises(PositionMoved):
            sink.commit(what, fence, Claim(fence, what.ranges, stale))
    assert ids(place) == [0, 1, 2]
    assert len(history(place)) == 1
    assert place.sql("SELECT COUNT(*) FROM oncely_rejects") == [(0,)]


def test_of_several_partitions_one_moved_leaves_nothing_of_any(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0})
    stale = sink.ledger.positions(fence)
    commit_all(sink, chunk({T1: (0, numbered(50, 52))}), fence)
    with pytest.raises(PositionMoved):
        commit_on(sink, chunk({T0: (0, numbered(0, 2)), T1: (0, numbered(50, 52))}), stale, fence)
    assert ids(place) == [50, 51]
    assert positions(place) == [(0, 0), (1, 52)]


def test_an_epoch_taken_between_decision_and_commit(place: Place) -> None:
    """A zombie that decided long ago: its compare-and-set finds another epoch."""
    sink, old = ready(sink_to(place))
    decided = sink.ledger.positions(old)
    open_sink(sink)
    close_all()  # the takeover ended the old run's session; a zombie opens another one
    with pytest.raises(PositionMoved):
        commit_on(sink, at_t0(0, numbered(0, 3)), decided, old)
    assert ids(place) == []
    with pytest.raises(Fenced):
        commit_all(sink, at_t0(0, numbered(0, 3)), old)


def test_a_lost_commit_answer(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    lost = []

    def lose_first(name: str, call: Callable[[], Any]) -> Any:
        answer = call()
        if name == "commit" and not lost:
            lost.append(name)
            raise Unavailable("the answer was lost")
        return answer

    close_all()
    outcomes = commit_all(with_faults(sink, lose_first), at_t0(0, numbered(0, 4)), fence)
    assert lost
    assert ids(place) == [0, 1, 2, 3]
    assert [(o.range, o.replayed) for o in outcomes] == [(OffsetRange(0, 4), True)]
    assert len(history(place)) == 1


@pytest.mark.parametrize("call", ["connect", "query", "begin", "copy", "execute_many", "commit"])
def test_a_failure_before_the_commit_is_tried_again(place: Place, call: str) -> None:
    sink, fence = ready(sink_to(place))
    failed = []

    def fail_first(name: str, go: Callable[[], Any]) -> Any:
        if name == call and not failed:
            failed.append(name)
            raise Unavailable("no answer")
        return go()

    close_all()
    records = [*numbered(0, 4), Rec(4, bad="no JSON")]
    outcomes = commit_all(with_faults(sink, fail_first), at_t0(0, records), fence)
    assert failed
    assert ids(place) == [0, 1, 2, 3]
    assert [(o.range, o.replayed) for o in outcomes] == [(OffsetRange(0, 5), False)]
    assert place.sql("SELECT COUNT(*) FROM oncely_rejects") == [(1,)]


def test_when_patience_ends_nothing_was_written(place: Place) -> None:
    sink, fence = ready(sink_to(place))

    def never(name: str, go: Callable[[], Any]) -> Any:
        if name == "commit":
            raise Unavailable("no answer")
        return go()

    close_all()
    with pytest.raises(Unavailable):
        commit_all(with_faults(sink, never), at_t0(0, numbered(0, 4)), fence)
    assert ids(place) == []
    assert positions(place) == [(0, 0)]
    assert history(place) == []


def test_a_stranger_who_holds_no_epoch_changes_nothing(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    with pytest.raises(LedgerWentBack, match=r"the ledger.s epoch is 1, and ours 2"):
        commit_all(sink, at_t0(0, numbered(0, 2)), Fence("p", fence.epoch + 1))
    assert ids(place) == []


# -- ranges without records ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hole", "gap"])
def test_ranges_that_hold_no_records(place: Place, kind: Any) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 3})
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    nothing = Chunk.of_nothing({T0: OffsetRange(2, 9), T1: OffsetRange(3, 4)})
    pass_over(together(sink), nothing.ranges, fence, kind, impatient())
    assert positions(place) == [(0, 9), (1, 4)]
    assert history(place) == [
        (0, 0, 2, 1, "data", 2, 2, 0, 0),
        (0, 2, 9, 1, kind, 0, 0, 0, 0),
        (1, 3, 4, 1, kind, 0, 0, 0, 0),
    ]
    again = pass_over(together(sink), nothing.ranges, fence, kind, impatient())
    assert all(o.replayed for o in again)


def test_a_hole_that_is_closed_in_part_already(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0})
    first = Chunk.of_nothing({T0: OffsetRange(0, 4)})
    wider = Chunk.of_nothing({T0: OffsetRange(0, 9), T1: OffsetRange(0, 2)})
    for what in (first, wider):
        pass_over(together(sink), what.ranges, fence, "hole", impatient())
    assert positions(place) == [(0, 9), (1, 2)]


# -- order and source ----------------------------------------------------------------------


def test_where_each_row_came_from(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True), {T0: 7, TopicPartition("u", 3): 0})
    records = [rec(7, id=1, name="a"), Rec(8), Rec(9, ({"id": 2, "name": "b"}, {"id": 3}))]
    what = chunk({T0: (7, records), TopicPartition("u", 3): (0, [rec(0, id=4)])})
    commit_all(sink, what, fence)
    assert place.sql("SELECT * FROM rows ORDER BY id") == [
        (1, "a", "t", 0, 7),
        (2, "b", "t", 0, 9),
        (3, None, "t", 0, 9),
        (4, None, "u", 3, 0),
    ]


def test_source_columns_of_a_trimmed_chunk(place: Place) -> None:
    sink, fence = ready(sink_to(place, keep_source=True), {T0: 0, T1: 0})
    commit_all(sink, at_t0(0, numbered(0, 2)), fence)
    commit_all(sink, chunk({T0: (0, numbered(0, 4)), T1: (0, numbered(5, 6))}), fence)
    assert place.sql("SELECT id, kafka_partition, kafka_offset FROM rows ORDER BY id") == [
        (0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 3), (5, 1, 5),
    ]  # fmt: skip


def test_records_of_two_partitions_may_alternate(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0})
    what = chunk({T0: (0, numbered(0, 3)), T1: (0, numbered(10, 13))})
    order = np.array([0, 3, 1, 4, 2, 5])
    mixed = replace(
        what,
        partition=what.partition[order],
        offset=what.offset[order],
        rows=what.rows.take(order),
        row_record=np.arange(6, dtype=np.int64),
    )
    commit_all(sink, chunk({T1: (0, numbered(10, 12))}), fence)
    commit_all(sink, mixed, fence)
    assert ids(place) == [0, 1, 2, 10, 11, 12]


def test_the_sink_is_picklable(place: Place) -> None:
    """It is shipped to the executors."""
    import pickle

    sink, fence = ready(sink_to(place))
    shipped: SqlSink = pickle.loads(pickle.dumps(sink))
    commit_all(shipped, at_t0(0, numbered(0, 2)), fence)
    assert ids(place) == [0, 1]
    assert place.url.split("@")[0] not in repr(shipped)
