"""A commit is killed before and after every call to the database; nothing is lost or doubled."""

from __future__ import annotations

import itertools
import signal

import pytest

from tests.scenarios import commit_jobs as jobs
from tests.scenarios.commit_reader import END, check_restart, look, new_task
from tests.scenarios.commit_topic import KINDS, topic
from tests.scenarios.zygote import Zygote
from tests.sinktools import KINDS as PLACES
from tests.sinktools import T0, T1, Place


def crossed(on_postgres: str, longest: str = "") -> pytest.MarkDecorator:
    """Each kind on each database; PostgreSQL's others, and the kind of most calls, are long."""

    def is_long(place: str, kind: str) -> bool:
        return kind == longest if place == "sqlite" else kind != on_postgres

    return pytest.mark.parametrize(
        ("place", "kind"),
        [
            pytest.param(place, kind, marks=[pytest.mark.long] * is_long(place, kind))
            for place in PLACES
            for kind in KINDS
        ],
        indirect=["place"],
    )


in_copy = pytest.mark.parametrize(
    "kind",
    [
        "append",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("append with rejects", "staged append", "upsert")
        ),
    ],
)


# -- killed --------------------------------------------------------------------------------


@crossed("staged append", "upsert")
def test_killed_at_every_call(zygote: Zygote, place: Place, kind: str) -> None:
    """Before each call, which is after the one before it; and after the last one.

    Not before a call that follows a query, which changes nothing: it is killed before the query.
    """
    task = new_task(kind, place)
    calls = zygote.run(jobs.die_at, task, jobs.prepare(task).fence, 0, "never").value
    assert look(task) == END
    for at, previous in enumerate(["", *calls[:-1]], 1):
        if previous == "query":
            continue
        task = new_task(kind, place)
        ended = zygote.run(jobs.die_at, task, jobs.prepare(task).fence, at, "before")
        assert ended.signal == signal.SIGKILL, ended.error
        # Whatever took effect did so as a whole.
        assert any(look(task).values()) == (at - 1 > last_commit(calls))
        check_restart(zygote, task)
    task = new_task(kind, place)
    ended = zygote.run(jobs.die_at, task, jobs.prepare(task).fence, len(calls), "after")
    assert ended.signal == signal.SIGKILL
    assert look(task) == END
    check_restart(zygote, task)


def last_commit(calls: list[str]) -> int:
    """The one that moves the positions."""
    return max(at for at, name in enumerate(calls) if name == "commit")


@crossed("batch upsert")
def test_killed_twice(zygote: Zygote, place: Place, kind: str) -> None:
    """The restart is killed too, each time one call later."""
    for at in range(2, 12, 3):
        task = new_task(kind, place)
        zygote.run(jobs.die_at, task, jobs.prepare(task).fence, at, "before")
        fence = jobs.opened(task.sink()).fence
        zygote.run(jobs.die_at, task, fence, at + 1, "after")
        look(task)
        check_restart(zygote, task)


@in_copy
def test_killed_inside_copy(zygote: Zygote, on_postgres: Place, kind: str) -> None:
    for at in itertools.count(1):
        task = new_task(kind, on_postgres)
        ended = zygote.run(jobs.hurt_inside_copy, task, jobs.prepare(task).fence, at, "SIGKILL")
        assert not ended.error, ended.error
        if not ended.signal:
            assert at > 3
            assert look(task) == END
            return
        look(task)
        check_restart(zygote, task)


# -- input that ends early -----------------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True
)
def test_a_task_claims_what_it_has_read(zygote: Zygote, place: Place) -> None:
    """Cut after each record: the position stands behind the last one read, never further."""
    records = [(tp, one.offset) for tp, own in topic("append").items() for one in own]
    for read in range(len(records) + 1):
        task = new_task("append", place)
        ended = zygote.run(jobs.write_input, task, jobs.prepare(task).fence, read)
        assert not ended.error, ended.error
        claimed = {tp.partition: offset + 1 for tp, offset in records[:read]}
        assert look(task) == {0: 0, 1: 0} | claimed
        if read % 4 == 1:
            check_restart(zygote, task)


# -- no answer -----------------------------------------------------------------------------


@crossed("append", "upsert")
def test_every_answer_lost_once(zygote: Zygote, place: Place, kind: str) -> None:
    for at in itertools.count(1):
        task = new_task(kind, place)
        ended = zygote.run(jobs.lose_answer, task, jobs.prepare(task).fence, at)
        assert not ended.error, ended.error
        calls, outcomes = ended.value
        assert look(task) == END
        assert sorted(tp for tp, _, _ in outcomes) == [T0, T1]  # each reported once
        if len(calls) < at:
            return
        assert all(replayed for *_, replayed in outcomes) == (at - 1 == last_commit(calls))


@in_copy
def test_session_terminated_inside_copy(zygote: Zygote, on_postgres: Place, kind: str) -> None:
    for at in (1, 2, 3):
        task = new_task(kind, on_postgres)
        ended = zygote.run(jobs.hurt_inside_copy, task, jobs.prepare(task).fence, at, "terminate")
        assert not ended.error, ended.error
        assert not ended.signal
        assert look(task) == END
