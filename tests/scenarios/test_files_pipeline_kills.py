"""Topic to files: whatever is killed while files are written or named, each record is named once.

Everything is hurt while a process stands still: a worker behind a file that it has written, or
the driver when its transaction holds all names and nobody has decided on it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from oncely.testing.halting import Point, ask_to_halt, halted, running_halting
from oncely.testing.processes import await_that, jvm_of, kill_tree
from oncely.testing.servers.kafka import Broker
from tests.scenarios.files_world import FilesWorld, assert_exactly_once

MANY = 2_000
WORDS: tuple[Point, ...] = ("write", "commit")


class Hurting:
    """``hurt(pid, word, how)`` fires while a process stands still at the word."""

    def __init__(self, world: FilesWorld) -> None:
        # The broker itself shall end no transaction, however slow the machine is.
        world.overrides["sink"] = {"max_rejects": "100%", "transaction_timeout": "10 minutes"}
        self.world, self.file = world, world.file()
        self.published = 0

    def __call__(self, pid: int, word: Point, how: Callable[[psutil.Process], object]) -> None:
        ask_to_halt(self.file, word)  # before there is work, or all could be done by then
        self.world.publish(MANY, pad=50, first=self.published, bad_every=997)
        self.published += MANY
        how(halted(pid))

    def await_undecided(self) -> None:
        """Until the manifest holds names that nobody has decided on."""
        await_that(lambda: self.world.held_back(self.world.manifest), "names nobody decides on")


@pytest.mark.both
def test_a_worker_and_a_driver_are_hurt_while_files_are_written_and_named(
    make_files_world: Callable[..., FilesWorld], runtime: Any
) -> None:
    hurt = Hurting(world := make_files_world())
    with running_halting(hurt.file) as driver:
        hurt(driver.pid, "write", lambda worker: worker.kill())
        hurt(driver.pid, "commit", lambda _: kill_tree(driver.pid))
    hurt.await_undecided()
    world.run(runtime)
    assert assert_exactly_once(world) == 2 * MANY - 5
    assert world.stored() - set(world.entries())  # orphans


@pytest.mark.long
@pytest.mark.deep  # the test above, and the broker
@pytest.mark.timeout(900)
def test_everything_is_hurt_while_files_are_written_and_named(tmp_path: Path, spark: Any) -> None:
    with Broker(tmp_path / "kafka") as broker:
        topic = broker.create_topic("events", 4)
        world = FilesWorld(broker.bootstrap, "", topic, tmp_path, root=tmp_path / "lake")
        hurt = Hurting(world)

        def restart(driver: psutil.Process) -> None:
            hurt.await_undecided()
            broker.kill()
            broker.start()
            driver.send_signal(signal.SIGCONT)

        with running_halting(hurt.file) as driver:
            hurt(driver.pid, "write", lambda worker: worker.kill())
            hurt(driver.pid, "commit", restart)
            hurt(driver.pid, "write", lambda worker: jvm_of(driver.pid).kill())
            kill_tree(driver.pid, signal.SIGCONT)
            assert driver.wait(180) == 1
        for word in WORDS:
            with running_halting(hurt.file) as driver:
                hurt(driver.pid, word, lambda _: kill_tree(driver.pid))
        hurt.await_undecided()
        world.run(spark)
        assert assert_exactly_once(world) == 5 * MANY - 11
        assert world.stored() - set(world.entries())  # orphans


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_drivers_and_a_zombie(
    make_files_world: Callable[..., FilesWorld], runtime: Any
) -> None:
    """The newer run fences the older one, also when that is paused inside its transaction."""
    world = make_files_world()
    file = world.file()
    ask_to_halt(file, "commit")
    with running_halting(file) as old:
        world.publish(MANY)
        halted(old.pid)
        world.run(runtime)
        assert assert_exactly_once(world) == MANY
        world.publish(MANY, first=MANY)
        kill_tree(old.pid, signal.SIGCONT)
        assert old.wait(180) == 3
        world.run(runtime)
    assert assert_exactly_once(world) == 2 * MANY
    await_that(lambda: not world.held_back(world.manifest), "the end of all transactions")
