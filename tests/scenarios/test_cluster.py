"""On a real standalone cluster the result is the same, also when an executor is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from oncely.local.spark_cluster import SparkCluster
from tests.scenarios.world import World, assert_exactly_once, await_that, running


@pytest.mark.timeout(300)
def test_an_executor_is_killed_in_the_middle_of_a_commit(make_world: Any) -> None:
    world: World = make_world(4)
    world.publish(24_000, pad=300)
    with SparkCluster(workers=2) as cluster:
        file = world.file(
            spark={
                "master": cluster.master_url,
                "max_records_per_batch": 3_000,
                "conf": {"spark.executor.memory": "512m", "spark.cores.max": "2"},
            }
        )
        with running(file, "--until", "latest") as driver:
            await_that(
                lambda: (
                    world.count() > 0
                    and world.sql(
                        "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'oncely/%'"
                        " AND xact_start IS NOT NULL"
                    )
                ),
                "a commit",
                120,
            )
            executors = cluster.executors()
            assert len(executors) == 2
            os.kill(executors[0], signal.SIGKILL)
            assert driver.wait(180) == 0, file.with_suffix(".log").read_text()[-3000:]
    assert_exactly_once(world)
