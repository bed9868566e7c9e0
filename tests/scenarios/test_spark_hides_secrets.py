"""Neither Spark's configuration, nor its environment page, nor a query's plan holds a secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from oncely.testing.servers.kafka import Broker
from tests.scenarios.world import World

PROGRAM = """
import sys
from oncely.pipeline import Pipeline
pipeline = Pipeline.from_file(sys.argv[1])
spark = pipeline.start_spark()
print(spark.sparkContext.getConf().toDebugString())
print(spark._jvm.java.lang.System.getProperties().toString())
plans = []
def look(event):
    for query in spark.streams.active:
        execution = query._jsq.streamingQuery().lastExecution()
        if execution is not None:
            plans.append(execution.toString())
pipeline.run("latest", spark=spark, listener=look)
print("PLANS", len(plans), *plans)
"""


def test_spark_configuration_and_plans(
    broker: Broker, database: str, make_topic: object, tmp_path: Path
) -> None:
    topic = make_topic(partitions=1)  # type: ignore[operator]
    world = World(broker.bootstrap, database, topic, tmp_path)
    world.publish(100, partitions=1)
    password = database.split(":")[2].split("@", maxsplit=1)[0]
    program = tmp_path / "look.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(world.file())],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "PLANS 0" not in done.stdout
    assert password not in done.stdout + done.stderr
