"""Topic to topic: whatever is killed inside an open transaction, each record appears once.

Everything is hurt while a worker stands still between the last record and the commit of its
transaction, so that the broker holds records nobody has decided on. A reader of committed records
looks on all the time. The broker is one of its own.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.testing.servers.kafka import Broker
from tests.scenarios.held import held, hold_file, running_held
from tests.scenarios.topic_world import TopicWorld, assert_exactly_once, watching
from tests.scenarios.world import jvm_of, kill_tree

MANY = 4_000


@pytest.mark.timeout(400)
def test_everything_is_hurt_inside_a_transaction(tmp_path: Path, spark: Any) -> None:
    with Broker(tmp_path / "kafka") as broker:
        world = TopicWorld(broker.bootstrap, "", broker.create_topic("hurt", 4), tmp_path)
        world.make_output()
        # Small batches, or a killed worker's records would be all there are.
        file = world.file(spark={"max_records_per_batch": MANY // 2}, sink={"max_rejects": "100%"})
        first = itertools.count(0, MANY)

        def inside(pid: int) -> psutil.Process:
            """A worker whose transaction is open: a run that has begun again may have ended it."""
            for _ in range(5):
                worker = held(pid)
                if world.held_back(world.output):
                    return worker
                hold_file(file).touch()
                worker.send_signal(signal.SIGCONT)
            raise AssertionError("no open transaction was caught")

        def hurt(pid: int, how: Callable[[psutil.Process], object]) -> None:
            hold_file(file).touch()  # before there is work, or all of it could be done by then
            world.publish(MANY, pad=100, first=next(first), bad_every=997)
            how(inside(pid))

        def restart(worker: psutil.Process) -> None:
            broker.kill()
            broker.start()
            worker.send_signal(signal.SIGCONT)

        with watching(world) as watcher:
            with running_held(file) as driver:
                hurt(driver.pid, lambda worker: worker.kill())
                hurt(driver.pid, restart)
                hurt(driver.pid, lambda worker: jvm_of(driver.pid).kill())
                kill_tree(driver.pid, signal.SIGCONT)
                assert driver.wait(60) == 1
            with running_held(file) as driver:
                hurt(driver.pid, lambda worker: kill_tree(driver.pid))
            Pipeline(parse(world.settings(sink={"max_rejects": "100%"}))).run("latest", spark=spark)
        assert assert_exactly_once(world, watcher) == 4 * MANY - 17
