"""Batch commit: what successful tasks staged is published as a whole, or not at all."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest

from oncely.clients.sql.session import close_all
from oncely.core.batch import Batch, Reject, Staged
from oncely.core.claim import Claim, Counts, Fence, PositionMoved, QueryBatch
from oncely.core.ranges import OffsetRange
from oncely.errors import Stopped, Unavailable, WrongInput
from oncely.sinks.sql.sink import SqlSink
from oncely.sinks.sql.staging import stage, staging_prefix, sweep
from tests.sinktools import (
    T0,
    T1,
    Place,
    open_sink,
    publish_on,
    ready,
    sink_to,
)

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
UPSERT = pa.schema([("id", pa.int64()), ("v", pa.int64())])


def rows(start: int, end: int) -> pa.Table:
    return pa.table({"id": list(range(start, end)), "name": [f"n{n}" for n in range(start, end)]})


def publication(*staged: Staged, end: int = 10, **more: Any) -> Batch:
    return Batch(
        {T0: OffsetRange(0, end), T1: OffsetRange(0, 3)},
        {T0: Counts(end, 0, 1, 0), T1: Counts(3, 0, 0, 0)},
        [Reject(T0, 4, None, None, b"x", (), "decode", "no JSON")],
        staged,
        **more,
    )


def opened(place: Place, **more: Any) -> tuple[SqlSink, Fence]:
    return ready(sink_to(place, **more), {T0: 0, T1: 0})


def ids(place: Place) -> list[int]:
    return [n for (n,) in place.sql("SELECT id FROM rows ORDER BY id")]


def staged_tables(place: Place) -> list[str]:
    catalog = (
        "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        if place.is_postgres
        else "SELECT name FROM sqlite_master WHERE type = 'table'"
    )
    return [n for (n,) in place.sql(catalog) if n.startswith(staging_prefix("p"))]


def untouched(place: Place) -> bool:
    return (
        ids(place) == []
        and place.sql("SELECT COUNT(*) FROM oncely_ranges") == [(0,)]
        and place.sql("SELECT COUNT(*) FROM oncely_rejects") == [(0,)]
        and place.sql('SELECT SUM("position") FROM oncely_positions') == [(0,)]
    )


def test_staged_rows_rejects_history_and_positions_take_effect_together(place: Place) -> None:
    sink, fence = opened(place)
    first = stage(sink, fence, 0, 1, [rows(0, 4), rows(4, 6)])
    second = stage(sink, fence, 0, 2, [rows(6, 9)])
    nothing = stage(sink, fence, 0, 3, [rows(0, 0)])
    failed = stage(sink, fence, 0, 4, [rows(6, 9)])  # an attempt that nobody heard of again
    assert (first.rows, second.rows, nothing, failed.rows) == (6, 3, Staged(None, 0), 3)
    assert untouched(place)
    publish_on(sink, publication(first, second, nothing), sink.ledger.positions(fence), fence)
    assert ids(place) == list(range(9))
    assert place.sql('SELECT "partition", "position" FROM oncely_positions ORDER BY 1') == [
        (0, 10), (1, 3),
    ]  # fmt: skip
    history = place.sql(
        'SELECT "partition", range_start, range_end, records, written, rejected'
        " FROM oncely_ranges ORDER BY 1"
    )
    assert history == [(0, 0, 10, 10, 9, 1), (1, 0, 3, 3, 0, 0)]
    assert place.sql('SELECT "offset" FROM oncely_rejects') == [(4,)]
    assert staged_tables(place) == [failed.name]


def test_a_newer_run_fences_a_publication(place: Place) -> None:
    sink, fence = opened(place)
    staged = stage(sink, fence, 0, 1, [rows(0, 9)])
    entries = sink.ledger.positions(fence)
    newer = open_sink(sink, {T0: 0, T1: 0}).fence
    close_all()
    with pytest.raises(PositionMoved):
        publish_on(sink, publication(staged), entries, fence)
    assert untouched(place)
    assert sweep(sink, newer) == 1
    close_all()
    with pytest.raises((PositionMoved, Unavailable)):
        publish_on(sink, publication(staged), entries, fence)
    assert untouched(place)


def test_staged_rows_that_are_gone_publish_nothing(place: Place) -> None:
    sink, fence = opened(place)
    staged = stage(sink, fence, 0, 1, [rows(0, 9)])
    place.sql(f"DELETE FROM {staged.name} WHERE id = 5")  # as a crash empties an unlogged table
    with pytest.raises(Unavailable, match="staged 9 rows, 8 were there"):
        publish_on(sink, publication(staged), sink.ledger.positions(fence), fence)
    assert untouched(place)
    place.sql(f"DROP TABLE {staged.name}")
    with pytest.raises(Unavailable):
        publish_on(sink, publication(staged), sink.ledger.positions(fence), fence)
    assert untouched(place)


@pytest.mark.parametrize("at", ["staging", "publishing"])
def test_a_row_that_the_table_refuses_stops(place: Place, at: str) -> None:
    """After a transform no record answers for a row."""
    int_, text = ("bigint", "text") if place.is_postgres else ("INT", "TEXT")
    strict = "" if place.is_postgres else " STRICT"
    place.sql(f"CREATE TABLE rows (id {int_}, name {text}, CHECK (id <> 5)){strict}")
    sink, fence = opened(place)
    bad = pa.table({"id": [1, 2], "name": ["a", "b\x00"]}) if at == "staging" else rows(0, 9)

    def stage_and_publish() -> None:
        staged = stage(sink, fence, 0, 1, [bad])
        publish_on(sink, publication(staged), sink.ledger.positions(fence), fence)

    with pytest.raises(Stopped, match="can't be written") as caught:
        stage_and_publish()
    assert "in the transform" in caught.value.way_out
    assert untouched(place)


def test_an_upsert_of_several_tasks(place: Place) -> None:
    sink, fence = opened(place, schema=UPSERT, keys=["id"], version="v")
    parts = [pa.table({"id": [1, 2], "v": [5, 1]}), pa.table({"id": [1, 3], "v": [4, 1]})]
    staged = [stage(sink, fence, 0, n, [part]) for n, part in enumerate(parts)]
    publish_on(sink, publication(*staged), sink.ledger.positions(fence), fence)
    assert place.sql("SELECT * FROM rows ORDER BY id") == [(1, 5), (2, 1), (3, 1)]
    assert staged_tables(place) == []


def test_two_rows_of_one_key_need_a_version(place: Place) -> None:
    sink, fence = opened(place, schema=UPSERT, keys=["id"])
    parts = [pa.table({"id": [1, 2], "v": [5, 1]}), pa.table({"id": [1], "v": [4]})]
    staged = [stage(sink, fence, 0, n, [part]) for n, part in enumerate(parts)]
    with pytest.raises(WrongInput, match=r"same sink\.keys"):
        publish_on(sink, publication(*staged), sink.ledger.positions(fence), fence)
    assert untouched(place)


def test_what_sweep_takes(place: Place) -> None:
    sink, old = opened(place)
    stage(sink, old, 7, 1, [rows(0, 1)])
    fence = open_sink(sink, {T0: 0, T1: 0}).fence
    mine = [stage(sink, fence, batch, 1, [rows(0, 1)]).name for batch in (0, 1, 2)]
    other, other_fence = ready(sink_to(place, pipeline="q"), {T0: 0})
    stage(other, other_fence, 0, 1, [rows(0, 1)])
    assert sweep(sink, fence) == 1  # the older epoch's
    assert sorted(staged_tables(place)) == sorted(mine)
    assert sweep(sink, fence, keep_batches_from=2) == 2
    assert staged_tables(place) == [mine[2]]
    assert sweep(other, other_fence, keep_batches_from=1) == 1


def test_a_batch_of_a_query_takes_effect_once_also_without_data(place: Place) -> None:
    """A no-data batch has an empty range: offsets can't tell its first run from a replay."""
    sink, fence = opened(place)
    attempts = itertools.count()

    def publish_batch(number: int, query: str = "q") -> None:
        staged = stage(sink, fence, number, next(attempts), [rows(number, number + 1)])
        empty = {T0: OffsetRange(0, 0)}
        done = {T0: Counts(0, 0, 0, 0)}
        of_query = QueryBatch(query, number, "plan")
        claim = Claim(fence, empty, sink.ledger.positions(fence), query=of_query)
        sink.publish(Batch(empty, done, [], [staged]), fence, claim)

    publish_batch(0)
    with pytest.raises(PositionMoved, match="published already"):
        publish_batch(0)
    publish_batch(1)
    assert ids(place) == [0, 1]
    publish_batch(0, "another query")
    assert ids(place) == [0, 0, 1]
    assert place.sql("SELECT COUNT(*) FROM oncely_ranges") == [(0,)]
