"""Batch commit to SQL: casts, upserts, rows that are refused, batches of a query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from oncely.core.batch import Batch, Packet, Reject, StagedRowsGone
from oncely.core.claim import Claim, Counts, Fence, PositionMoved, QueryBatch
from oncely.core.ranges import OffsetRange
from oncely.errors import Stopped, WrongInput
from oncely.kinds.sql.sink import SqlSink
from tests.sinktools import T0, T1, Place, publish_on, ready, sink_to, with_rows

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
UPSERT = pa.schema([("id", pa.int64()), ("v", pa.int64())])


def rows(start: int, end: int) -> pa.Table:
    return pa.table({"id": list(range(start, end)), "name": [f"n{n}" for n in range(start, end)]})


def publication(sink: SqlSink, *rows: pa.Table) -> Batch:
    batch = Batch(
        {T0: OffsetRange(0, 10), T1: OffsetRange(0, 3)},
        {T0: Counts(10, 0, 1, 0), T1: Counts(3, 0, 0, 0)},
        [Reject(T0, 4, None, None, b"x", (), "decode", "no JSON")],
    )
    return with_rows(batch, sink, *rows)


def opened(place: Place, **more: Any) -> tuple[SqlSink, Fence]:
    return ready(sink_to(place, **more), {T0: 0, T1: 0})


def ids(place: Place) -> list[int]:
    return [n for (n,) in place.sql("SELECT id FROM rows ORDER BY id")]


def untouched(place: Place) -> bool:
    return (
        ids(place) == []
        and place.sql("SELECT COUNT(*) FROM oncely_ranges") == [(0,)]
        and place.sql("SELECT COUNT(*) FROM oncely_rejects") == [(0,)]
        and place.sql('SELECT SUM("position") FROM oncely_positions') == [(0,)]
    )


@pytest.mark.parametrize("columns", ["cast", "upsert"])
def test_rows_that_end_early_publish_nothing(place: Place, columns: str) -> None:
    """Spark has lost some of them, after others were written."""
    more: dict[str, Any] = {"schema": UPSERT, "keys": ["id"]} if columns == "upsert" else {}
    if columns == "cast" and place.is_postgres:
        place.sql("CREATE TABLE rows (id bigint, name varchar(9))")
    sink, fence = opened(place, **more)
    part = pa.table({"id": [1], "v": [1]}) if more else rows(0, 9)
    batch = publication(sink, part)

    def ending() -> Iterator[Packet]:
        yield from batch.packets()
        raise StagedRowsGone("the rest is lost")

    entries = sink.ledger.positions(fence)
    for _ in range(2):
        with pytest.raises(StagedRowsGone):
            publish_on(sink, replace(batch, packets=ending), entries, fence)
        assert untouched(place)
    publish_on(sink, batch, entries, fence)
    assert len(ids(place)) == batch.rows


@pytest.mark.parametrize("at", ["packing", "publishing"])
def test_a_row_that_the_table_refuses_stops(place: Place, at: str) -> None:
    """After a transform no record answers for a row."""
    int_, text = ("bigint", "text") if place.is_postgres else ("INT", "TEXT")
    strict = "" if place.is_postgres else " STRICT"
    place.sql(f"CREATE TABLE rows (id {int_}, name {text}, CHECK (id <> 5)){strict}")
    sink, fence = opened(place)
    bad = pa.table({"id": [1, 2], "name": ["a", "b\x00"]}) if at == "packing" else rows(0, 9)

    def pack_and_publish() -> None:
        publish_on(sink, publication(sink, bad), sink.ledger.positions(fence), fence)

    with pytest.raises(Stopped, match="can't be written") as caught:
        pack_and_publish()
    assert "in the transform" in caught.value.way_out
    assert untouched(place)


def test_an_upsert_of_several_tasks(place: Place) -> None:
    sink, fence = opened(place, schema=UPSERT, keys=["id"], version="v")
    parts = [pa.table({"id": [1, 2], "v": [5, 1]}), pa.table({"id": [1, 3], "v": [4, 1]})]
    publish_on(sink, publication(sink, *parts), sink.ledger.positions(fence), fence)
    assert place.sql("SELECT * FROM rows ORDER BY id") == [(1, 5), (2, 1), (3, 1)]
    counted = 'SELECT "partition", range_start, range_end, records, written, rejected'
    history = place.sql(f"{counted} FROM oncely_ranges ORDER BY 1")
    assert history == [(0, 0, 10, 10, 4, 1), (1, 0, 3, 3, 0, 0)]  # no row names its partition


def test_two_rows_of_one_key_need_a_version(place: Place) -> None:
    sink, fence = opened(place, schema=UPSERT, keys=["id"])
    parts = [pa.table({"id": [1, 2], "v": [5, 1]}), pa.table({"id": [1], "v": [4]})]
    with pytest.raises(WrongInput, match=r"same sink\.keys"):
        publish_on(sink, publication(sink, *parts), sink.ledger.positions(fence), fence)
    assert untouched(place)


def test_a_batch_of_a_query_takes_effect_once_also_without_data(place: Place) -> None:
    """A no-data batch has an empty range: offsets can't tell its first run from a replay."""
    sink, fence = opened(place)

    def publish_batch(number: int, query: str = "q") -> None:
        empty = {T0: OffsetRange(0, 0)}
        done = {T0: Counts(0, 0, 0, 0)}
        of_query = QueryBatch(query, number, "plan")
        claim = Claim(fence, empty, sink.ledger.positions(fence), query=of_query)
        batch = with_rows(Batch(empty, done), sink, rows(number, number + 1))
        sink.publish(batch, fence, claim)

    publish_batch(0)
    with pytest.raises(PositionMoved, match="published already"):
        publish_batch(0)
    publish_batch(1)
    assert ids(place) == [0, 1]
    publish_batch(0, "another query")
    assert ids(place) == [0, 0, 1]
    assert place.sql("SELECT COUNT(*) FROM oncely_ranges") == [(0,)]
