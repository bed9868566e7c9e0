"""Two drivers of one pipeline: the newer run takes over, the older one ends with exit code 3.

Also when the older one was paused inside COPY and wakes up after the takeover, holding rows
that the newer run has committed meanwhile.
"""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest

from oncely.testing.processes import await_that, kill_tree, running, tree
from tests.scenarios.world import World, assert_exactly_once, running_slow

COPYING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'oncely/%' AND query LIKE '%COPY %' AND state = 'active'"
)


@pytest.mark.long  # a run that is fenced by a reset is in every run: test_cli_run.py
def test_a_second_driver_fences_the_first(make_world: Any, runtime: Any) -> None:
    world: World = make_world(4)
    world.publish(20_000, pad=100)
    old = world.file(spark={"max_records_per_batch": 1_000})
    with running(old) as first:
        await_that(lambda: world.count() > 0, "rows of the first driver")
        world.run(runtime)
        assert first.wait(180) == 3
    assert_exactly_once(world)
    assert "fenced" in old.with_suffix(".log").read_text()


@pytest.mark.long  # processes without Spark are in every run: test_commit_rivals.py
def test_a_zombie_that_was_paused_inside_copy(make_world: Any, runtime: Any) -> None:
    world: World = make_world(2)
    world.publish(20_000, pad=500, partitions=2)
    marker = world.folder / "paused"
    with running_slow(world.file(), "--pause-in-copy", str(marker)) as zombie:
        await_that(lambda: marker.exists() and stopped(zombie.pid), "a worker paused in COPY")
        kill_tree(zombie.pid, signal.SIGSTOP)
        assert world.sql(COPYING) >= [(1,)]
        world.run(runtime)
        assert world.sql(COPYING) == [(0,)]  # the takeover has ended the paused session
        kill_tree(zombie.pid, signal.SIGCONT)
        assert zombie.wait(180) == 3
    assert_exactly_once(world)


def stopped(pid: int) -> bool:
    """True when a process of the tree has stopped itself."""
    return any(one.status() == psutil.STATUS_STOPPED for one in tree(pid))
