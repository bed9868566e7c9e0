"""Rows of a Spark transform that Spark holds until the driver has written them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from oncely.core.batch import Batch, Packet, StagedRowsGone
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange
from oncely.errors import Stopped
from oncely.kinds.sql.sink import SqlSink
from oncely.runtimes.spark import batch_commit
from oncely.runtimes.spark.batch_commit import HeldRows
from tests.filestools import publish_all
from tests.sinktools import SCHEMA, T0, Place, ready, sink_to, sqlite_place

ROWS = 30_000


@pytest.fixture
def place() -> Iterator[Place]:
    with sqlite_place() as found:
        yield found


@pytest.fixture
def sink(place: Place) -> SqlSink:
    return sink_to(place, keep_source=False)


def frame(spark: Any, rows: int = ROWS, partitions: int = 3) -> Any:
    """Rows whose names are others each time that they are computed."""
    name = F.concat(F.lit("n"), F.rand().cast("string"))
    return spark.range(0, rows, 1, partitions).select("id", name.alias("name"))


def table(packets: Iterator[Packet]) -> pa.Table:
    return pa.concat_tables([one.content for one in packets]).sort_by("id")


def test_each_reading_gives_the_same_rows_in_parts(
    spark: Any, sink: SqlSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_commit, "_PARTITION", 100_000)
    bound, _ = ready(sink)
    held = HeldRows.of(bound, frame(spark))
    assert sum(one.staged.rows for one in held.sizes) == ROWS
    assert sum(one.size for one in held.sizes) > 3 * 100_000
    first, again = table(held.read()), table(held.read())
    assert first.column("id").to_pylist() == list(range(ROWS))
    assert again == first
    assert first.schema.names == SCHEMA.names


def test_nothing_of_other_rows_than_those_counted(spark: Any, place: Place, sink: SqlSink) -> None:
    """An answer may be of one attempt of a task, and its packets of another one."""
    bound, fence = ready(sink)
    held = HeldRows.of(bound, frame(spark, 40, 2))
    batch = Batch({T0: OffsetRange(0, 40)}, {T0: Counts(40, 0, 0, 0)})
    one = held.sizes[0]
    other = replace(one, staged=replace(one.staged, digest=(one.staged.digest or 0) + 1))
    for sizes in (held.sizes[1:], [other, *held.sizes[1:]]):
        with pytest.raises(StagedRowsGone, match="Spark holds 40"):
            publish_all(bound, replace(held, sizes=sizes).into(batch), fence)
        assert place.sql("SELECT COUNT(*) FROM rows") == [(0,)]
        assert place.sql('SELECT "position" FROM oncely_positions') == [(0,)]
    assert not publish_all(bound, held.into(batch), fence)
    assert place.sql("SELECT COUNT(DISTINCT id) FROM rows") == [(40,)]
    assert place.sql('SELECT "position" FROM oncely_positions') == [(40,)]


def test_a_row_that_does_not_fit_is_found_before_anything_is_written(
    spark: Any, sink: SqlSink
) -> None:
    bound, _ = ready(sink)
    wrong = spark.range(0, 10).select("id", F.lit("a\x00b").alias("name"))
    with pytest.raises(Stopped, match="a row of the Spark transform"):
        HeldRows.of(bound, wrong)


def test_no_rows(spark: Any, sink: SqlSink) -> None:
    bound, _ = ready(sink)
    held = HeldRows.of(bound, frame(spark, 0))
    assert list(held.sizes) == list(held.read()) == []
