"""What the killed processes of the repair scenario do."""

from __future__ import annotations

from typing import Any

from oncely.audit.report import Finding
from oncely.config import parse
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.pipeline import Pipeline
from oncely.pipeline import repair as repairs
from oncely.testing.faults import KillAt
from oncely.testing.processes import kill_self
from tests.scenarios.delta_jobs import Steps as DeltaSteps
from tests.scenarios.files_jobs import Steps
from tests.scenarios.kafka_jobs import Calls


def repair(settings: dict[str, Any], found: list[Any], kill: dict[str, Any]) -> Any:
    """Repair, dying where ``kill`` says; the calls that it took when it says nowhere."""
    plan = KillAt(**{"call": -1, "armed_by": "BEGIN", **kill})
    pipeline = Pipeline(parse(settings)).replaced(connect=plan)
    findings = [Finding(TopicPartition(*tp), offset, kind) for tp, offset, kind in found]
    pipeline.repair(findings, execute=True)
    return plan.counter.seen


def backfill(
    settings: dict[str, Any], tp: list[Any], end: int, size: int, kill: dict[str, Any]
) -> Any:
    """Backfill the offsets up to an end, some in each transaction, dying where ``kill`` says."""
    repairs.BACKFILL_A_TRANSACTION = size
    plan = KillAt(**{"call": -1, "armed_by": "BEGIN", **kill})
    pipeline = Pipeline(parse(settings)).replaced(connect=plan)
    pipeline.backfill({TopicPartition(*tp): OffsetRange(0, end)}, execute=True)
    return plan.counter.seen


def repair_topic(settings: dict[str, Any], found: list[Any], at: int, when: str) -> list[str]:
    """Repair an output topic, dying before or after a commit; returns the calls to producers."""
    calls = Calls(at, when, kill_self, "commit_transaction")
    pipeline = Pipeline(parse(settings)).replaced(kafka_connect=calls.connect)
    findings = [Finding(TopicPartition(*tp), offset, kind) for tp, offset, kind in found]
    pipeline.repair(findings, execute=True)
    return calls.names


def repair_files(settings: dict[str, Any], found: list[Any], at: int, call: str, when: str) -> None:
    """Repair; at the ``at``-th call of that name the process dies."""
    steps = Steps(at, when, kill_self, call)
    pipeline = Pipeline(parse(settings)).replaced(
        kafka_connect=steps.connect, files_connect=steps.files
    )
    findings = [Finding(*one, within=within, file=file) for *one, within, file in found]
    pipeline.repair(findings, execute=True)


def repair_delta(settings: dict[str, Any], found: list[Any], at: int, call: str, when: str) -> None:
    """Repair a Delta table; at the ``at``-th call of that name the process dies."""
    steps = DeltaSteps(at, when, kill_self, call)
    pipeline = Pipeline(parse(settings)).replaced(
        files_connect=steps.place, delta_connect=steps.table
    )
    pipeline.repair([Finding(*one) for one in found], execute=True)
