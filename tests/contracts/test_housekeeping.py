"""The history stays bounded, however many batches a run has and whichever way they commit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oncely.commit.run import CommitContext, OpenLedger
from oncely.core.claim import Takeover
from oncely.core.ranges import OffsetRange
from oncely.kinds.sql.sink import SqlSink
from oncely.runtimes.spark import plugin
from oncely.runtimes.spark.batch_commit import HeldRows
from oncely.runtimes.spark.plugin import BatchRanges
from tests.deliverytools import put
from tests.sinktools import SCHEMA, SOURCE, T0, Place, ready, sink_to

LONG = 2_000
BOUND = 1_500
"""Ranges of a partition, beyond which old ones are joined."""


@pytest.fixture
def sink(place: Place) -> SqlSink:
    """Earlier runs have left a long history."""
    sink, _ = ready(sink_to(place))
    place.sql(
        "WITH RECURSIVE r(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM r WHERE n < ?)"
        ' INSERT INTO oncely_ranges (pipeline, topic, "partition", range_start, range_end, epoch,'
        " kind, records, written, rejected, filtered)"
        " SELECT 'p', 't', 0, n, n + 1, 1, 'data', 1, 1, 0, 0 FROM r",
        LONG - 1,
    )
    place.sql('UPDATE oncely_positions SET "position" = ?', LONG)
    return sink


def ranges(place: Place) -> int:
    return int(place.sql("SELECT COUNT(*) FROM oncely_ranges")[0][0])


def keeper(sink: SqlSink) -> OpenLedger[Any]:
    decoder: Any = SimpleNamespace(schema=SCHEMA, needs=frozenset())
    nothing: Any = None
    return OpenLedger(CommitContext(sink, nothing, decoder))


def test_a_run_that_only_opens_tidies(place: Place, sink: SqlSink) -> None:
    """As runs do that a timer starts: none of them has many batches."""
    keeper(sink).open(Takeover(SOURCE, dict, {T0: 0}))
    assert ranges(place) <= BOUND


def test_a_long_run_tidies_by_the_rows_that_it_adds(place: Place) -> None:
    """Batches of many ranges are tidied after sooner than batches of few."""
    sink, _ = ready(sink_to(place))
    run = keeper(sink)
    run.open(Takeover(SOURCE, dict, {T0: 0}))
    tidied: list[int] = []
    store: Any = SimpleNamespace(tidy=lambda _: tidied.append(1))
    put(run, store=store)
    for batch in range(40):
        run.tidy(1_000)
        assert len(tidied) == (batch + 1) // 10


class OneCheckpoint:
    """Each batch of the query reads one more record of the topic."""

    def query_id(self) -> str:
        return "query"

    def plan(self, batch_id: int) -> str:
        return f"plan of batch {batch_id}"

    def ranges(self, batch_id: int) -> BatchRanges:
        at = LONG + batch_id
        return BatchRanges({T0: OffsetRange(at, at + 1)}, complete=True)


def test_write_stream_tidies(place: Place, sink: SqlSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.HeldRows, "of", lambda *_: HeldRows(None, ()))  # type: ignore[arg-type]
    monkeypatch.setattr(plugin.HeldRows, "read", lambda _: iter(()))
    fence = sink.open(Takeover(SOURCE, dict, {})).fence
    frame: Any = None
    batches = plugin.PublishedBatches(
        sink.bind(), fence, OneCheckpoint(), lambda _: {}, stateful=False  # type: ignore[arg-type]
    )  # fmt: skip
    for batch in range(3):
        batches(frame, batch)
    assert ranges(place) <= BOUND
