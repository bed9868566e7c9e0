"""A commit meets others: a second attempt, a newer run, a deadlock, a server in trouble."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

import psycopg
import pytest

from oncely.core.ranges import TopicPartition
from oncely.errors import OncelyError
from oncely.stores.sql.connection import Contention, close_all
from oncely.testing.processes import await_that
from tests.scenarios import commit_jobs as jobs
from tests.scenarios.commit_reader import END, check_restart, look, new_task
from tests.scenarios.commit_topic import KINDS
from tests.scenarios.zygote import Zygote
from tests.sinktools import T0, T1, Place, trigger


def open_transactions(place: Place) -> set[int]:
    """The sessions of sinks that are inside a transaction."""
    found = place.sql(
        "SELECT pid FROM pg_stat_activity"
        " WHERE datname = current_database() AND starts_with(application_name, 'oncely/')"
        " AND xact_start IS NOT NULL"
    )
    return {pid for (pid,) in found}


# -- two holders ---------------------------------------------------------------------------


def test_a_holder_of_other_partitions_is_not_ended_inside_copy(
    zygote: Zygote, on_postgres: Place
) -> None:
    """Nor with the lock of its position: another run's takeover does not touch either."""
    for stopped, at in ((jobs.hurt_inside_copy, (2, "SIGSTOP")), (jobs.stop_at, ("commit",))):
        task = new_task("append", on_postgres)
        jobs.opened(task.sink(), T0)
        fence = jobs.opened(task.sink(), T1).fence
        holder = zygote.start(stopped, task, fence, *at)
        holder.wait_until_stopped()
        paused = open_transactions(on_postgres)
        check_restart(zygote, task, T0)
        assert paused <= open_transactions(on_postgres), "ended by a takeover of another partition"
        holder.go_on()
        ended = holder.wait()
        assert not ended.error, ended.error
        assert look(task) == END


# -- paused --------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [(), (T0,)], ids=["all", "some"])
@pytest.mark.parametrize("kind", ["append", "upsert"])
def test_a_zombie_paused_inside_copy_past_a_takeover(
    zygote: Zygote, on_postgres: Place, kind: str, taken: tuple[TopicPartition, ...]
) -> None:
    """No timeout of the server fires while it waits for COPY data: the takeover ends it."""
    task = new_task(kind, on_postgres)
    zombie = zygote.start(jobs.hurt_inside_copy, task, jobs.prepare(task).fence, 2, "SIGSTOP")
    zombie.wait_until_stopped()
    paused = open_transactions(on_postgres)
    check_restart(zygote, task, *taken)
    if kind == "append":  # an upsert copies into a table of its own, and holds nobody up
        assert len(paused - open_transactions(on_postgres)) == 1, "not ended by the takeover"
    zombie.go_on()
    ended = zombie.wait()
    assert "Fenced" in ended.error
    check_restart(zygote, task)


@pytest.mark.parametrize(
    ("kind", "taken"),
    [("append", ()), ("upsert", ()), ("batch", ()), ("append", (T0,)), ("upsert", (T1,))],
)
def test_a_zombie_paused_with_the_position_s_lock(
    zygote: Zygote, on_postgres: Place, kind: str, taken: tuple[TopicPartition, ...]
) -> None:
    """Between compare-and-set and COMMIT."""
    task = new_task(kind, on_postgres)
    zombie = zygote.start(jobs.stop_at, task, jobs.prepare(task).fence, "commit")
    zombie.wait_until_stopped()
    paused = open_transactions(on_postgres)
    check_restart(zygote, task, *taken)
    assert len(paused - open_transactions(on_postgres)) == 1, "not ended by the takeover"
    zombie.go_on()
    assert "Fenced" in zombie.wait().error
    check_restart(zygote, task)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_attempt_at_the_same_ranges(zygote: Zygote, place: Place, kind: str) -> None:
    """A retry or a speculative copy, in the same epoch: both have decided to write."""
    task = new_task(kind, place)
    fence = jobs.prepare(task).fence
    first = zygote.start(jobs.stop_at, task, fence, "begin")
    first.wait_until_stopped()
    second = zygote.run(jobs.plainly, task, fence)
    assert not second.error, second.error
    assert look(task) == END
    first.go_on()
    ended = first.wait()
    assert not ended.error, ended.error
    assert {replayed for *_, replayed in ended.value} == {True}
    assert look(task) == END


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_attempt_while_the_first_holds_the_lock(
    zygote: Zygote, on_postgres: Place, kind: str
) -> None:
    """It waits at the compare-and-set (an upsert at a key), and then finds itself too late."""
    task = new_task(kind, on_postgres)
    fence = jobs.prepare(task).fence
    first = zygote.start(jobs.stop_at, task, fence, "commit")
    first.wait_until_stopped()
    second = zygote.start(jobs.plainly, task, fence)
    wait_for_lock(on_postgres)
    first.go_on()
    for job, late in ((first, False), (second, True)):
        ended = job.wait()
        assert not ended.error, ended.error
        assert [replayed for *_, replayed in ended.value] == [late, late]
    assert look(task) == END


