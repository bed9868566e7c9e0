"""A Python process in which packages of extras are not installed.

python -c PROGRAM psycopg,pgpq …
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from oncely.extras import PACKAGES

OPTIONAL = {one.partition(".")[0] for packages in PACKAGES.values() for one in packages}
PIPELINE: dict[str, Any] = {
    "name": "p",
    "source": {"brokers": "127.0.0.1:9", "topics": "t", "start": "earliest"},
    "decode": {"format": "json", "schema": "id BIGINT"},
}
IN_THE_BASE: list[dict[str, Any]] = [
    {"kind": "sql", "url": "sqlite:////tmp/none.db", "table": "t"},
    {"kind": "kafka", "topic": "out"},
]

_WITHOUT = """
import json, sys
from importlib.machinery import PathFinder

gone, found = set(sys.argv[1].split(",")), PathFinder.find_spec

def find(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in gone else found(name, path, target)

PathFinder.find_spec = classmethod(find)
"""
_VALIDATE = """
import pyarrow as pa
from oncely import OncelyError, Pipeline, parse

answers = []
for given in json.loads(sys.argv[2]):
    try:
        pipeline = Pipeline(parse(given))
        pipeline.decoder, pipeline.destination, pipeline.sink(pa.schema([("id", pa.int64())]))
        answers.append(None)
    except OncelyError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""
_IMPORT = """
import importlib, pkgutil
import oncely

failed = []
for one in pkgutil.walk_packages(oncely.__path__, "oncely.", onerror=lambda _: None):
    if not one.name.endswith("__main__"):
        try:
            importlib.import_module(one.name)
        except ImportError:
            failed.append(one.name)
print(json.dumps(failed))
"""

_COMMANDS = """
import importlib.metadata
from typer.testing import CliRunner
from oncely.cli.verbs import app

distribution = importlib.metadata.distribution

def installed(name):
    if name.lower() in gone:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)

importlib.metadata.distribution = installed
answers = []
for words in json.loads(sys.argv[2]):
    done = CliRunner().invoke(app, words)
    answers.append(f"{type(done.exception).__name__}: {done.exception}")
print()
print(json.dumps(answers))
"""


def refusals(without: Collection[str], commands: Collection[list[str]]) -> list[str]:
    """The error of each command of `oncely` without these packages."""
    return _answer(_COMMANDS, without, commands, sys.executable)


def validated(
    without: Collection[str], pipelines: Collection[Any], python: str | Path = sys.executable
) -> list[str | None]:
    """The error of each pipeline without these packages; None if it is valid."""
    return _answer(_VALIDATE, without, pipelines, python)


def not_imported(without: Collection[str]) -> list[str]:
    """The modules of Oncely that can't be imported without these packages."""
    return _answer(_IMPORT, without, [], sys.executable)


def _answer(
    program: str, without: Collection[str], given: Collection[Any], python: str | Path
) -> Any:
    command = [str(python), "-c", _WITHOUT + program, ",".join(without), json.dumps(list(given))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
