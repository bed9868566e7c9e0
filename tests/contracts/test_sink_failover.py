"""A database that goes back to an older state, rows and ledger together: the run goes on there.

As a replica does that lagged behind when it took over from its primary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.core.ranges import OffsetRange
from oncely.errors import Fenced, LedgerWentBack
from oncely.runtimes.batches import PartitionCommit
from oncely.runtimes.publishing import publish
from oncely.sinks.base import Fence, PositionMoved, Publication, QueryBatch, RejectCount, Written
from oncely.sinks.sql.sink import SqlSink
from tests.contracts.looking import history, ids
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    T1,
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


def test_an_epoch_that_is_given_out_again_belongs_to_the_newer_run(place: Place) -> None:
    """The failover has lost the takeover by which the older run was given the same number."""
    first, fence = ready(sink_to(place))
    commit_all(first, at_t0(0, numbered(0, 3)), fence)
    replica = Replica(place)
    older, lost = ready(sink_to(place))
    decided = older.entries(lost)
    replica.takes_over()
    newer, held = ready(sink_to(place))
    assert held.epoch == lost.epoch
    with pytest.raises(PositionMoved):
        older.commit(at_t0(3, numbered(3, 6)), decided, lost)
    with pytest.raises(PositionMoved):
        older.publish(_publication(3, 6, QueryBatch("query", 0, "plan")), decided, lost)
    for step in _steps(older, lost):
        with pytest.raises(Fenced, match=f"another run that was given epoch {held.epoch}"):
            step()
    older.note_leader_epochs({T0: 7}, lost)
    assert newer.leader_epochs(held) == {}
    commit_all(newer, at_t0(3, numbered(3, 6)), held)
    assert ids(place) == list(range(6))
    assert newer.entries(held).keys() == {T0}


def _steps(sink: SqlSink, fence: Fence) -> list[Callable[[], object]]:
    """Whatever a run does that asks whether it is fenced."""
    return [
        lambda: commit_all(sink, at_t0(3, numbered(3, 6)), fence),
        lambda: publish(sink, _publication(3, 6), fence, lambda own: own.entries(fence)),
        lambda: sink.tidy(fence),
        lambda: sink.add_partitions({T1: 0}, SOURCE, fence),
        lambda: sink.note_rejects(RejectCount("3", 9, 1), fence),
        lambda: open_sink(sink, expected=fence.epoch),
    ]


def _publication(start: int, end: int, query: QueryBatch | None = None) -> Publication:
    ranges = {T0: OffsetRange(start, end)}
    return Publication(ranges, dict.fromkeys(ranges, Written(0, 0, 0, 0)), (), (), query)


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
    with pytest.raises(LedgerWentBack):
        publish(sink, _publication(6, 9), fence, lambda own: own.entries(fence))


def _driver(sink: SqlSink) -> PartitionCommit:
    decoder: Any = SimpleNamespace(schema=SCHEMA, needs=frozenset())
    return PartitionCommit(sink, None, decoder, None, ("t",))  # type: ignore[arg-type]
