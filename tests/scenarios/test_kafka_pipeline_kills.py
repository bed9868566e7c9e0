"""Topic to topic: whatever is killed inside an open transaction, each record appears once.

Everything is hurt while a worker stands still between the last record and the commit of its
transaction, so that the broker holds records nobody has decided on. A reader of committed records
looks on all the time. The long test has a broker of its own, which is killed, too.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from oncely.testing.halting import ask_to_halt, halted, running_halting
from oncely.testing.processes import jvm_of, kill_tree
from oncely.testing.servers.kafka import Broker
from tests.scenarios.topic_world import TopicWorld, assert_exactly_once, watching

MANY = 4_000


class Hurting:
    """``hurt(pid, how)`` fires while a worker stands inside a transaction."""

    def __init__(self, world: TopicWorld, file: Path) -> None:
        self.world, self.file = world, file
        self.published = 0

    def __call__(self, pid: int, how: Callable[[psutil.Process], object]) -> None:
        ask_to_halt(self.file, "commit")  # before there is work, or all of it could be done by then
        self.world.publish(MANY, pad=100, first=self.published, bad_every=997)
        self.published += MANY
        how(self._inside(pid))

    def _inside(self, pid: int) -> psutil.Process:
        """A worker whose transaction is open: a run that has begun again may have ended it."""
        for _ in range(5):
            worker = halted(pid)
            if self.world.held_back(self.world.output):
                return worker
            ask_to_halt(self.file, "commit")
            worker.send_signal(signal.SIGCONT)
        raise AssertionError("no open transaction was caught")


def hurting(world: TopicWorld) -> Hurting:
    world.make_output()
    world.overrides = {"sink": {"max_rejects": "100%"}}
    # Small batches, or a killed worker's records would be all there are.
    return Hurting(world, world.file(spark={"max_records_per_batch": MANY // 2}))


@pytest.mark.both
def test_a_worker_and_a_driver_are_hurt_inside_a_transaction(
    make_topic_world: Any, runtime: Any
) -> None:
    hurt = hurting(world := make_topic_world(4))
    with watching(world) as watcher:
        with running_halting(hurt.file) as driver:
            hurt(driver.pid, lambda worker: worker.kill())
            hurt(driver.pid, lambda worker: kill_tree(driver.pid))
        world.run(runtime)
    assert assert_exactly_once(world, watcher) == 2 * MANY - 9


@pytest.mark.long
@pytest.mark.deep  # the test above, and the broker
@pytest.mark.timeout(400)
def test_everything_is_hurt_inside_a_transaction(tmp_path: Path, spark: Any) -> None:
    with Broker(tmp_path / "kafka") as broker:
        world = TopicWorld(broker.bootstrap, "", broker.create_topic("hurt", 4), tmp_path)
        hurt = hurting(world)

        def restart(worker: psutil.Process) -> None:
            broker.kill()
            broker.start()
            worker.send_signal(signal.SIGCONT)

        with watching(world) as watcher:
            with running_halting(hurt.file) as driver:
                hurt(driver.pid, lambda worker: worker.kill())
                hurt(driver.pid, restart)
                hurt(driver.pid, lambda worker: jvm_of(driver.pid).kill())
                kill_tree(driver.pid, signal.SIGCONT)
                assert driver.wait(180) == 1
            with running_halting(hurt.file) as driver:
                hurt(driver.pid, lambda worker: kill_tree(driver.pid))
            world.run(spark)
        assert assert_exactly_once(world, watcher) == 4 * MANY - 17
