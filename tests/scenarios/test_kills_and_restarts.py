"""Whatever is killed or restarted while batches are committed: each record takes effect once.

One child runs the pipeline, and everything round it is hurt in turn: the driver with its JVM, the
JVM alone, a Python worker, the session that copies, PostgreSQL, the broker. Servers of its own.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from tests.scenarios.moment import Moment, inside_a_commit
from tests.scenarios.world import (
    World,
    assert_exactly_once,
    await_that,
    jvm_of,
    kill_tree,
    run_to_end,
    running,
    running_slow,
)


@pytest.mark.timeout(900)
def test_everything_is_hurt_in_turn(tmp_path: Path) -> None:
    with Broker(tmp_path / "kafka") as broker, Postgres(settings={"autovacuum": "off"}) as postgres:
        topic = broker.create_topic("hurt", 4)
        world = World(broker.bootstrap, postgres.create_database("hurt"), topic, tmp_path)
        world.make_table()
        first = itertools.count(0, 40_000)
        file = world.file(spark={"max_records_per_batch": 10_000})

        def work() -> None:
            world.publish(40_000, pad=300, first=next(first))

        def hurt(pid: int, how: Callable[[Moment], object]) -> None:
            """Fire into a transaction that is open for certain."""
            with inside_a_commit(world, pid, work) as moment:
                how(moment)

        with running(file) as driver:
            hurt(driver.pid, lambda moment: moment.owner.kill())
            hurt(driver.pid, lambda moment: terminate(world, moment.session))
            hurt(driver.pid, lambda moment: postgres.restart("immediate"))
            hurt(driver.pid, lambda moment: (broker.kill(), broker.start()))
            hurt(driver.pid, lambda moment: jvm_of(driver.pid).kill())
            assert driver.wait(180) == 1
        with running(file) as driver:
            hurt(driver.pid, lambda moment: kill_tree(driver.pid))
        with running(file, "--until", "latest") as driver:
            hurt(driver.pid, lambda moment: driver.send_signal(signal.SIGTERM))
            assert driver.wait(180) == 1, "not everything was committed"
        run_to_end(file)
        assert_exactly_once(world)


def terminate(world: World, session: int) -> None:
    """End a session from outside; its transaction was open."""
    assert world.sql("SELECT pg_terminate_backend(%s)", session) == [(True,)]


def test_a_second_sigterm_ends_now(make_world: Callable[..., World]) -> None:
    world = make_world(2)
    world.publish(30_000, pad=500, partitions=2)
    file = world.file()
    with running_slow(file) as process:
        await_that(
            lambda: world.sql(
                "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'oncely/%'"
            ),
            "a task",
        )
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0
    run_to_end(file)
    assert_exactly_once(world)
