"""Stopping in the middle of a slow batch loses nothing.

A task may be killed anywhere: what it has committed is in the ledger, and the rest is read again. A
task that took the end of what it has read for the end of its ranges would lose the rest, with exit
code 0.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from oncely.config import parse
from oncely.core import events
from oncely.pipeline import Pipeline
from oncely.testing.processes import await_that
from oncely.threads import StopSignal
from tests.scenarios.slow import EndsEarly, SlowPipeline
from tests.scenarios.world import World, assert_exactly_once, verdict

RECORDS, PAD = 12_000, 100


def stopped_in_the_middle(world: World, runtime: Any) -> None:
    """Start, wait until a task has committed, and cancel the job."""
    stop = StopSignal()
    planned = threading.Event()
    pipeline = SlowPipeline(parse(world.settings()), milliseconds=1)

    def heard(event: events.Event) -> None:
        if isinstance(event, events.BatchPlanned):
            planned.set()

    run = threading.Thread(target=lambda: pipeline.run(stop=stop, spark=runtime, listener=heard))
    before = world.count()
    run.start()
    assert planned.wait(180)
    await_that(lambda: world.count() > before, "a commit")
    stop.ask()
    stop.ask()
    run.join(180)
    assert not run.is_alive()


@pytest.mark.both
def test_a_job_that_is_cancelled_loses_nothing(make_world: Any, runtime: Any) -> None:
    world: World = make_world(4)
    world.publish(RECORDS, pad=PAD)
    for _ in range(3):
        stopped_in_the_middle(world, runtime)
    assert 0 < world.count() < RECORDS
    Pipeline(parse(world.settings())).run("latest", spark=runtime)
    assert_exactly_once(world)


def test_this_scenario_sees_a_read_that_ends_early(make_world: Any, runtime: Any) -> None:
    """The control: records are lost when the end of what was read passes for that of the ranges."""
    world: World = make_world(4)
    world.publish(60_000)
    EndsEarly(parse(world.settings())).run("latest", spark=runtime)
    assert lost_below_positions(world)


def lost_below_positions(world: World) -> int:
    """Records that the ledger takes for done, though they are nowhere."""
    positions = dict(world.sql('SELECT "partition", "position" FROM oncely_positions'))
    return sum(1 for p, o in verdict(world).lost if o < positions[p])
