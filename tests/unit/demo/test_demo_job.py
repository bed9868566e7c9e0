"""The supervisor and the watcher: child processes, sessions and checkpoints as they come."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from demo import watch
from demo.job import Job, JobFailed, JobPlan
from demo.moment import Database, Missed, caught, open_transactions
from oncely.testing.processes import await_that

WRITER = """
import sys, time, psycopg
with psycopg.connect(sys.argv[1], application_name="writer/1") as c:
    c.execute("SELECT 1")
    with c.cursor().copy("COPY flights FROM STDIN") as copy:
        while True:
            copy.write("1\\n")
            time.sleep(0.01)
"""
IDLE = "import time\nwhile True: time.sleep(0.05)"


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(program: str, *arguments: str, url: str = "") -> Job:
        plan = JobPlan(
            name="job",
            command=[sys.executable, "-c", program, *arguments],
            environment={},
            log=tmp_path / "job.log",
            url=url,
            applications="writer/%",
            statement="COPY",
        )
        jobs.append(Job(plan))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


def until_done(job: Job) -> None:
    await_that(job.tend, "the end of the job")


def fails_first(times: int, code: int) -> str:
    return (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]);"
        " n = int(p.read_text()) if p.exists() else 0; p.write_text(str(n + 1));"
        f" sys.exit({code} if n < {times} else 0)"
    )


def test_a_job_that_ends_too_early_is_started_again(make_job, tmp_path):
    job = make_job(fails_first(2, 1), str(tmp_path / "count"))
    job.start()
    until_done(job)
    assert [one.exit_code for one in job.restarts] == [1, 1]


@pytest.mark.parametrize("code", [3, 2])
def test_a_fenced_or_misconfigured_job_is_not(make_job, tmp_path, code):
    job = make_job(fails_first(1, code), str(tmp_path / "count"))
    job.start()
    with pytest.raises(JobFailed, match=f"ended with code {code}"):
        until_done(job)
    assert job.restarts == []


def test_a_job_that_was_asked_to_stop_is_started_again_though_it_ends_well(make_job, tmp_path):
    flag = tmp_path / "second"
    program = (
        "import pathlib, signal, sys, time; p = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "if p.exists(): sys.exit(0)\n"
        "p.write_text(''); time.sleep(30)"
    )
    job = make_job(program, str(flag))
    job.start()
    await_that(flag.exists, "its start")
    job.ask_to_stop()
    until_done(job)
    assert [one.exit_code for one in job.restarts] == [0]


def test_closing_ends_the_whole_tree(make_job):
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IDLE!r}])"
    job = make_job(program)
    job.start()
    await_that(lambda: len(job.tree()) == 2, "its child")
    tree = job.tree()
    job.close()
    assert not any(process.is_running() for process in tree)


@pytest.fixture
def flights(database: str) -> Iterator[Database]:
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE flights (id bigint)")
    looking = Database(database)
    yield looking
    looking.close()


def test_a_job_is_caught_standing_still_inside_an_open_copy(make_job, flights, database):
    job = make_job(WRITER, database, url=database)
    job.start()
    with caught(job, flights, 20.0) as moment:
        assert moment.owner.pid == job.driver.pid
        assert moment.owner.status() == psutil.STATUS_STOPPED
        assert moment.transaction.statement == "COPY"
        first = open_transactions(flights, job)
        time.sleep(0.1)  # nothing moves: that is what is tested
        again = open_transactions(flights, job)
        assert [one.session for one in first] == [one.session for one in again]
    assert moment.owner.status() != psutil.STATUS_STOPPED


def test_a_job_without_a_transaction_is_missed_and_goes_on(make_job, flights, database):
    job = make_job(IDLE, url=database)
    job.start()
    with pytest.raises(Missed), caught(job, flights, 0.5):
        pass
    assert job.driver.status() != psutil.STATUS_STOPPED


def test_a_fault_is_not_fired_while_the_condition_does_not_hold(make_job, flights, database):
    class Never:
        observed = 0

        def observe(self) -> None:
            self.observed += 1

        def holds(self) -> bool:
            return False

    job, never = make_job(WRITER, database, url=database), Never()
    job.start()
    with pytest.raises(Missed), caught(job, flights, 2.0, never):
        pass
    assert never.observed
    assert job.driver.status() != psutil.STATUS_STOPPED


def batch(folder: Path, number: int, *, committed: bool, end: int = 0) -> None:
    for log in ("offsets", "commits"):
        (folder / log).mkdir(parents=True, exist_ok=True)
    positions = json.dumps({"flights": {"0": end, "1": 2 * end}})
    (folder / "offsets" / str(number)).write_text(f"v1\n{{}}\n{positions}")
    if committed:
        (folder / "commits" / str(number)).write_text("v1\n{}")


def test_the_checkpoint_says_what_is_committed(tmp_path):
    assert watch.committed(tmp_path) == {}
    batch(tmp_path, 9, committed=True, end=5)
    batch(tmp_path, 10, committed=True, end=7)
    batch(tmp_path, 11, committed=False, end=9)
    (tmp_path / "commits" / ".11.tmp").write_text("")
    assert watch.committed(tmp_path) == {0: 7, 1: 14}


def test_rows_before_the_checkpoint_are_this_batchs_rows_only(tmp_path, flights, database):
    seen = watch.RowsBeforeCheckpoint(tmp_path, "flights", flights)
    seen.observe()
    assert not seen.holds()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("INSERT INTO flights VALUES (1), (2)")
        batch(tmp_path, 0, committed=True)
        batch(tmp_path, 1, committed=False)
        seen.observe()
        assert not seen.holds(), "the rows are of the batch before"
        connection.execute("INSERT INTO flights VALUES (3)")
        seen.observe()
        assert seen.holds()
        assert seen.seen == "1 rows of batch 1 visible, commits/1 not written"
        batch(tmp_path, 1, committed=True)
        assert not seen.holds(), "the checkpoint knows the batch"


def test_looking_at_a_missing_table_or_server_gives_nothing(flights, database):
    assert watch.ledger("flights", "flights")(flights) is None
    away = Database("postgresql://nobody@127.0.0.1:1/none")
    assert away.query("SELECT 1") is None
    assert flights.query("SELECT 1") == [(1,)]