@pytest.mark.parametrize("wrote", [False, True], ids=["only opened", "wrote"])
def test_a_zombie_of_sqlite_that_had_decided(zygote: Zygote, on_sqlite: Place, wrote: bool) -> None:
    """Nobody ends its session; its compare-and-set finds another epoch, or position too."""
    task = new_task("append", on_sqlite)
    zombie = zygote.start(jobs.stop_at, task, jobs.prepare(task).fence, "begin")
    zombie.wait_until_stopped()
    jobs.opened(task.sink())
    if wrote:
        check_restart(zygote, task)
    zombie.go_on()
    assert "Fenced" in zombie.wait().error
    assert look(task) == (END if wrote else {0: 0, 1: 0})


def test_a_paused_writer_of_sqlite_keeps_the_lock(zygote: Zygote, on_sqlite: Place) -> None:
    """There is no server that could end it: the takeover fails, and nothing was taken over."""
    place = Place(on_sqlite.url, connect_timeout=0.1)
    task = new_task("append", place)
    writer = zygote.start(jobs.stop_at, task, jobs.prepare(task).fence, "commit")
    writer.wait_until_stopped()
    with pytest.raises(Contention):
        jobs.opened(task.sink())
    writer.go_on()
    assert not writer.wait().error  # it is still the one that may write
    assert look(task) == END
    assert jobs.opened(task.sink()).fence.epoch == 2


# -- errors that say nothing about a row ---------------------------------------------------


@pytest.mark.parametrize(
    ("state", "meaning"),
    [("53100", "disk_full"), ("40P01", "deadlock_detected"), ("53200", "out_of_memory"),
     ("57014", "query_canceled"), ("40001", "serialization_failure")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["append", "upsert"])
def test_no_reject_for_an_error_of_the_server(
    on_postgres: Place, kind: str, state: str, meaning: str
) -> None:
    """The server fails twice in the middle of the rows, then has recovered.

    No later record of partition 0 has the key of offset 14: an upsert writes that row, too.
    """
    task = new_task(kind, on_postgres)
    fence = jobs.prepare(task).fence
    on_postgres.sql("CREATE SEQUENCE tries")
    trigger(
        on_postgres,
        f"IF NEW.kafka_offset = 14 AND nextval('{on_postgres.schema}.tries') <= 2 THEN"
        f" RAISE EXCEPTION '{meaning}' USING ERRCODE = '{state}'; END IF; RETURN NEW;",
        f"BEFORE INSERT ON {task.name}",
    )
    jobs.write(task, fence, lambda _, call: call())
    assert look(task) == END
    assert on_postgres.sql("SELECT last_value > 2 FROM tries") == [(True,)]


def test_a_disk_that_stays_full_ends_in_an_error_and_writes_nothing(on_postgres: Place) -> None:
    task = new_task("append", on_postgres)
    fence = jobs.prepare(task).fence
    full = "RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100';"
    trigger(on_postgres, full, f"BEFORE INSERT ON {task.name}")
    with pytest.raises(OncelyError, match="no space left") as caught:
        jobs.write(task, fence, lambda _, call: call())
    assert caught.value.retryable
    assert look(task) == {0: 0, 1: 0}


def test_a_deadlock_rejects_nobody(on_postgres: Place) -> None:
    """Two sessions take an old and a new key in opposite order; ours is the one that is ended."""
    task = new_task("upsert", on_postgres)
    fence = jobs.prepare(task).fence
    jobs.write(task, fence, lambda _, call: call(), last=8)
    close_all()  # the session that is kept has no wrapper
    ids = {row[0] for row in task.place.sql(f"SELECT id FROM {task.name}")}
    calls = []

    def counting(name: str, call: Any) -> Any:
        calls.append(name)
        return call()

    with closing(task.place.session()) as other:
        other.execute("SET deadlock_timeout = '60s'")  # ours finds it first
        other.execute("BEGIN")
        touch = f"UPDATE {task.name} SET name = name WHERE id = %s"
        other.execute(touch.encode(), (max(ids),))
        writer = threading.Thread(target=jobs.write, args=(task, fence, counting))
        writer.start()
        wait_for_lock(task.place)
        new = f"INSERT INTO {task.name} (id) VALUES (%s)"
        other.execute(new.encode(), (min({*range(4)} - ids),))
        other.execute("ROLLBACK")
        writer.join(180)
    assert calls.count("begin") > 1
    assert deadlocks(task.place) >= 1
    assert look(task) == END


def wait_for_lock(place: Place) -> None:
    waiting = (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND wait_event_type = 'Lock'"
    )
    await_that(lambda: place.sql(waiting), "a session that waits for a lock")


def deadlocks(place: Place) -> int:
    until = time.monotonic() + 60
    while True:
        with psycopg.connect(place.url, autocommit=True) as session:
            session.execute("SELECT pg_stat_force_next_flush()")
            row = session.execute(
                "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
            ).fetchone()
        if (row and row[0]) or time.monotonic() > until:
            return int(row[0]) if row else 0
        time.sleep(0.05)
