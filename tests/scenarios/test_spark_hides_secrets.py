"""Neither Spark's configuration, nor its environment page, nor the names of its jobs hold a
secret."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from oncely.pipeline import Pipeline
from tests.scenarios.world import World

Make = Callable[..., World]


def run_and_look(file: str, spark: Any) -> str:
    """What Spark shows of a run: its configuration, the JVM's properties, its jobs."""
    pipeline = Pipeline.from_file(file)
    pipeline.run("latest", spark=spark)
    context = spark.sparkContext._jsc.sc()
    described = context.statusStore().jobsList(None)
    told = [described.apply(at).description().toString() for at in range(described.size())]
    assert any(f"oncely {pipeline.settings.name}: batch 0: " in one for one in told)
    conf = spark.sparkContext.getConf().toDebugString()
    properties = spark._jvm.java.lang.System.getProperties().toString()
    return "\n".join([conf, properties, *told])


def test_jobs_and_settings(make_world: Make, spark: Any) -> None:
    world = make_world(1)
    world.publish(100, partitions=1)
    file = world.file()
    password = urlsplit(world.url).password
    assert password
    assert password not in run_and_look(str(file), spark)
    assert password not in str(Pipeline.from_file(file).settings.spark.spark_conf())


PROGRAM = """
import sys
from oncely.pipeline import Pipeline
from tests.scenarios.test_spark_hides_secrets import run_and_look
print(run_and_look(sys.argv[1], Pipeline.from_file(sys.argv[1]).start_spark()))
"""


@pytest.mark.long
def test_a_session_of_its_own(make_world: Make, tmp_path: Path) -> None:
    world = make_world(1)
    world.publish(100, partitions=1)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(world.file())],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    password = urlsplit(world.url).password
    assert password
    assert password not in done.stdout + done.stderr
