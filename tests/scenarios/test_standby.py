"""`oncely run --on-fenced=wait`: replicas stand by while one runs; the next one takes over."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.pipeline.standby import run_when_elected
from oncely.testing.processes import Child, await_that, child, kill_tree
from oncely.threads import StopSignal
from tests.scenarios.commands import oncely
from tests.scenarios.world import World, assert_exactly_once, assert_steps


class Replica:
    """A process, and what it has logged."""

    def __init__(self, world: World, stack: ExitStack, command: str = "run") -> None:
        file = world.file()
        self.log: Path = file.with_suffix(".log")
        words = [command, str(file), "--on-fenced=wait", *world.logged]
        self.process: Child = stack.enter_context(child(["oncely.cli", *words], self.log))

    def has_said(self, text: str, times: int = 1) -> bool:
        said = self.log.read_text()
        assert self.process.poll() is None or self.process.returncode < 0, said
        return said.count(text) >= times

    def stands_by(self, times: int = 1) -> None:
        await_that(lambda: self.has_said("standing by", times), "it stands by")

    def runs(self, times: int = 1) -> None:
        await_that(lambda: self.has_said(": epoch ", times), "it has taken over")


def committed(world: World, first: int) -> None:
    """Ten more records arrive."""
    world.publish(10, first=first)
    await_that(lambda: world.count() == first + 10, "ten more records")


@pytest.mark.long  # the election alone is in every run: tests/contracts/test_election.py
def test_the_next_one_takes_over_from_a_killed_and_from_a_paused_run(
    make_world: Callable[..., World],
) -> None:
    world = make_world()
    with ExitStack() as stack:
        first = Replica(world, stack)
        first.runs()
        committed(world, 0)
        second = Replica(world, stack)
        second.stands_by()
        committed(world, 10)
        oncely("offsets", "reset", world.file(), "--to-latest", "--execute")
        second.runs()  # the first one is fenced by the reset, and comes last
        first.stands_by(2)

        kill_tree(second.process.pid, signal.SIGKILL)
        first.runs(2)
        committed(world, 20)
        third = Replica(world, stack)
        third.stands_by()
        kill_tree(first.process.pid, signal.SIGSTOP)
        world.publish(10, first=30)
        third.runs()
        await_that(lambda: world.count() == 40, "records that a paused run did not read")
        kill_tree(first.process.pid, signal.SIGCONT)
        first.stands_by(3)
        committed(world, 40)

        third.process.send_signal(signal.SIGTERM)
        assert third.process.wait(180) == 0
        first.runs(3)
        committed(world, 50)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(180) == 0
        assert Counter(first.log.read_text().split())["ERROR"] == 2  # fenced, and went on
    assert_exactly_once(world)
    assert_steps(world)


def test_a_worker_stands_by_while_a_replica_is_there(make_world: Callable[..., World]) -> None:
    """A reset takes all positions over, as the replica's run would."""
    world = make_world()
    world.make_table()
    stop, elected = StopSignal(), threading.Event()

    def run() -> bool:
        elected.set()
        while not stop.draining:
            stop.wait(1.0)
        return True

    pipeline = Pipeline(parse(world.settings()))
    replica = threading.Thread(target=run_when_elected, args=(pipeline, run, stop, lambda _: None))
    with ExitStack() as stack:
        worker = Replica(world, stack, "work")
        committed(world, 0)
        stack.callback(stop.ask)
        replica.start()
        assert elected.wait(180)
        stood = worker.log.read_text().count("standing by")  # at a new broker also at its start
        oncely("offsets", "reset", world.file(), "--to-latest", "--execute", *world.logged)
        worker.stands_by(stood + 1)
        world.publish(10, first=10)
        late = Replica(world, stack, "work")
        late.stands_by()
        assert world.count() == 10  # in the time in which another worker has started
        stop.ask()
        replica.join(180)
        assert not replica.is_alive()
        await_that(lambda: world.count() == 20, "records from before and after")
        for one in (worker, late):
            one.process.send_signal(signal.SIGTERM)
            assert one.process.wait(180) == 0
    assert_exactly_once(world)
    assert_steps(world)


@pytest.mark.long  # without Spark: the test before it
def test_workers_stand_by_while_there_is_a_run_on_spark(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.make_table()
    with ExitStack() as stack:
        worker = Replica(world, stack, "work")
        committed(world, 0)
        stood = worker.log.read_text().count("standing by")
        spark = Replica(world, stack)
        spark.runs()
        worker.stands_by(stood + 1)
        committed(world, 10)
        late = Replica(world, stack, "work")
        late.stands_by()
        committed(world, 20)

        kill_tree(spark.process.pid, signal.SIGKILL)
        committed(world, 30)
        oncely("offsets", "reset", world.file(), "--to-latest", "--execute", *world.logged)
        committed(world, 40)
        for one in (worker, late):
            one.process.send_signal(signal.SIGTERM)
            assert one.process.wait(180) == 0
    assert_exactly_once(world)
    assert_steps(world)
