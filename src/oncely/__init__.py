"""Moves records from Kafka so that each takes effect exactly once, across crashes.

    from oncely import Pipeline, StopSignal, write_stream

    Pipeline.from_file("flights.toml").run(until="latest")

Names are imported at first use: Spark's Python workers import this package at every start and need
only a small part of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncely.config import PipelineSettings, load, parse
    from oncely.errors import (
        ConfigError,
        DataLost,
        Fenced,
        InvariantViolation,
        OncelyError,
        SourceMismatch,
        Stopped,
        TableMismatch,
        TooManyRejects,
        Unavailable,
        WrongInput,
    )
    from oncely.pipeline import Pipeline
    from oncely.pipeline.handling import Worker
    from oncely.pipeline.streaming import write_stream
    from oncely.runtimes.stop import StopSignal
    from oncely.sinks.handlers.batch import Batch

__all__ = [
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

_ELSEWHERE = {
    "Batch": "oncely.sinks.handlers.batch",
    "Pipeline": "oncely.pipeline",
    "PipelineSettings": "oncely.config",
    "StopSignal": "oncely.runtimes.stop",
    "Worker": "oncely.pipeline.handling",
    "load": "oncely.config",
    "parse": "oncely.config",
    "write_stream": "oncely.pipeline.streaming",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "oncely.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
