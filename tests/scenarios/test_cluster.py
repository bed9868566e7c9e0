"""On a real standalone cluster the result is the same, also when an executor is killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from oncely.testing.faults import closed_gate, waiting
from oncely.testing.processes import await_that, owner_of, running
from oncely.testing.servers.spark_cluster import SparkCluster
from tests.scenarios.world import World, assert_exactly_once

pytestmark = pytest.mark.long

_CONF = {"spark.executor.memory": "512m", "spark.cores.max": "2"}
_TRANSFORM = """
import pyarrow as pa

def mark(batch):
    at = batch.schema.get_field_index("grp")
    return batch.set_column(at, "grp", pa.array(["marked"] * batch.num_rows))
"""
_SHUFFLE = """
from pyspark.sql import functions as F

def totals(frame):
    wide = F.concat(*(F.sha2(F.concat("id", F.lit(f"-{i}")), 256) for i in range(120)))
    return frame.groupBy("id").agg(F.first("grp").alias("grp"), F.first(wide).alias("pad"))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster(workers=2) as running:
        yield running


@pytest.mark.timeout(900)
def test_an_executor_is_killed_in_the_middle_of_a_commit(
    make_world: Any, cluster: SparkCluster
) -> None:
    """The transform's module lies beside the pipeline file; Spark brings it to the executors."""
    world: World = make_world(4)
    world.make_table()
    module = world.folder / "marking.py"
    module.write_text(_TRANSFORM)
    file = cluster_file(world, cluster, module, transform={"python": "marking:mark"})
    with running(file) as driver:
        with closed_gate(world.url, "rows") as database:
            world.publish(24_000, pad=300)
            await_that(lambda: waiting(database), "a commit", 300)
            assert len(cluster.executors()) == 2
            [(_, port)] = waiting(database)
            kill(executor_at(cluster, port))
            assert world.count() == 0, "what the executor held was not committed"
        finish(world, driver, file)
    assert_exactly_once(world)
    assert world.sql("SELECT DISTINCT grp FROM rows") == [("marked",)]


@pytest.mark.deep  # the test above, and the same with rows that one executor holds
@pytest.mark.timeout(900)
def test_executors_are_killed_while_the_driver_publishes_their_rows(
    make_world: Any, cluster: SparkCluster
) -> None:
    """They hold the rows, more than the driver reads ahead, so the batch is repeated."""
    world: World = make_world(4)
    world.sql("CREATE TABLE rows (id bigint NOT NULL, grp text, pad text)")
    module = world.folder / "totals.py"
    module.write_text(_SHUFFLE)
    file = cluster_file(
        world,
        cluster,
        module,
        transform={"spark": "totals:totals"},
        sink={"keep_source": False},
        batch=24_000,
    )
    with running(file) as driver:
        with closed_gate(world.url, "rows") as database:
            world.publish(24_000)
            await_that(lambda: waiting(database), "a commit", 300)
            [(_, port)] = waiting(database)
            assert owner_of(port, [psutil.Process(driver.pid)]), "the driver writes"
            for pid in cluster.executors():
                kill(psutil.Process(pid))
        finish(world, driver, file)
    assert "epoch 2, going on" in file.with_suffix(".log").read_text()
    found = world.sql("SELECT count(*), count(DISTINCT id), min(id), max(id) FROM rows")
    assert found == [(24_000, 24_000, 0, 23_999)]


def cluster_file(
    world: World, cluster: SparkCluster, module: Path, *, batch: int = 3_000, **sections: Any
) -> Path:
    return world.file(
        **sections,
        spark={
            "master": cluster.master_url,
            "max_records_per_batch": batch,
            "conf": {**_CONF, "spark.submit.pyFiles": str(module)},
        },
    )


def kill(executor: psutil.Process) -> None:
    for process in (executor, *executor.children(recursive=True)):
        process.kill()
    assert executor.wait(180) in (-signal.SIGKILL, None)


def finish(world: World, driver: Any, file: Path) -> None:
    """Wait for all rows, and stop the driver."""
    await_that(lambda: world.count() == 24_000, "all rows", 300)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(180) == 0, file.with_suffix(".log").read_text()[-3000:]


def executor_at(cluster: SparkCluster, port: int) -> psutil.Process:
    """The executor whose Python worker has the connection from a local port."""
    for pid in cluster.executors():
        executor = psutil.Process(pid)
        if owner_of(port, executor.children(recursive=True)):
            return executor
    raise AssertionError("no executor holds the commit")
