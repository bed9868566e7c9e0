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
    from oncely.audit.report import Finding
    from oncely.audit.report import Report as AuditReport
    from oncely.config import PipelineSettings, load, parse
    from oncely.context import Record
    from oncely.core import events
    from oncely.core.events import Event, Listener
    from oncely.core.progress import RunResult
    from oncely.core.ranges import OffsetRange, TopicPartition
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
    from oncely.kafka.reset import Verb
    from oncely.kinds.handlers.batch import Batch
    from oncely.kinds.handlers.sink import Handler
    from oncely.pipeline import Pipeline
    from oncely.pipeline.handling import Worker
    from oncely.pipeline.offsets import PartitionOffsets, Reset
    from oncely.pipeline.planning import Plan
    from oncely.pipeline.rejects import Discarded, RejectFilter, Rejects
    from oncely.pipeline.repair import Repaired
    from oncely.pipeline.running import Http
    from oncely.pipeline.standby import OnFenced
    from oncely.pipeline.status import Judgement, Status
    from oncely.pipeline.streaming import write_stream
    from oncely.runtimes.dropping import Drops
    from oncely.threads import StopSignal
    from oncely.verify.report import Report as VerifyReport

    __version__: str

__all__ = [
    "AuditReport", "Batch", "ConfigError", "DataLost", "Discarded", "Drops", "Event", "Fenced",
    "Finding", "Handler", "Http", "InvariantViolation", "Judgement", "Listener", "OffsetRange",
    "OnFenced", "OncelyError", "PartitionOffsets", "Pipeline", "PipelineSettings", "Plan",
    "Record", "RejectFilter", "Rejects", "Repaired", "Reset", "RunResult", "SourceMismatch",
    "Status", "StopSignal", "Stopped", "TableMismatch", "TooManyRejects", "TopicPartition",
    "Unavailable", "Verb", "VerifyReport", "Worker", "WrongInput", "events", "load", "parse",
    "write_stream",
]  # fmt: skip

_NAMES = {
    "oncely.audit.report": "Finding",
    "oncely.config": "PipelineSettings load parse",
    "oncely.core.events": "Event Listener",
    "oncely.core.progress": "RunResult",
    "oncely.core.ranges": "OffsetRange TopicPartition",
    "oncely.pipeline": "Pipeline",
    "oncely.pipeline.handling": "Worker",
    "oncely.pipeline.offsets": "PartitionOffsets Reset",
    "oncely.pipeline.planning": "Plan",
    "oncely.pipeline.rejects": "Discarded RejectFilter Rejects",
    "oncely.pipeline.repair": "Repaired",
    "oncely.pipeline.running": "Http",
    "oncely.pipeline.standby": "OnFenced",
    "oncely.pipeline.status": "Judgement Status",
    "oncely.pipeline.streaming": "write_stream",
    "oncely.runtimes.dropping": "Drops",
    "oncely.threads": "StopSignal",
    "oncely.context": "Record",
    "oncely.kinds.handlers.batch": "Batch",
    "oncely.kinds.handlers.sink": "Handler",
    "oncely.kafka.reset": "Verb",
}
_ELSEWHERE = {name: (module, name) for module, names in _NAMES.items() for name in names.split()}
_ELSEWHERE["AuditReport"] = "oncely.audit.report", "Report"
_ELSEWHERE["VerifyReport"] = "oncely.verify.report", "Report"
_ELSEWHERE["events"] = "oncely.core", "events"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("oncely")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _ELSEWHERE.get(name, ("oncely.errors", name))
    value = getattr(importlib.import_module(module), own)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
