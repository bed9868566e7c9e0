"""Whatever is killed or restarted while batches are committed: each record takes effect once.

One child runs the pipeline, and everything round it is hurt in turn: the driver with its JVM, the
JVM alone, a Python worker, the session that copies, PostgreSQL, the broker. Servers of its own.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from oncely.local.kafka import Broker
from oncely.local.postgres import Postgres
from tests.scenarios.world import (
    World,
    assert_exactly_once,
    await_that,
    jvm_of,
    kill_tree,
    run_to_end,
    running,
    running_slow,
    tree,
)

SESSIONS = (
    "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'oncely/%' AND xact_start"
    " IS NOT NULL"
)


def worker_of(pid: int) -> psutil.Process | None:
    """A Python worker: a child of PySpark's daemon."""
    daemons = {p.pid for p in tree(pid) if "pyspark.daemon" in command(p)}
    return next((p for p in tree(pid) if p.pid in daemons and p.ppid() in daemons), None)


def command(process: psutil.Process) -> str:
    """A process's command line; empty when it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.timeout(400)
def test_everything_is_hurt_in_turn(tmp_path: Path) -> None:
    with Broker(tmp_path / "kafka") as broker, Postgres(settings={"autovacuum": "off"}) as postgres:
        topic = broker.create_topic("hurt", 4)
        world = World(broker.bootstrap, postgres.create_database("hurt"), topic, tmp_path)
        first = itertools.count(0, 20_000)
        file = world.file(spark={"max_records_per_batch": 2_000})

        def hurt(what: str, how: Callable[[], object]) -> None:
            world.publish(20_000, pad=300, first=next(first))  # there is always work to be hurt in
            before = world.count()
            await_that(lambda: world.count() > before, f"a commit before {what}")
            how()

        with running(file) as driver:
            hurt(
                "a worker's death",
                lambda: await_that(lambda: worker_of(driver.pid), "a Python worker").kill(),
            )
            hurt(
                "a terminated session",
                lambda: world.sql(f"SELECT pg_terminate_backend(pid) FROM ({SESSIONS}) s"),
            )
            hurt("PostgreSQL's restart", lambda: postgres.restart("immediate"))
            hurt("the broker's death", lambda: (broker.kill(), broker.start()))
            hurt("the JVM's death", lambda: jvm_of(driver.pid).kill())
            assert driver.wait(60) == 1
        with running(file) as driver:
            hurt("the driver's death", lambda: kill_tree(driver.pid))
        with running(file) as driver:
            hurt("an ordinary stop", lambda: driver.send_signal(signal.SIGTERM))
            assert driver.wait(60) == 0
        run_to_end(file)
        assert_exactly_once(world)


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
        assert process.wait(60) == 0
    run_to_end(file)
    assert_exactly_once(world)
