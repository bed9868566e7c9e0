"""Faults into a writer that copies for ever: what is reported is what was done and seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from demo.faults import Servers, fire
from demo.job import Job, JobPlan
from demo.moment import Database
from oncely.testing.servers.postgres import Postgres

WRITER = """
import sys, time, psycopg
with psycopg.connect(sys.argv[1], application_name="writer/1") as c:
    with c.cursor().copy("COPY flights FROM STDIN") as copy:
        while True:
            copy.write("1\\n")
            time.sleep(0.01)
"""


@pytest.fixture
def job(database: str, tmp_path: Path) -> Iterator[Job]:
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE flights (id bigint)")
    plan = JobPlan(
        name="writer",
        command=[sys.executable, "-c", WRITER, database],
        environment={},
        log=tmp_path / "writer.log",
        url=database,
        applications="writer/%",
        statement="COPY",
    )
    writer = Job(plan)
    writer.start()
    yield writer
    writer.close()


@pytest.fixture
def looking(database: str) -> Iterator[Database]:
    session = Database(database)
    yield session
    session.close()


@pytest.fixture
def servers(postgres: Postgres) -> Servers:
    return Servers(broker=None, postgres=postgres)  # none of these faults is for the broker


def test_a_terminated_session_is_the_one_that_was_copying(job, servers, looking):
    fault = fire("terminate_session", job, servers, looking)
    assert fault.open_transaction
    assert fault.seen["statement"] == "COPY"
    assert fault.seen["application"] == "writer/1"
    assert "terminating connection due to administrator command" in fault.postgres_said


def test_a_killed_driver_leaves_an_open_transaction_behind(job, servers, looking):
    driver = job.driver
    fault = fire("kill_driver", job, servers, looking)
    assert fault.open_transaction
    assert f"driver {driver.pid}" in fault.target
    assert fault.postgres_said, "the server has noticed that its client went away"
    while not job.restarts:
        job.tend()
    assert job.restarts[0].exit_code == -9
    assert looking.query("SELECT COUNT(*) FROM flights") == [(0,)]


def test_what_could_not_be_hit_is_not_claimed(job, servers, looking):
    fault = fire("kill_worker", job, servers, looking)
    assert not fault.open_transaction
    assert fault.target == "nothing: the job has no such process"
    assert job.driver.status() != psutil.STATUS_STOPPED
