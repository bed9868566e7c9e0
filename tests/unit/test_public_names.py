"""The package's names are a promise, and importing it is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import oncely

NAMES = [
    "Batch",
    "ConfigError",
    "DataLost",
    "Fenced",
    "InvariantViolation",
    "OncelyError",
    "Pipeline",
    "PipelineSettings",
    "SourceMismatch",
    "StopSignal",
    "Stopped",
    "TableMismatch",
    "TooManyRejects",
    "Unavailable",
    "Worker",
    "WrongInput",
    "load",
    "parse",
    "write_stream",
]


def test_the_names() -> None:
    assert oncely.__all__ == NAMES
    assert dir(oncely) == NAMES
    for name in NAMES:
        assert getattr(oncely, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        oncely.nothing  # noqa: B018


def test_a_worker_that_imports_the_package_does_not_import_the_rest() -> None:
    heavy = "('pydantic', 'duckdb', 'pyspark')"
    code = f"import oncely, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
