"""A member's memory is bounded by its settings, not by what it has read or by its partitions."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from oncely.testing.processes import Child, await_that
from tests.scenarios.test_worker_group import member
from tests.scenarios.world import World

ROUND = 20_000
WARM, ROUNDS = 4, 12
GROWTH = 16 << 20  # bytes; one round has 8 MB of records


def resident(one: Child) -> int:
    return int(psutil.Process(one.pid).memory_info().rss)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_memory_does_not_grow_with_the_number_of_records(make_world: Any) -> None:
    world: World = make_world(2)
    world.make_table()
    sizes = []
    with member(world) as one:
        for done in range(ROUNDS):
            world.publish(ROUND, first=done * ROUND, pad=300, partitions=2)
            total = (done + 1) * ROUND
            await_that(lambda total=total: world.count() == total or one.poll() is not None, "rows")
            assert one.poll() is None
            sizes.append(resident(one))
    early, late = max(sizes[WARM : ROUNDS - 3]), max(sizes[-3:])
    assert late - early < GROWTH, [size >> 20 for size in sizes]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_memory_does_not_grow_with_the_number_of_partitions(make_world: Any) -> None:
    """400 MB of records, which would fit into buffers of their own for each partition."""
    world: World = make_world(32)
    world.make_table()
    world.publish(4_000, pad=100_000, partitions=32)
    peak = 0

    def done(one: Child) -> bool:
        nonlocal peak
        peak = max(peak, resident(one))
        return world.count() == 4_000 or one.poll() is not None

    with member(world, worker={"buffer": "32 MiB"}) as one:
        await_that(lambda: done(one), "rows", 500)
        assert one.poll() is None
    assert peak < 400 << 20, peak >> 20
