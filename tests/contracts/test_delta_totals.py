"""Totals in a Delta table's ledger, and what a commit tells of its ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely.commit.backoff import Backoff
from oncely.commit.change import replay
from oncely.commit.path import pass_over
from oncely.core.batch import Batch
from oncely.core.claim import Counts, Fence, Takeover
from oncely.core.digest import Recipe, digest_sum, row_digests
from oncely.core.ranges import OffsetRange, TopicPartition, from_tree
from oncely.decode.avro_schema import storable
from oncely.kinds.delta.change import DeltaReplay
from oncely.kinds.delta.form import DeltaFormat
from oncely.kinds.tables import SOURCE_COLUMNS
from oncely.stores.document import Totals
from tests.deltatools import Committing, DeltaPlace, make_place
from tests.filestools import publish_all
from tests.replaytools import bad, judging
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    T1,
    Rec,
    at_t0,
    chunk,
    commit_all,
    impatient,
    numbered,
    open_sink,
    ready,
    together,
)

PLAIN = "1 row id=bigint name=text"
WITH_OFFSET = "1 offset id=bigint name=text"
T2 = TopicPartition(T0.topic, 2)


@pytest.fixture
def place(tmp_path: Path) -> DeltaPlace:
    return make_place(tmp_path)


def started(place: DeltaPlace, *, keep_source: bool = True, **more: Any) -> tuple[Any, Fence]:
    sink = place.sink(**more)
    if keep_source:
        schema = storable(pa.schema([*SCHEMA, *SOURCE_COLUMNS]))
        sink.form = DeltaFormat(schema, keep_source=True)
    return ready(Committing(sink), {T0: 0, T1: 0})


def totals(place: DeltaPlace, tp: TopicPartition = T0) -> Totals | None:
    return from_tree(place.sink().ledger.read().document.totals).get(tp)


def of_rows(place: DeltaPlace, recipe: str, *ids: int) -> int:
    """By an outside reader of the table."""
    table = place.table.to_pyarrow_table()
    table = table.filter(pa.compute.is_in(table["id"], pa.array(ids)))
    known = Recipe.parse(recipe)
    offsets = table["kafka_offset"].to_numpy() if known.offset else None
    assert table.num_rows == len(ids)
    return digest_sum(row_digests(table, offsets, known))


def test_totals_add_up_since_the_start(place: DeltaPlace) -> None:
    sink, fence = started(place)
    first = {T0: (0, [*numbered(0, 3), Rec(3), *bad(4)]), T1: (0, numbered(90, 92))}
    commit_all(sink, chunk(first), fence)
    commit_all(sink, at_t0(5, numbered(5, 7)), fence)
    pass_over(together(sink), {T0: OffsetRange(7, 9)}, fence, "hole", impatient())
    digest = of_rows(place, WITH_OFFSET, 0, 1, 2, 5, 6)
    assert totals(place) == Totals(0, 1, 7, 5, 1, 1, digest, WITH_OFFSET)
    other = of_rows(place, WITH_OFFSET, 90, 91)
    assert totals(place, T1) == Totals(0, 1, 2, 2, 0, 0, other, WITH_OFFSET)


def test_a_commit_tells_what_became_of_its_ranges(place: DeltaPlace) -> None:
    sink, fence = started(place)
    commit_all(sink, at_t0(0, [*numbered(0, 3), *bad(3)]), fence)
    told = place.told()[0]
    assert told["ranges"] == {"t": {"0": [0, 4]}}
    assert told["counts"] == {
        "t": {"0": {"records": 4, "rows": 3, "rejects": 1, "filtered": 0,
                    "digest": str(of_rows(place, WITH_OFFSET, 0, 1, 2)), "recipe": WITH_OFFSET}}
    }  # fmt: skip


def test_the_first_offsets_that_were_to_be_read_are_kept(place: DeltaPlace) -> None:
    def begun() -> dict[TopicPartition, int]:
        return from_tree(place.sink().ledger.read().document.started)

    def opened(**more: Any) -> Any:
        return place.sink().open(Takeover(SOURCE, lambda: {T0: 7}, {T0: 0, T1: 2}, **more))

    opened()
    assert begun() == {T0: 7}
    fence = opened().fence
    assert begun() == {T0: 7, T1: 2}
    place.sink().ledger.add_partitions(fence, {T0: 1, T2: 4}, SOURCE)
    assert begun() == {T0: 7, T1: 2, T2: 4}
    opened(reset=lambda _: {T0: 3, T1: 50})
    assert begun() == {T0: 3, T1: 2, T2: 4}


def test_a_new_run_continues_them_and_a_reset_begins_anew(place: DeltaPlace) -> None:
    sink, fence = started(place)
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    sink, fence = started(place)
    commit_all(sink, at_t0(3, numbered(3, 5)), fence)
    found = totals(place)
    assert found is not None
    assert (found.since, found.rows) == (0, 5)
    sink.open(Takeover(SOURCE, dict, {}, reset=lambda _: {T0: 4}))
    assert totals(place) is None
    sink, fence = started(place)
    commit_all(sink, at_t0(4, numbered(14, 16)), fence)
    digest = of_rows(place, WITH_OFFSET, 14, 15)
    assert totals(place) == Totals(4, fence.epoch, 2, 2, 0, 0, digest, WITH_OFFSET)


def test_dead_letters_below_their_begin_have_no_part(place: DeltaPlace) -> None:
    """They came from ranges of other totals, with another recipe."""
    sink, fence = started(place, keep_source=False)
    commit_all(sink, at_t0(0, [*numbered(0, 3), *bad(3)]), fence)
    assert totals(place) == Totals(0, 1, 4, 3, 1, 0, of_rows(place, PLAIN, 0, 1, 2), PLAIN)
    sink.inner.form = DeltaFormat(storable(pa.schema([*SCHEMA, *SOURCE_COLUMNS])), keep_source=True)
    sink.inner.prepare()
    commit_all(sink, at_t0(4, [*numbered(4, 6), *bad(6, 7)]), fence)
    assert replay(DeltaReplay(sink.inner), judging(), Backoff(0.01, 0.1, 10), 500) == (3, 0)
    digest = of_rows(place, WITH_OFFSET, 4, 5, 6, 7)
    assert totals(place) == Totals(4, 1, 4, 4, 0, 0, digest, WITH_OFFSET)


@pytest.mark.parametrize("limit", [1, 500])
def test_replays_are_included(place: DeltaPlace, limit: int) -> None:
    sink, fence = started(place)
    commit_all(sink, at_t0(0, [*numbered(0, 2), *bad(2, 3, 4)]), fence)
    judge = judging(lambda one: one.offset != 3)
    assert replay(DeltaReplay(sink.inner), judge, Backoff(0.01, 0.1, 10), limit) == (2, 1)
    digest = of_rows(place, WITH_OFFSET, 0, 1, 2, 4)
    assert totals(place) == Totals(0, 1, 5, 4, 1, 0, digest, WITH_OFFSET)


def test_an_upsert_is_counted_only(place: DeltaPlace) -> None:
    sink, fence = started(place, keep_source=False, keys=["id"])
    commit_all(sink, at_t0(0, numbered(0, 3), keys=["id"]), fence)
    assert totals(place) == Totals(0, 1, 3, 3, 0, 0, None, "")
    assert "recipe" not in place.told()[0]["counts"]["t"]["0"]


def test_rows_of_a_spark_transform(place: DeltaPlace) -> None:
    sink = place.sink()
    fence = open_sink(sink, {T0: 0, T1: 0}).fence
    rows = at_t0(0, numbered(0, 6)).rows
    staged = [sink.stage(fence, 0, at, [rows.slice(3 * at, 3)]) for at in range(2)]
    ranges = {T0: OffsetRange(0, 20), T1: OffsetRange(0, 3)}
    counts = {T0: Counts(20, 0, 0, 0), T1: Counts(3, 0, 0, 0)}
    publish_all(sink, Batch(ranges, counts, (), staged), fence)
    digest = of_rows(place, PLAIN, *range(6))
    assert totals(place) == Totals(0, 1, 20, 6, 0, 0, digest, PLAIN)
    assert np.array_equal(place.ids(), np.arange(6))
