"""The reject budget is spent once, however often the pipeline is started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.commit.path import Outcome
from oncely.commit.run import CommitContext, OpenLedger
from oncely.core.claim import Budget, Counts, RejectCount, Takeover
from oncely.core.ranges import OffsetRange
from oncely.errors import Fenced, TooManyRejects
from oncely.runtimes.batches.commit import PartitionCommit, TaskResult
from tests.contracts.sinks import ALL, adapter
from tests.deliverytools import put
from tests.sinktools import SCHEMA, SOURCE, T0, T1

Make = Callable[[], Any]
_START = {T0: 0, T1: 0}
_DECODER: Any = SimpleNamespace(schema=SCHEMA, needs=frozenset())


@pytest.fixture(params=ALL)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Sinks of one pipeline, each as a process of its own makes it."""
    for to in adapter(request.param, request.getfixturevalue, tmp_path):
        yield to.sink


def started(make: Make, most: int) -> OpenLedger[Any]:
    """A run whose pipeline file allows so many rejects."""
    nothing: Any = None
    run = OpenLedger[Any](CommitContext(make(), nothing, _DECODER, Budget(count=most)))
    run.open(Takeover(SOURCE, lambda: _START, _START))
    return run


def batch(run: OpenLedger[Any], records: int, rejects: int) -> None:
    """What every way of committing does when a batch has taken effect."""
    run.count(Counts(records, 0, rejects, 0))
    run.tidy(0)


def left(run: OpenLedger[Any]) -> int | None:
    return run.budget.left(0, 0)


def counted(make: Make) -> RejectCount:
    """What the ledger tells the next run."""
    return make().open(Takeover(SOURCE, lambda: _START, _START)).counted  # type: ignore[no-any-return]


def test_a_run_that_is_started_again_goes_on_counting(make: Make) -> None:
    for spent in range(3):
        run = started(make, 10)
        assert left(run) == 10 - 4 * spent
        batch(run, 1_000, 4)
    assert left(run) == 0  # tasks side by side have spent more
    assert left(started(make, 10)) == 0
    assert counted(make) == RejectCount("10", 3_000, 12)


def test_a_changed_setting_begins_a_new_count(make: Make) -> None:
    batch(started(make, 10), 1_000, 7)
    assert left(started(make, 20)) == 20
    assert counted(make) == RejectCount("20")
    assert left(started(make, 10)) == 10


def test_a_reset_begins_a_new_count(make: Make) -> None:
    batch(started(make, 10), 1_000, 7)
    moved = make().open(Takeover(SOURCE, lambda: _START, _START, reset=lambda _: {T0: 0}))
    assert moved.counted == RejectCount()
    assert left(started(make, 10)) == 10


def test_a_run_that_is_fenced_notes_nothing(make: Make) -> None:
    old = started(make, 10)
    new = started(make, 10)
    batch(new, 1_000, 3)
    with pytest.raises(Fenced):
        batch(old, 1_000, 9)
    old.finish()
    assert counted(make) == RejectCount("10", 1_000, 3)


def test_records_without_rejects_are_noted_when_the_run_ends(make: Make) -> None:
    """Not with each batch; and a run that is killed forgets them, which makes no budget larger."""
    run = started(make, 10)
    batch(run, 1_000, 1)
    noting = run.context.sink
    put(run, sink=SimpleNamespace(tidy=lambda _: None))
    batch(run, 5_000, 0)
    put(run, sink=noting)
    run.finish()
    assert counted(make) == RejectCount("10", 6_000, 1)


def test_a_run_that_opens_again_keeps_what_it_has_counted(make: Make) -> None:
    run = started(make, 10)
    run.count(Counts(1_000, 0, 4, 0))
    run.open(Takeover(SOURCE, lambda: _START, _START, run.fence.epoch))
    assert left(run) == 6
    assert left(started(make, 10)) == 6


def test_what_was_committed_beside_the_stop_is_counted(make: Make) -> None:
    """A task stops at the budget; another one, and earlier chunks, have added rejects."""
    nothing: Any = None
    done = Outcome(T0, OffsetRange(0, 100), Counts(100, 94, 6, 0))
    jobs: Any = SimpleNamespace(
        run=lambda task, shares: [TaskResult(done), TooManyRejects("enough")]
    )
    run = PartitionCommit(started(make, 10), nothing, jobs)
    with pytest.raises(TooManyRejects, match="enough"):
        run.run(0, {T0: OffsetRange(0, 100), T1: OffsetRange(0, 100)})
    assert counted(make) == RejectCount("10", 100, 6)
