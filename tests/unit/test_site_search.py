"""The search of the site shows operating pages before decisions, if mkdocs is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import repository

TOP = repository()


def test_operating_pages_come_before_decisions(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site is not built: make docs installs mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=TOP, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    entries = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    weights = {one["location"].partition("#")[0]: one.get("boost", 1) for one in entries}
    operating = {page: weights[page] for page in ("runbook.html", "metrics.html", "probes.html")}
    decisions = {weights[page] for page in weights if page.startswith("decisions/")}
    assert decisions
    assert set(operating.values()) == {2}
    assert 1_000 * max(decisions) < weights["index.html"] * 2, "a title counts 1,000 times a text"
    sections = {one["title"] for one in entries if one["location"].startswith("runbook.html#")}
    assert {"OncelyStalled", "Verdict: stalled", "Lag grows"} <= sections
