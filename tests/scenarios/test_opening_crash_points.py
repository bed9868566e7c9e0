"""The driver is killed before and after every call while it opens, resets or tidies the ledger."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from oncely.core.claim import Fence, Notes, Opened, RejectCount, Takeover
from oncely.core.ranges import TopicPartition
from oncely.errors import Fenced
from tests.scenarios import commit_jobs
from tests.scenarios import opening_jobs as jobs
from tests.scenarios.commit_reader import END, check_restart, look, new_task
from tests.scenarios.commit_topic import Task
from tests.scenarios.zygote import Ended, Zygote
from tests.sinktools import SOURCE, T0, T1, Place

on_sqlite_first = pytest.mark.parametrize(
    "place",
    [
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.long),
    ],
    indirect=True,
)
"""On PostgreSQL, where there are more calls, in `make proof`."""

Prepare = Callable[[Task], Fence]
"""Brings the ledger to where the step begins; the fence of the run that does the step."""
START = {T0: 0, T1: 0}


@pytest.fixture
def crashes(zygote: Zygote, place: Place) -> Callable[[jobs.Step, Prepare], Iterator[Task]]:
    """``crashes(step, prepare)``: a task for each call at which the step was killed.

    Not for a call that follows a query: a process that is killed after a query leaves the database
    as one that is killed before it.
    """

    def run(step: jobs.Step, prepare: Prepare, at: int, when: str) -> tuple[Task, Ended]:
        task = new_task("append", place)
        return task, zygote.run(jobs.die_at, step, task, prepare(task), at, when)

    def killed(step: jobs.Step, prepare: Prepare, at: int, when: str = "before") -> Task:
        task, ended = run(step, prepare, at, when)
        assert ended.signal == signal.SIGKILL, ended.error
        return task

    def all_of_them(step: jobs.Step, prepare: Prepare) -> Iterator[Task]:
        yield killed(step, prepare, 1)  # the ledger may not be there yet
        _, ended = run(step, prepare, 0, "never")
        calls = ended.value
        assert len(calls) > 3
        for at, previous in enumerate(calls[:-1], 2):
            if previous != "query":
                yield killed(step, prepare, at)
        yield killed(step, prepare, len(calls), "after")

    return all_of_them


def never_opened(task: Task) -> Fence:
    return Fence(task.name, 0)


def opened(task: Task) -> Fence:
    return jobs.open_at(task, {T0: 0, T1: 0}).fence


def committed(*ends: int) -> Prepare:
    """A run that has committed up to each of the offsets in turn."""

    def prepare(task: Task) -> Fence:
        fence = opened(task)
        for end in ends:
            plain = commit_jobs.write(task, fence, lambda _, call: call(), end)
            assert plain
        return fence

    return prepare


def ledger(task: Task, columns: str, table: str) -> list[tuple[Any, ...]]:
    """Rows of a ledger table, which may not be there yet."""
    if not task.place.dialect.name.startswith("postgres") and not task.place.file.exists():
        return []
    catalog = "pg_tables WHERE tablename" if task.place.is_postgres else "sqlite_master WHERE name"
    here = " AND schemaname = current_schema()" if task.place.is_postgres else ""
    if not task.place.sql(f"SELECT 1 FROM {catalog} = '{table}'{here}"):
        return []
    where = f"WHERE pipeline = '{task.name}' ORDER BY 1, 2"
    return task.place.sql(f"SELECT {columns} FROM {table} {where}")


def positions(task: Task) -> dict[int, int]:
    return dict(ledger(task, '"partition", "position"', "oncely_positions"))


@on_sqlite_first
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(jobs.open_first, id="all"),
        pytest.param(jobs.open_first_some, id="some", marks=pytest.mark.long),
    ],
)
def test_a_latest_start_stays_where_it_was_settled(crashes: Any, step: jobs.Step) -> None:
    """Killed before its first batch: what arrives meanwhile is not skipped at the next start."""
    latest, later = {0: 5, 1: 7}, {0: 50, 1: 70}
    outcomes = []
    for task in crashes(step, never_opened):
        settled = positions(task)
        assert settled in ({}, latest)
        jobs.open_at(task, jobs.LATER)
        assert positions(task) == (latest if settled else later)
        outcomes.append(bool(settled))
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_an_added_partition_begins_at_its_first_offset(zygote: Zygote, crashes: Any) -> None:
    def one_partition(task: Task) -> Fence:
        return jobs.open_at(task, {T0: 0}).fence

    for task in crashes(jobs.add_partition, one_partition):
        assert positions(task) in ({0: 0}, {0: 0, 1: 0})
        jobs.open_at(task, jobs.LATER)
        assert positions(task) == {0: 0, 1: 0}
        check_restart(zygote, task)


def test_a_gap_is_kept_once(crashes: Any) -> None:
    outcomes = []
    for task in crashes(jobs.record_gap, opened):
        before = positions(task)[0], gaps(task)
        assert before in ((0, []), (5, [(0, 5)]))
        fence = jobs.open_at(task, {T0: 0, T1: 0}).fence
        jobs.record_gap(task, fence, lambda _, call: call())
        assert (positions(task)[0], gaps(task)) == (5, [(0, 5)])
        outcomes.append(before[0])
    assert set(outcomes) == {0, 5}


def gaps(task: Task) -> list[tuple[Any, ...]]:
    kinds = ledger(task, "range_start, range_end, kind", "oncely_ranges")
    return [(start, end) for start, end, kind in kinds if kind == "gap"]


@on_sqlite_first
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(jobs.take_over, id="all"),
        pytest.param(jobs.take_over_some, id="some", marks=pytest.mark.long),
    ],
)
def test_a_takeover_that_dies_leaves_one_run_that_may_write(
    zygote: Zygote, crashes: Any, step: jobs.Step
) -> None:
    """The old run goes on unharmed or is fenced; either way nothing is doubled."""
    outcomes, fences = [], []

    def prepare(task: Task) -> Fence:
        fences.append(committed(8)(task))
        return fences[-1]

    for task in crashes(step, prepare):
        old = zygote.run(commit_jobs.plainly, task, fences[-1])
        assert not old.error or "Fenced" in old.error, old.error
        assert (look(task) == END) == (not old.error)
        outcomes.append(bool(old.error))
        check_restart(zygote, task)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


@on_sqlite_first
def test_a_takeover_that_dies_leaves_the_holder_of_other_partitions_alone(
    zygote: Zygote, crashes: Any
) -> None:
    fences: list[Fence] = []
    outcomes = set()

    def prepare(task: Task) -> Fence:
        fences[:] = [commit_jobs.opened(task.sink(), one).fence for one in (T0, T1)]
        return fences[0]

    for task in crashes(jobs.take_over_some, prepare):
        loses, keeps = (zygote.run(commit_jobs.plainly, task, fence) for fence in fences)
        assert not keeps.error, keeps.error
        assert not loses.error or "Fenced" in loses.error, loses.error
        assert look(task) == {**END, **({0: 0} if loses.error else {})}
        outcomes.add(bool(loses.error))
        check_restart(zygote, task)
    assert outcomes == {False, True}


@on_sqlite_first
def test_a_takeover_of_all_that_dies_is_one_for_workers_too_or_has_done_nothing(
    crashes: Any,
) -> None:
    """A worker that was started before takes nothing from it, and goes on if it took nothing."""
    since: list[Fence] = []
    outcomes = []

    def take(task: Task, *partitions: TopicPartition) -> Opened:
        some = Takeover(SOURCE, lambda: START, START, partitions=frozenset(partitions))
        return task.sink().open(replace(some, since=since[0] if partitions else None))

    def prepare(task: Task) -> Fence:
        since[:] = [whole] if (whole := take(task).whole) else []
        return take(task, T0).fence

    for task in crashes(jobs.take_over, prepare):
        dead = len(set(ledger(task, "epoch, run", "oncely_positions"))) == 1
        with pytest.raises(Fenced) if dead else nullcontext():
            take(task, T0)
        outcomes.append(dead)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_a_count_of_rejects_is_noted_or_was_not(crashes: Any) -> None:
    """What was counted before stays counted."""
    before = RejectCount("10", 1_000, 3)
    outcomes = []

    def prepare(task: Task) -> Fence:
        fence = opened(task)
        task.sink().ledger.note(fence, Notes(counted=before))
        return fence

    for task in crashes(jobs.note_rejects, prepare):
        outcomes.append(jobs.open_at(task, {}).counted)
    assert set(outcomes) == {before, jobs.COUNTED}
    assert outcomes == sorted(outcomes, key=lambda one: one.rejects)


@on_sqlite_first
def test_a_reset_happens_whole_or_not_at_all(crashes: Any) -> None:
    outcomes = []
    for task in crashes(jobs.reset, committed(8, 99)):
        moved = positions(task)[0] == 3
        assert positions(task) == ({**END, 0: 3} if moved else END)
        superseded = ledger(task, '"partition", superseded', "oncely_ranges")
        assert {number for number, mark in superseded if mark} == ({0} if moved else set())
        epochs = {epoch for (epoch, _) in ledger(task, "epoch, topic", "oncely_positions")}
        assert epochs == ({2} if moved else {1})
        some = commit_jobs.opened(task.sink(), T0)  # by a run of some partitions, first
        assert dict(some.positions) == {T0: positions(task)[0]}
        assert {tp.partition: at for tp, at in jobs.open_at(task, {}).positions.items()} == (
            positions(task)
        )
        outcomes.append(moved)
    assert set(outcomes) == {False, True}


@on_sqlite_first
def test_a_history_that_is_being_joined_covers_every_offset(zygote: Zygote, crashes: Any) -> None:
    outcomes = set()
    for task in crashes(jobs.join_history, committed(3, 6, 9, 12)):
        look(task)
        outcomes.add(len(ledger(task, "topic, range_start", "oncely_ranges")))
        check_restart(zygote, task)
    # Of each partition three are joined, the newest stays; each partition is a transaction.
    assert outcomes == {8, 6, 4}
