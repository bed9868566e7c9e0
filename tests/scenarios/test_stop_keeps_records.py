"""Stopping in the middle of a slow batch loses nothing.

When Spark cancels a task, the pipe to Python can close between two Arrow messages and looks
like a normal end. A sink that then commits the planned end loses the rest, with exit code 0.
The input is slow and a task has megabytes, or the pipe's buffer hides it.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.runtimes.stop import StopSignal
from oncely.testing.processes import await_that
from tests.scenarios.slow import ClaimsPlannedEnd, SlowPipeline
from tests.scenarios.world import World, assert_exactly_once, verdict

RECORDS, PAD = 12_000, 2_000


def stopped_in_the_middle(world: World, kind: type[SlowPipeline], spark: Any) -> None:
    """Start, wait until Spark reads, and stop the query at once."""
    stop = StopSignal()
    seen = threading.Event()
    pipeline = kind(parse(world.settings()), milliseconds=1)
    run = threading.Thread(
        target=lambda: pipeline.run(stop=stop, spark=spark, listener=lambda _: seen.set())
    )
    run.start()
    active = spark.sparkContext.statusTracker().getActiveStageIds
    await_that(lambda: len(active()) > 0, "a running stage")
    threading.Event().wait(1.2)  # Spark is in the middle of seconds of input: any moment will do
    stop.ask()
    stop.ask()
    run.join(60)
    assert not run.is_alive()


def test_query_stop_loses_nothing(make_world: Any, spark: Any) -> None:
    world: World = make_world(4)
    world.publish(RECORDS, pad=PAD)
    for _ in range(4):
        stopped_in_the_middle(world, SlowPipeline, spark)
    Pipeline(parse(world.settings())).run("latest", spark=spark)
    assert_exactly_once(world)


def test_this_scenario_sees_a_task_that_claims_the_planned_end(make_world: Any, spark: Any) -> None:
    """The control: the same stops lose records when a task claims more than it has read."""
    world: World = make_world(4)
    world.publish(RECORDS, pad=PAD)
    for _ in range(8):
        stopped_in_the_middle(world, ClaimsPlannedEnd, spark)
        if lost_below_positions(world):
            return
    pytest.fail("eight stops of a pipeline that claims the planned end lost nothing")


def lost_below_positions(world: World) -> int:
    """Records that the ledger takes for done, though they are nowhere."""
    positions = dict(world.sql('SELECT "partition", "position" FROM oncely_positions'))
    return sum(1 for p, o in verdict(world).lost if o < positions[p])
