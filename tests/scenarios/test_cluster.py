"""On a real standalone cluster the result is the same, also when an executor is killed."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest

from oncely.testing.moments import closed_gate, waiting
from oncely.testing.processes import await_that, owner_of, running
from oncely.testing.servers.spark_cluster import SparkCluster
from tests.scenarios.world import World, assert_exactly_once

pytestmark = pytest.mark.long

_TRANSFORM = """
import pyarrow as pa

def mark(batch):
    at = batch.schema.get_field_index("grp")
    return batch.set_column(at, "grp", pa.array(["marked"] * batch.num_rows))
"""


@pytest.mark.timeout(900)
def test_an_executor_is_killed_in_the_middle_of_a_commit(make_world: Any) -> None:
    """The transform's module lies beside the pipeline file; Spark brings it to the executors."""
    world: World = make_world(4)
    world.make_table()
    module = world.folder / "marking.py"
    module.write_text(_TRANSFORM)
    with SparkCluster(workers=2) as cluster:
        file = world.file(
            transform={"python": "marking:mark"},
            spark={
                "master": cluster.master_url,
                "max_records_per_batch": 3_000,
                "conf": {
                    "spark.executor.memory": "512m",
                    "spark.cores.max": "2",
                    "spark.submit.pyFiles": str(module),
                },
            },
        )
        with running(file) as driver:
            with closed_gate(world.url, "rows") as database:
                world.publish(24_000, pad=300)
                await_that(lambda: waiting(database), "a commit", 300)
                assert len(cluster.executors()) == 2
                [(_, port)] = waiting(database)
                killed = executor_at(cluster, port)
                for process in (killed, *killed.children(recursive=True)):
                    process.kill()
                assert killed.wait(30) in (-signal.SIGKILL, None)
                assert world.count() == 0, "what the executor held was not committed"
            await_that(lambda: world.count() == 24_000, "all rows", 300)
            driver.send_signal(signal.SIGTERM)
            assert driver.wait(180) == 0, file.with_suffix(".log").read_text()[-3000:]
    assert_exactly_once(world)
    assert world.sql("SELECT DISTINCT grp FROM rows") == [("marked",)]


def executor_at(cluster: SparkCluster, port: int) -> psutil.Process:
    """The executor whose Python worker has the connection from a local port."""
    for pid in cluster.executors():
        executor = psutil.Process(pid)
        if owner_of(port, executor.children(recursive=True)):
            return executor
    raise AssertionError("no executor holds the commit")
