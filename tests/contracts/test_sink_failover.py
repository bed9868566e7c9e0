"""A database that goes back to an older state, rows and ledger together: the run goes on there.

As a replica does that lagged behind when it took over from its primary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.commit.path import publish
from oncely.commit.run import CommitContext, OpenLedger
from oncely.core.batch import Batch
from oncely.core.claim import (
    Claim,
    Counts,
    Fence,
    Notes,
    PositionMoved,
    QueryBatch,
    RejectCount,
    Takeover,
)
from oncely.core.ranges import OffsetRange
from oncely.errors import Fenced, LedgerWentBack
from oncely.kinds.sql.sink import SqlSink
from tests.contracts.looking import history, ids
from tests.sinktools import (
    SCHEMA,
    SOURCE,
    T0,
    T1,
    Place,
    asking_again,
    at_t0,
    commit_all,
    commit_on,
    numbered,
    open_sink,
    ready,
    sink_to,
    together,
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
    with pytest.raises(LedgerWentBack, match="put back to an older state"):
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
    decided = older.ledger.positions(lost)
    replica.takes_over()
    newer, held = ready(sink_to(place))
    assert held.epoch == lost.epoch
    with pytest.raises(PositionMoved):
        asking_again(lambda: commit_on(older, at_t0(3, numbered(3, 6)), decided, lost))
    batch, query = _publication(3, 6), QueryBatch("query", 0, "plan")
    with pytest.raises(PositionMoved):
        older.publish(batch, lost, Claim(lost, batch.ranges, decided, query=query))
    for step in _steps(older, lost):
        with pytest.raises(Fenced, match=f"another run that was given epoch {held.epoch}"):
            step()
    with newer.ledger.session(held) as session:
        assert newer.ledger.statements.leader_epochs(session) == {}
    commit_all(newer, at_t0(3, numbered(3, 6)), held)
    assert ids(place) == list(range(6))
    assert newer.ledger.positions(held).keys() == {T0}


def _steps(sink: SqlSink, fence: Fence) -> list[Callable[[], object]]:
    """Whatever a run does that asks whether it is fenced."""
    return [
        lambda: commit_all(sink, at_t0(3, numbered(3, 6)), fence),
        lambda: publish(
            together(sink), _publication(3, 6), fence, lambda: sink.ledger.positions(fence)
        ),
        lambda: sink.ledger.tidy(fence),
        lambda: sink.ledger.add_partitions(fence, {T1: 0}, SOURCE),
        lambda: sink.ledger.note(fence, Notes(counted=RejectCount("3", 9, 1))),
        lambda: sink.ledger.note(fence, Notes(leader_epochs={T0: 7})),
        lambda: open_sink(sink, expected=fence.epoch),
    ]


def _publication(start: int, end: int) -> Batch:
    ranges = {T0: OffsetRange(start, end)}
    return Batch(ranges, dict.fromkeys(ranges, Counts(0, 0, 0, 0)), (), ())


def test_the_driver_sees_it_too(place: Place) -> None:
    """After a batch of its tasks, and while nothing is to do."""
    sink, _ = ready(sink_to(place))
    replica = Replica(place)
    driver = _driver(sink)
    fence = driver.open(Takeover(SOURCE, dict, {T0: 0})).fence
    replica.takes_over()
    with pytest.raises(LedgerWentBack):
        driver.positions()
    with pytest.raises(LedgerWentBack):
        driver.context.ledger.tidy(fence)
    driver.open(Takeover(SOURCE, dict, {T0: 0}, fence.epoch))
    assert driver.positions() == {T0: 0}
    place.sql("DELETE FROM oncely_positions")
    with pytest.raises(LedgerWentBack):
        driver.positions()


def test_a_batch_that_begins_beyond_the_ledger_is_not_published(place: Place) -> None:
    sink, fence = ready(sink_to(place))
    with pytest.raises(LedgerWentBack):
        publish(together(sink), _publication(6, 9), fence, lambda: sink.ledger.positions(fence))


def _driver(sink: SqlSink) -> OpenLedger[SqlSink]:
    decoder: Any = SimpleNamespace(schema=SCHEMA, needs=frozenset())
    nothing: Any = None
    return OpenLedger(CommitContext(sink, nothing, decoder))
