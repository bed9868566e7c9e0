"""A database that goes back to an older state, rows and ledger together: the run goes on there.

As a replica does that lagged behind when it took over from its primary.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oncely.core.ranges import OffsetRange
from oncely.errors import LedgerWentBack
from oncely.runtimes.batches import PartitionCommit
from oncely.runtimes.publishing import publish
from oncely.sinks.base import Publication, Written
from oncely.sinks.sql.sink import SqlSink
from tests.contracts.looking import history, ids
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    Place,
    at_t0,
    commit_all,
    numbered,
    open_sink,
    ready,
    sink_to,
)

LEDGER = ("oncely_pipelines", "oncely_positions", "oncely_ranges", "oncely_rejects", "rows")


class Replica:
    """The state of a database at one moment, to which it can go back."""

    def __init__(self, place: Place) -> None:
        self.place = place
        for table in LEDGER:
            place.sql(f"CREATE TABLE kept_{table} AS SELECT * FROM {table}")

    def takes_over(self) -> None:
        for table in LEDGER:
            self.place.sql(f"DELETE FROM {table}")
            self.place.sql(f"INSERT INTO {table} SELECT * FROM kept_{table}")


@pytest.mark.parametrize("lag", ["a commit", "a takeover"])
def test_a_run_goes_on_where_the_database_stands_after_a_failover(place: Place, lag: str) -> None:
    sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(0, numbered(0, 3)), fence)
    replica = Replica(place)
    if lag == "a takeover":
        sink, fence = ready(sink_to(place))
    commit_all(sink, at_t0(3, numbered(3, 6)), fence)
    replica.takes_over()
    with pytest.raises(LedgerWentBack, match="went back"):
        commit_all(sink, at_t0(6, numbered(6, 9)), fence)
    again = open_sink(sink, expected=fence.epoch)
    assert again.positions == {T0: 3}
    commit_all(sink, at_t0(3, numbered(3, 9)), again.fence)
    assert ids(place) == list(range(9))
    assert [row[1:3] for row in history(place)] == [(0, 3), (3, 9)]


def test_the_driver_sees_it_too(place: Place) -> None:
    """After a batch of its tasks, and while nothing is to do."""
    sink, _ = ready(sink_to(place))
    replica = Replica(place)
    driver = _driver(sink)
    fence = driver.open(SOURCE, dict, {T0: 0}, None).fence
    replica.takes_over()
    with pytest.raises(LedgerWentBack):
        driver.positions()
    with pytest.raises(LedgerWentBack):
        driver.sink.tidy(fence)
    driver.open(SOURCE, dict, {T0: 0}, fence.epoch)
    assert driver.positions() == {T0: 0}
    place.sql("DELETE FROM oncely_positions")
    with pytest.raises(LedgerWentBack):
        driver.positions()


def test_a_batch_that_begins_beyond_the_ledger_is_not_published(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    ranges = {T0: OffsetRange(6, 9)}
    what = Publication(ranges, dict.fromkeys(ranges, Written(0, 0, 0, 0)), (), ())
    with pytest.raises(LedgerWentBack):
        publish(sink, what, fence, lambda own: own.entries(fence))


def _driver(sink: SqlSink) -> PartitionCommit:
    decoder: Any = SimpleNamespace(schema=SCHEMA, needs=frozenset())
    return PartitionCommit(sink, None, decoder, None, ("t",))  # type: ignore[arg-type]
