"""A kind is its folder and the line of its entry point: without them the others work as before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

from tests.conftest import repository
from tests.extras import IN_THE_BASE, PIPELINE

ASKED = """
import importlib, json, pkgutil, sys
import oncely
from oncely.config import parse
from oncely.errors import ConfigError
from oncely.pipeline.guarantee import guarantee_of

for one in pkgutil.walk_packages(oncely.__path__, "oncely."):
    if not one.name.endswith("__main__"):
        importlib.import_module(one.name)
given = json.loads(sys.argv[1])
found = {"at": oncely.__file__, "means": guarantee_of(parse(given)).means}
try:
    parse({**given, "sink": {"kind": "delta", "url": "file:///tmp/none"}})
except ConfigError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture
def without_delta(tmp_path: Path) -> Path:
    """A copy of the package in which the kind ``delta`` is deleted."""
    source = repository() / "src" / "oncely"
    shutil.copytree(source, tmp_path / "oncely", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "oncely" / "kinds" / "delta")
    (metadata,) = (one.locate() for one in files("oncely") or () if one.name == "METADATA")
    shutil.copytree(Path(metadata).parent, tmp_path / Path(metadata).parent.name)
    entries = tmp_path / Path(metadata).parent.name / "entry_points.txt"
    left = [one for one in entries.read_text().splitlines() if not one.startswith("delta =")]
    entries.write_text("\n".join(left))
    return tmp_path


def printed(at: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(at)},
        cwd=at,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_without_the_folder_of_a_kind_the_others_work(without_delta: Path) -> None:
    given = {**PIPELINE, "sink": IN_THE_BASE[0]}
    found = json.loads(printed(without_delta, "-c", ASKED, json.dumps(given)))
    assert Path(found["at"]).is_relative_to(without_delta)
    assert "one transaction of the database" in found["means"]
    assert found["refused"] == "sink.kind: found 'delta'; allowed: sql, kafka, files, handlers"
    schema = printed(without_delta, "-m", "oncely.cli", "schema")
    assert "FilesSinkSettings" in schema
    assert "delta" not in schema.lower()
