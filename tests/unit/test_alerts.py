"""The alert rules by Prometheus' own tool, if there is a promtool on the PATH.

go mod init x && go get github.com/prometheus/prometheus/cmd/promtool@v0.307.3
go build github.com/prometheus/prometheus/cmd/promtool
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import repository
from tests.unit.test_operations import exposed

RULES = repository() / "ops" / "alerts.yml"
PARTITION = '{pipeline="p",topic="t",partition="0"}'
COMMITTED_ONCE, BEHIND, OLD = "0x40", "5x40", "0+60x40"
"""Series by minutes: a constant, or a beginning and the growth of each minute."""


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on the PATH: the rules are parsed by test_operations alone")
    return found


def done(*command: str | Path, given: str | None = None) -> str:
    ended = subprocess.run([str(one) for one in command], input=given, capture_output=True,
                           text=True, check=False)  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def case(minute: int, firing: set[str], **series: str) -> dict[str, Any]:
    """Values of metrics, and the alerts that fire at a minute; no others do."""
    names = ("OncelyDown", "OncelyStalled", "OncelyBehind", "OncelyFailing", "OncelyRecordsLost",
             "OncelyRejects", "OncelyFenced")  # fmt: skip
    labels = {name: PARTITION for name in ("oncely_lag_records", "oncely_lag_seconds")}
    return {
        "interval": "1m",
        "input_series": [
            {"series": name + labels.get(name, '{pipeline="p"}'), "values": values}
            for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if name in firing else [],
            }
            for name in names
        ],
    }


CASES = [
    case(4, set(), oncely_running="0x40"),
    case(6, {"OncelyDown"}, oncely_running="0x40"),
    case(
        9,
        {"OncelyStalled"},
        oncely_last_commit_timestamp_seconds=COMMITTED_ONCE,
        oncely_lag_records=BEHIND,
        oncely_lag_seconds=OLD,
    ),
    case(  # an idle topic
        30,
        set(),
        oncely_last_commit_timestamp_seconds=COMMITTED_ONCE,
        oncely_lag_records="0x40",
        oncely_lag_seconds="0x40",
    ),
    case(  # a backlog that is worked off
        31,
        {"OncelyBehind"},
        oncely_last_commit_timestamp_seconds=OLD,
        oncely_lag_records=BEHIND,
        oncely_lag_seconds="1000x40",
    ),
    case(15, {"OncelyFailing"}, oncely_failures_total="0+1x40"),
    case(15, {"OncelyRecordsLost", "OncelyFenced"}, oncely_gap_records_total="0x10 7x30",
         oncely_fenced_total="0x10 1x30"),
    case(11, {"OncelyRejects"}, oncely_rejects_pending="3x40"),
]  # fmt: skip


def test_the_rules_are_accepted_and_fire(promtool: str, tmp_path: Path) -> None:
    assert "8 rules found" in done(promtool, "check", "rules", RULES)
    tests = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": CASES}
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    done(promtool, "test", "rules", tmp_path / "tests.yml")


def test_the_metrics_have_no_fault(promtool: str) -> None:
    for text in exposed():
        assert done(promtool, "check", "metrics", given=text) == ""
