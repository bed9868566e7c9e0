"""Committing to SQL: what is read, failures and lost answers of each call, order and source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oncely.core.claim import PositionMoved
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import Unavailable
from oncely.stores.sql.connection import close_all
from oncely.stores.sql.statements import LedgerStatements
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
    losing_first_commit,
    numbered,
    offsets,
    ready,
    rec,
    sink_to,
    with_faults,
)


def test_a_commit_reads_the_positions_of_its_partitions(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs the same whatever number of partitions the pipeline has."""
    others = {TopicPartition("t", n): 0 for n in range(2, 20)}
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0, **others})
    read, entries = [], LedgerStatements.entries

    def reading(*given: Any) -> Any:
        read.append(found := entries(*given))
        return found

    monkeypatch.setattr(LedgerStatements, "entries", reading)
    some = TopicPartition("t", 4)
    commit_all(sink, chunk({T1: (0, numbered(0, 2)), some: (0, numbered(2, 4))}), fence)
    assert [sorted(one) for one in read] == [[T1, some]]
    assert ids(place) == [0, 1, 2, 3]
    assert sorted(sink.ledger.positions(fence)) == sorted({T0, T1, *others})


def test_more_rows_than_one_message_and_one_batch(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 40_000)), fence)
    assert place.sql("SELECT COUNT(*), MIN(id), MAX(id) FROM rows") == [(40_000, 0, 39_999)]
    order = "ctid" if place.is_postgres else "rowid"
    assert offsets(place.sql(f"SELECT id FROM rows ORDER BY {order}")) == list(range(40_000))


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
    assert [o.range for o in outcomes if not o.replayed] == [
        OffsetRange(0, 4),
        OffsetRange(6, 8),
        OffsetRange(9, 12),
    ]
    assert {OffsetRange(4, 6), OffsetRange(8, 9)} <= {o.range for o in outcomes if o.replayed}
    assert positions(place) == [(0, 12)]


def test_of_several_partitions_one_moved_leaves_nothing_of_any(place: Place) -> None:
    sink, fence = ready(sink_to(place), {T0: 0, T1: 0})
    stale = sink.ledger.positions(fence)
    commit_all(sink, chunk({T1: (0, numbered(50, 52))}), fence)
    with pytest.raises(PositionMoved):
        commit_on(sink, chunk({T0: (0, numbered(0, 2)), T1: (0, numbered(50, 52))}), stale, fence)
    assert ids(place) == [50, 51]
    assert positions(place) == [(0, 0), (1, 52)]


def test_a_lost_commit_answer(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    lost: list[str] = []

    close_all()
    outcomes = commit_all(
        with_faults(sink, losing_first_commit(lost)), at_t0(0, numbered(0, 4)), fence
    )
    assert lost
    assert ids(place) == [0, 1, 2, 3]
    assert [(o.range, o.replayed) for o in outcomes] == [(OffsetRange(0, 4), True)]
    assert len(history(place)) == 1


@pytest.mark.parametrize(
    "call", ["connect", "query", "begin", "copy", "execute", "execute_all", "commit"]
)
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
