"""Whatever is killed or restarted while batches are committed: each record takes effect once.

A child runs the pipeline, and everything round it is hurt in turn: a Python worker, the session
that copies, the driver with its JVM. In the long test also PostgreSQL and the broker, its own
ones, and the JVM alone.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncely.testing.faults import Moment, inside_a_commit
from oncely.testing.processes import await_that, jvm_of, kill_tree, running
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from tests.scenarios.world import World, assert_exactly_once, assert_steps, run_to_end, running_slow

Hurt = Callable[..., None]


def hurting(world: World, records: int) -> Hurt:
    """``hurt(pid, how)`` fires into a transaction that is open for certain."""
    first = itertools.count(0, records)

    def work() -> None:
        world.publish(records, pad=300, first=next(first))

    def hurt(pid: int, how: Callable[[Moment], object]) -> None:
        with inside_a_commit(world.url, "rows", pid, work) as moment:
            how(moment)

    return hurt


@pytest.mark.both
def test_a_worker_a_session_and_a_driver_are_hurt_in_turn(
    make_world: Callable[..., World], runtime: Any
) -> None:
    world = make_world(4)
    world.make_table()
    hurt = hurting(world, 8_000)
    file = world.file(spark={"max_records_per_batch": 2_000})
    with running(file, *world.logged) as driver:
        hurt(driver.pid, lambda moment: moment.owner.kill())
        hurt(driver.pid, lambda moment: terminate(world, moment.session))
        hurt(driver.pid, lambda moment: kill_tree(driver.pid))
    world.run(runtime)
    assert_exactly_once(world)
    assert_steps(world)


@pytest.mark.long
@pytest.mark.deep  # the test above, and the servers in turn
@pytest.mark.timeout(900)
def test_everything_is_hurt_in_turn(tmp_path: Path) -> None:
    with Broker(tmp_path / "kafka") as broker, Postgres(settings={"autovacuum": "off"}) as postgres:
        topic = broker.create_topic("hurt", 4)
        world = World(broker.bootstrap, postgres.create_database("hurt"), topic, tmp_path)
        world.make_table()
        file = world.file(spark={"max_records_per_batch": 10_000})
        hurt = hurting(world, 40_000)
        with running(file, *world.logged) as driver:
            hurt(driver.pid, lambda moment: moment.owner.kill())
            hurt(driver.pid, lambda moment: terminate(world, moment.session))
            hurt(driver.pid, lambda moment: postgres.restart("immediate"))
            hurt(driver.pid, lambda moment: (broker.kill(), broker.start()))
            hurt(driver.pid, lambda moment: jvm_of(driver.pid).kill())
            assert driver.wait(180) == 1
        with running(file, *world.logged) as driver:
            hurt(driver.pid, lambda moment: kill_tree(driver.pid))
        with running(file, "--until", "latest", *world.logged) as driver:
            hurt(driver.pid, lambda moment: driver.send_signal(signal.SIGTERM))
            assert driver.wait(180) == 1, "not everything was committed"
        run_to_end(file, *world.logged)
        assert_exactly_once(world)
        assert_steps(world)


def terminate(world: World, session: int) -> None:
    """End a session from outside; its transaction was open."""
    assert world.sql("SELECT pg_terminate_backend(%s)", session) == [(True,)]


@pytest.mark.long  # `oncely run` itself: test_cli_run.py
def test_a_second_sigterm_ends_now(make_world: Callable[..., World], runtime: Any) -> None:
    """Two signals at once may arrive as one: the second is sent when the first has been seen."""
    world = make_world(2)
    world.publish(30_000, pad=500, partitions=2)
    file = world.file()
    with running_slow(file) as process:
        await_that(lambda: "BatchPlanned" in happened(file), "a batch that lasts half a minute")
        process.send_signal(signal.SIGTERM)
        await_that(lambda: "Draining" in happened(file), "the first signal's effect")
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0
    assert "BatchCommitted" not in happened(file)
    world.run(runtime)
    assert_exactly_once(world)


def happened(file: Path) -> list[str]:
    """The events of the slow pipeline."""
    return file.with_suffix(".log").read_text().splitlines()
