"""The runbook has a complete section for each alert, each verdict and the incidents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from oncely.cli.verbs import app
from oncely.pipeline.status import Kind
from tests.unit.test_documentation import anchors
from tests.unit.test_operations import ALERTS, TOP

PAGE = (TOP / "docs" / "runbook.md").read_text()
PARTS = {part.partition("\n")[0]: part for part in re.split(r"(?m)^## ", PAGE)}
SECTIONS = {
    title: text
    for name in ("Alerts", "Verdicts", "Incidents")
    for title, _, text in (one.partition("\n") for one in PARTS[name].split("\n### ")[1:])
}
FINE = ("Verdict: current", "Verdict: running")


@pytest.mark.parametrize("rule", ALERTS, ids=lambda one: one["alert"])
def test_an_alert_leads_to_its_section(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].rpartition("/")[2].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(TOP / "docs" / Path(page).with_suffix(".md"))
    assert rule["alert"] in SECTIONS


def test_each_alert_verdict_and_incident_has_a_section() -> None:
    verdicts = [f"Verdict: {kind}" for kind in get_args(Kind)]
    assert list(SECTIONS) == [
        *(rule["alert"] for rule in ALERTS),
        *verdicts,
        "Lag grows", "Dead letters grow", "Fenced", "The table is locked", "Offsets out of range",
        "The disk is full", "A topic was made again",
    ]  # fmt: skip
    assert PAGE.count("\n### ") == len(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_says_meaning_first_command_causes_and_way_out(title: str) -> None:
    said = re.findall(r"(?m)^- \*([\w ]+)\*: \S", SECTIONS[title])
    causes = [] if title in FINE else ["Likely causes"]
    assert said == ["Meaning", "First command", *causes, "Way out"]
    first = SECTIONS[title].partition("*First command*")[2].partition("\n- *")[0]
    assert re.search(r"`oncely |the log names", first)
    for command in re.findall(r"`oncely ([^`]+)`", SECTIONS[title]):
        ended = CliRunner().invoke(app, [*command.split(), "--help"])
        assert ended.exit_code == 0, command
