"""Members of a group as tasks of a Spark job: killed ones are started again, nothing is doubled."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from oncely.clients.kafka.group_consumer import members_of
from oncely.config import parse
from oncely.errors import Fenced
from oncely.pipeline import Pipeline
from oncely.runtimes.stop import StopSignal
from oncely.testing.moments import closed_gate, waiting
from oncely.testing.processes import await_that, child, owner_of, tree
from oncely.testing.servers.spark_cluster import SparkCluster
from tests.scenarios.commands import oncely
from tests.scenarios.test_worker_group import LETS_GO, holders
from tests.scenarios.world import World, assert_exactly_once, assert_steps


@pytest.fixture
def world(make_world: Any) -> World:
    world: World = make_world(4)
    world.make_table()
    return world


@contextmanager
def two_members(world: World, spark: Any) -> Iterator[tuple[Future[bool], StopSignal]]:
    """Two members on the tests' own Spark."""
    pipeline, stop = Pipeline(parse(world.settings(worker=LETS_GO))), StopSignal()

    def work() -> bool:
        return pipeline.work(on="spark", workers=2, spark=spark, stop=stop, events=world.events)

    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(work)
        try:
            yield job, stop
        finally:
            stop.ask()


def members(world: World, count: int) -> set[str]:
    """The members that hold the positions; none while they are of another number."""
    if not world.sql("SELECT to_regclass('oncely_positions')")[0][0]:
        return set()
    found = {run for (run,) in world.sql("SELECT run FROM oncely_positions WHERE epoch > 0")}
    return found if len(found) == count else set()


def committed(world: World, count: int, job: Future[bool]) -> None:
    await_that(lambda: world.count() == count or job.done(), f"{count} rows")
    assert not job.done(), job.result()


def test_a_task_is_killed_inside_a_commit(world: World, spark: Any) -> None:
    jvm = spark.sparkContext._gateway.proc.pid
    with two_members(world, spark) as (job, stop):
        world.publish(400)
        committed(world, 400, job)
        before = await_that(lambda: members(world, 2), "two members with partitions")
        with closed_gate(world.url, "rows") as database:
            world.publish(400, first=400)
            (_, port), *_ = await_that(lambda: waiting(database), "a commit")
            killed = owner_of(port, tree(jvm))
            assert killed is not None
            killed.kill()
        committed(world, 800, job)
        await_that(lambda: members(world, 2) - before, "one in the place of the killed one")
        stop.ask()
        assert job.result(60) is False
        assert members_of(world.brokers, {}, f"oncely-{world.name}") == 0
    # The same ledger, with or without Spark.
    world.publish(100, first=800)
    oncely("work", world.file(), "--until", "latest", *world.logged)
    world.publish(100, first=900)
    pipeline = Pipeline(parse(world.settings()))
    assert pipeline.work("latest", on="spark", workers=2, spark=spark, events=world.events)
    assert world.count() == 1_000
    assert_exactly_once(world)
    assert_steps(world)


def test_a_reset_ends_all_members(world: World, spark: Any) -> None:
    with two_members(world, spark) as (job, _):
        world.publish(400)
        committed(world, 400, job)
        oncely("offsets", "reset", world.file(), "--to-latest", "--execute", *world.logged)
        with pytest.raises(Fenced):
            job.result(90)
    assert_steps(world)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_executor_is_killed(world: World) -> None:
    """Three members on a cluster of two executors; the driver is ended by a signal."""
    with SparkCluster(workers=2, cores=2) as cluster:
        spark = {"master": cluster.master_url, "conf": {"spark.executor.memory": "512m"}}
        file = world.file(worker=LETS_GO, spark=spark)
        command = ["oncely.cli", "work", str(file), "--on", "spark", "--workers", "3"]
        log = file.with_suffix(".log")
        with child([*command, *world.logged], log) as driver:
            world.publish(400)
            await_that(lambda: world.count() == 400 and holders(world) >= 3, "three members", 300)
            with closed_gate(world.url, "rows") as database:
                world.publish(400, first=400)
                (_, port), *_ = await_that(lambda: waiting(database), "a commit", 60)
                kill_executor_at(cluster, port)
            await_that(lambda: world.count() == 800, "rows of the others", 120)
            world.publish(400, first=800)
            await_that(lambda: world.count() == 1_200, "later rows", 120)
            driver.send_signal(signal.SIGTERM)
            assert driver.wait(120) == 0, log.read_text()[-3000:]
    assert_exactly_once(world)
    assert_steps(world)


def kill_executor_at(cluster: SparkCluster, port: int) -> None:
    """Kill the executor whose Python worker has the connection from a local port, and its tree."""
    for pid in cluster.executors():
        processes = tree(pid)
        if owner_of(port, processes):
            for one in processes:
                one.kill()
            psutil.wait_procs(processes, 30)
            return
    raise AssertionError("no executor has the connection")
