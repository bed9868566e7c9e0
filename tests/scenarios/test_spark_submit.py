"""Below ``spark-submit`` a run uses the session of the command line, which needs no connector."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest

from tests.scenarios.world import World

SCRIPT = """
import sys
from oncely import Pipeline
from oncely.errors import OncelyError
try:
    print("result", bool(Pipeline.from_file(sys.argv[1]).run("latest")))
except OncelyError as error:
    sys.exit(f"{error.message}; {error.way_out}")
"""


@pytest.mark.long
def test_a_script_without_a_session_of_its_own(
    make_world: Callable[..., World], tmp_path: Path
) -> None:
    world = make_world(2)
    world.publish(100, partitions=2)
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    home = Path(pyspark.__file__).parent
    env = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [home / "bin" / "spark-submit", "--master", "local[2,4]", script, world.file()],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    said = done.stdout  # of the script's process; stderr is Spark's
    assert (done.returncode, "result True" in said) == (0, True), done.stderr
    assert world.count() == 100
