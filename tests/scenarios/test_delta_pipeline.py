"""Topic to Delta table: what a run leaves, and what the commands say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.scenarios.delta_world import DeltaWorld, assert_exactly_once
from tests.scenarios.world import run

Make = Callable[..., DeltaWorld]


@pytest.mark.both
@pytest.mark.parametrize("partition_by", [["user"]])
def test_each_record_is_a_row_or_a_dead_letter(
    make_delta_world: Make, runtime: Any, partition_by: list[str]
) -> None:
    world = make_delta_world()
    world.overrides["sink"] = {"partition_by": partition_by, "max_rejects": "100%"}
    world.publish(1_500, pad=10, bad_every=501)
    pipeline = run(world, runtime)
    assert assert_exactly_once(world) == 1_500 - 3
    world.publish(500, first=1_500)
    run(world, runtime)
    assert assert_exactly_once(world) == 1_997
    status = pipeline.status()
    assert (status.rejects, status.epoch) == (3, 2)
    assert [one.lag for one in status.partitions] == [0, 0, 0, 0]
    assert len(pipeline.rejects(10).listed) == 3
    assert pipeline.plan(use_spark=False).problems == ()
