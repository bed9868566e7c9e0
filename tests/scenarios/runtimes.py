"""Where the runs of a test execute their tasks: in Spark, or in processes of this machine.

The fixture ``runtime`` chooses by pytest's option ``--runtime``. A test without that fixture runs
on Spark, as pipeline files without ``runtime`` do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROCESSES = {"runtime": "processes", "processes": 2}
_SETTINGS: dict[str, dict[str, Any]] = {"spark": {}, "processes": PROCESSES}
_chosen = ["spark"]


def settings() -> dict[str, Any]:
    """The keys of the pipeline file that choose the runtime of the current test."""
    return _SETTINGS[_chosen[-1]]


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """Choose a runtime until the end of the block."""
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()
