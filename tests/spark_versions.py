"""The main scenarios on other releases of Spark: ``python -m tests.spark_versions 3.5.9 4.3.0``.

Each release has a virtual environment of its own below ``build``, with the pinned versions of
``constraints.txt`` but that of PySpark. Their list covers what touches Spark: runs with kills of
drivers, tasks and executors, Spark transforms, ``write_stream`` and sessions of users.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_SCENARIOS = {
    "not long": (
        "test_spark_daemon",
        "test_spark_transform",
        "test_held_rows",
        "test_write_stream",
        "test_kills_and_restarts",
        "test_kafka_pipeline_kills",
        "test_foreign_session",
    ),
    "long": ("test_cluster",),
}
"""Files of scenarios, by pytest's expression for marks."""


def environment(release: str) -> Path:
    """The interpreter of an environment with this release, which is made at the first call."""
    home = _ROOT / "build" / f"spark-{release}"
    python, ready = home / "bin" / "python", home / ".ready"
    if not ready.exists():
        venv.create(home, clear=True, with_pip=True)
        pinned = (_ROOT / "constraints.txt").read_text()
        constraints = home / "constraints.txt"
        constraints.write_text(re.sub(r"(?m)^pyspark==.*$", f"pyspark=={release}", pinned))
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c"]
        command = [str(python), *install, str(constraints), "--editable", ".[dev]", "setuptools"]
        subprocess.run(command, cwd=_ROOT, check=True)
        ready.touch()
    return python


def passes(release: str) -> bool:
    """Run the scenarios on a release."""
    pytest = [str(environment(release)), "-m", "pytest", "-n", "2", "--dist", "loadfile"]
    codes = [
        subprocess.run(
            [
                *pytest,
                "--runtime",
                "spark",
                "-m",
                marks,
                *map("tests/scenarios/{}.py".format, names),
            ],
            cwd=_ROOT,
            check=False,
        ).returncode
        for marks, names in _SCENARIOS.items()
    ]
    return not any(codes)


def main(releases: list[str]) -> int:
    """Run them on every release; 1 if a scenario failed on one."""
    failed = []
    for release in releases:
        print(f"PySpark {release}", flush=True)
        if not passes(release):
            failed.append(release)
    print(f"failed on: {', '.join(failed)}" if failed else f"passed on: {', '.join(releases)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
