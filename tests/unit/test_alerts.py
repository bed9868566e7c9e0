"""The alert rules by Prometheus' own tool, if there is a promtool on the PATH.

go mod init x && go get github.com/prometheus/prometheus/cmd/promtool@v0.307.3
go build github.com/prometheus/prometheus/cmd/promtool
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import repository
from tests.unit.test_operations import ALERTS, exposed

OPS = repository() / "ops"


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


def test_the_rules_are_accepted_and_fire(promtool: str) -> None:
    assert f"{len(ALERTS)} rules found" in done(promtool, "check", "rules", OPS / "alerts.yml")
    done(promtool, "test", "rules", OPS / "alerts.test.yml")


def test_a_rule_that_does_not_fire_is_noticed(promtool: str, tmp_path: Path) -> None:
    text = (OPS / "alerts.yml").read_text()
    (tmp_path / "alerts.test.yml").write_text((OPS / "alerts.test.yml").read_text())
    for rule in ALERTS:
        silent = text.replace(f"expr: {rule['expr']}\n", "expr: vector(0) > 1\n")
        (tmp_path / "alerts.yml").write_text(silent)
        with pytest.raises(AssertionError, match=f'alertname="{rule["alert"]}"'):
            done(promtool, "test", "rules", tmp_path / "alerts.test.yml")


def test_the_metrics_have_no_fault(promtool: str) -> None:
    for text in exposed():
        assert done(promtool, "check", "metrics", given=text) == ""
