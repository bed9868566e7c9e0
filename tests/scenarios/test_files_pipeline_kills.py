"""Topic to files: whatever is killed while files are written or named, each record is named once.

Everything is hurt while a process stands still: a worker behind a file that it has written, or
the driver when its transaction holds all names and nobody has decided on it.
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
from tests.scenarios import files_held
from tests.scenarios.files_held import Word, running_held
from tests.scenarios.files_world import FilesWorld, assert_exactly_once
from tests.scenarios.held import held
from tests.scenarios.world import await_that, jvm_of, kill_tree

MANY = 2_000


@pytest.mark.timeout(900)
def test_everything_is_hurt_while_files_are_written_and_named(tmp_path: Path, spark: Any) -> None:
    with Broker(tmp_path / "kafka") as broker:
        topic = broker.create_topic("events", 4)
        world = FilesWorld(broker.bootstrap, "", topic, tmp_path, root=tmp_path / "lake")
        # The broker itself shall end no transaction, however slow the machine is.
        world.overrides["sink"] = {"max_rejects": "100%", "transaction_timeout": "10 minutes"}
        file = world.file()
        first = itertools.count(0, MANY)

        def hurt(pid: int, word: Word, how: Callable[[psutil.Process], object]) -> None:
            files_held.ask(file, word)  # before there is work, or all could be done by then
            world.publish(MANY, pad=50, first=next(first), bad_every=997)
            how(held(pid))

        def restart(driver: psutil.Process) -> None:
            await_that(lambda: world.held_back(world.manifest), "names that nobody decides on")
            broker.kill()
            broker.start()
            driver.send_signal(signal.SIGCONT)

        with running_held(file) as driver:
            hurt(driver.pid, "write", lambda worker: worker.kill())
            hurt(driver.pid, "commit", restart)
            hurt(driver.pid, "write", lambda worker: jvm_of(driver.pid).kill())
            kill_tree(driver.pid, signal.SIGCONT)
            assert driver.wait(180) == 1
        for word in ("write", "commit"):
            with running_held(file) as driver:
                hurt(driver.pid, word, lambda _: kill_tree(driver.pid))
        await_that(lambda: world.held_back(world.manifest), "names that nobody decides on")
        pipeline = Pipeline(parse(world.settings()))
        pipeline.run("latest", spark=spark)
        assert assert_exactly_once(world) == 5 * MANY - 11
        assert world.stored() - set(world.entries())  # orphans


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_drivers_and_a_zombie(make_files_world: Callable[..., FilesWorld], spark: Any) -> None:
    """The newer run fences the older one, also when that is paused inside its transaction."""
    world = make_files_world()
    file = world.file()
    files_held.ask(file, "commit")
    with running_held(file) as old:
        world.publish(MANY)
        held(old.pid)
        Pipeline(parse(world.settings())).run("latest", spark=spark)
        assert assert_exactly_once(world) == MANY
        world.publish(MANY, first=MANY)
        kill_tree(old.pid, signal.SIGCONT)
        assert old.wait(180) == 3
        Pipeline(parse(world.settings())).run("latest", spark=spark)
    assert assert_exactly_once(world) == 2 * MANY
    await_that(lambda: not world.held_back(world.manifest), "the end of all transactions")
