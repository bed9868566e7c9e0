"""A Spark session that exists, as in a notebook: it is used or refused, and never stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oncely import ConfigError, Pipeline, parse
from oncely.runtimes.spark import session
from tests.conftest import repository
from tests.scenarios.world import World, assert_exactly_once

BEGIN = """
import sys
from pyspark.sql import SparkSession
from oncely import ConfigError, Pipeline, write_stream

builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
if sys.argv[2]:
    builder = builder.config("spark.jars", sys.argv[2])
spark = builder.getOrCreate()
pipeline = Pipeline.from_file(sys.argv[1])

def lives():
    return spark.range(3).count() == 3

def refused(key, function, *arguments, **more):
    try:
        function(*arguments, **more)
    except ConfigError as error:
        assert error.key == key, error
        assert lives()
        return error.way_out
    raise AssertionError("it was not refused")
"""

WITHOUT_KAFKA = (
    BEGIN
    + """
assert pipeline.run("latest"), "it needs no connector"
assert lives()
"""
)

WITH_KAFKA = (
    BEGIN
    + """
key = "spark.sql.streaming.minBatchesToRetain"
spark.conf.set(key, "1")
rate = spark.readStream.format("rate").load()
refused(key, write_stream, rate, name="r", url="sqlite:////nowhere", table="r", checkpoint="/no")
key = "spark.stage.maxConsecutiveAttempts"
settings = spark._jsparkSession.sessionState().conf()
settings.setConfString(key, "2")
refused(key, pipeline.run, "latest")
refused(key, pipeline.run, "latest", spark=spark)
settings.setConfString(key, "1")
assert pipeline.run("latest")
assert lives()
"""
)


def run(program: str, world: World, folder: Path, jars: str) -> None:
    file = folder / "notebook.py"
    file.write_text(program)
    done = subprocess.run(
        [sys.executable, str(file), str(world.file()), jars],
        cwd=repository(),
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},  # as in a notebook of this venv
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
def test_a_session_without_the_connector_is_used_and_lives(make_world: Any, tmp_path: Path) -> None:
    world: World = make_world(2)
    world.publish(100, partitions=2)
    run(WITHOUT_KAFKA, world, tmp_path, "")
    assert_exactly_once(world)


def test_the_session_of_a_notebook_is_used_and_lives(
    make_world: Any, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_ours", session._Ours())  # as if somebody else had made it
    world: World = make_world(2)
    world.publish(100, partitions=2)
    key = "spark.stage.maxConsecutiveAttempts"
    settings = spark._jsparkSession.sessionState().conf()
    settings.setConfString(key, "2")
    try:
        with pytest.raises(ConfigError, match=f"^{key}"):
            Pipeline(parse(world.settings())).run("latest")
    finally:
        settings.setConfString(key, "1")
    assert Pipeline(parse(world.settings())).run("latest")
    assert spark.range(3).count() == 3
    assert_exactly_once(world)


@pytest.mark.long
def test_a_session_with_the_connector_is_used_and_lives(
    make_world: Any, tmp_path: Path, spark_jars: str
) -> None:
    world: World = make_world(2)
    world.publish(100, partitions=2)
    run(WITH_KAFKA, world, tmp_path, spark_jars)
    assert_exactly_once(world)
