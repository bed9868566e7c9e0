"""Whatever is killed or restarted while a member commits: each record takes effect once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from tests.scenarios.commands import oncely
from tests.scenarios.test_kills_and_restarts import hurting, terminate
from tests.scenarios.test_worker_group import member
from tests.scenarios.world import World, assert_exactly_once, assert_steps


@pytest.mark.long  # a member that is killed is in every run: test_worker_group.py
def test_sessions_servers_and_the_member_are_hurt_in_turn(tmp_path: Path) -> None:
    with Broker(tmp_path / "kafka") as broker, Postgres(settings={"autovacuum": "off"}) as postgres:
        topic = broker.create_topic("hurt", 4)
        world = World(broker.bootstrap, postgres.create_database("hurt"), topic, tmp_path)
        world.make_table()
        hurt = hurting(world, 2_000)
        with member(world) as worker:
            hurt(worker.pid, lambda moment: terminate(world, moment.session))
            hurt(worker.pid, lambda moment: postgres.restart("immediate"))
            hurt(worker.pid, lambda moment: (broker.kill(), broker.start()))
            await_that(lambda: world.count() == 6_000, "all rows, by the same process")
            assert worker.poll() is None
            hurt(worker.pid, lambda moment: worker.kill())
        oncely("work", world.file(), "--until", "latest", *world.logged)
        assert_exactly_once(world)
        assert_steps(world)


@pytest.mark.long  # in every run: tests/unit/runtimes/worker/test_patience.py, test_sink_locks.py
def test_a_table_that_stays_locked_ends_the_member_after_its_patience(
    make_world: Callable[..., World],
) -> None:
    """The first line tells whose lock it is; a supervisor starts it again, and nothing is lost."""
    world = make_world()
    world.make_table()
    world.publish(100)
    oncely("work", world.file(), "--until", "latest", *world.logged)
    with psycopg.connect(world.url, application_name="nightly report") as other:
        other.execute("LOCK TABLE rows IN ACCESS EXCLUSIVE MODE")
        with member(world, worker={"patience": "5 seconds"}) as worker:
            world.publish(100, first=100)
            assert worker.wait(200) == 1
        said = next(world.folder.glob("*.log")).read_text()
        assert f"rows is held by process {other.info.backend_pid}, application nightly" in said
        assert said.count("it is tried again") == 1
        assert "nothing was committed for" in said
        assert "error ignored terminating" not in said
    oncely("work", world.file(), "--until", "latest", *world.logged)
    assert_exactly_once(world)
