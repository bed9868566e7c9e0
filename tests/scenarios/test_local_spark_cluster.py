"""The embedded Spark cluster runs jobs, survives losses, and leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import psutil
import pytest

from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.spark_cluster import SparkCluster

pytestmark = [pytest.mark.long, pytest.mark.embedded]

_JOB = textwrap.dedent(
    """
    import sys
    from pyspark.sql import SparkSession
    master, brokers, topic, jars = sys.argv[1:]
    spark = (
        SparkSession.builder.master(master)
        .config("spark.jars", jars)
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executor.memory", "512m")
        .getOrCreate()
    )

    def through(batches):
        yield from batches

    rows = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", brokers)
        .option("subscribe", topic)
        .load()
        .select("value")
        .mapInArrow(through, "value binary")
    )
    print("rows", rows.count(), flush=True)
    for line in sys.stdin:
        print("rows", rows.count(), flush=True)
    """
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster(workers=2, cores=1, memory="1g") as running:
        yield running


def _job(master: str, broker: Broker, topic: str, jars: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _JOB, master, broker.bootstrap, topic, jars],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )


def _again(job: subprocess.Popen[str]) -> str:
    assert job.stdin is not None
    assert job.stdout is not None
    job.stdin.write("again\n")
    job.stdin.flush()
    return job.stdout.readline()


def test_the_jars_read_a_topic_in_local_mode(
    broker: Broker, make_topic: Callable[..., str], spark_jars: str
) -> None:
    topic = make_topic(partitions=2, records=[(n % 2, None, b"x") for n in range(1000)])
    with _job("local[2]", broker, topic, spark_jars) as job:
        assert job.communicate()[0] == "rows 1000\n"


def test_a_job_survives_lost_executors_and_workers(
    cluster: SparkCluster, broker: Broker, make_topic: Callable[..., str], spark_jars: str
) -> None:
    topic = make_topic(partitions=2, records=[(n % 2, None, b"x") for n in range(1000)])
    with _job(cluster.master_url, broker, topic, spark_jars) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "rows 1000\n"
        await_that(lambda: len(cluster.executors()) == 2, "executors")
        assert cluster.python_workers()
        first = cluster.executors()[0]
        os.kill(first, signal.SIGKILL)
        await_that(
            lambda: first not in cluster.executors() and len(cluster.executors()) == 2, "executors"
        )
        assert _again(job) == "rows 1000\n"
        lost = [psutil.Process(pid) for pid in cluster.executors()]
        cluster.kill_worker(0)
        assert len(cluster.workers) == 1
        await_that(
            lambda: len(psutil.wait_procs(lost, timeout=0)[1]) < 2, "the end of its executor"
        )
        assert len(psutil.wait_procs(lost, timeout=0)[1]) == 1  # the other worker's
        assert _again(job) == "rows 1000\n"
        job.communicate()


def test_it_listens_on_the_loopback_only(cluster: SparkCluster) -> None:
    assert cluster._master is not None
    listening = [
        connection.laddr.ip
        for pid in (cluster._master.pid, *cluster.workers)
        for connection in psutil.Process(pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


_CHILD = """
import time
from oncely.testing.servers.spark_cluster import SparkCluster
cluster = SparkCluster(workers=1).start()
print(cluster._master.pid, *cluster.workers, flush=True)
time.sleep(1000)
"""


def test_no_part_outlives_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(processes) == 2
        parent.kill()
    _, left = psutil.wait_procs(processes, timeout=180)
    assert not left
