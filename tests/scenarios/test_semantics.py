"""``oncely semantics``: pipelines killed at each step of a commit, restarted, counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oncely.semantics.cells import DELIVERIES, POINTS, cells

_LONGEST = 900


@pytest.mark.timeout(_LONGEST)
@pytest.mark.parametrize("sink", ["sql", "kafka"])
def test_what_a_crash_makes_of_each_promise(sink: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oncely.cli", "semantics", "--sink", sink]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        timeout=_LONGEST,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert found == json.loads(done.stdout)
    assert [(one["sink"], one["delivery"], one["kill_point"]) for one in found] == [
        (sink, cell.delivery, cell.point) for cell in cells(sink)
    ]
    for delivery in DELIVERIES:
        own = [one for one in found if one["delivery"] == delivery]
        lost, doubled = (sum(one[what] for one in own) for what in ("lost", "duplicated"))
        assert bool(lost) is (delivery in ("none", "at_most_once")), own
        assert bool(doubled) is (delivery in ("none", "at_least_once")), own
    page = (tmp_path / "report.html").read_text()
    assert all(point in page for point in POINTS)
    assert "as promised" not in page
