"""``oncely semantics``: pipelines killed at each step of a commit, restarted, counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from oncely.kinds.files.trial import NAMING
from oncely.testing.semantics.cells import DELIVERIES, POINTS, POINTS_OF, SINKS, cells
from tests.scenarios.commands import oncely

_LONGEST = 2400


def shown(
    folder: Path,
    sinks: Sequence[str],
    points: Sequence[str],
    deliveries: Sequence[str] = DELIVERIES,
    runtime: str = "processes",
) -> None:
    """Run the command and compare every number of its report with what was promised."""
    chosen = [word for point in points for word in ("--kill-point", point)]
    chosen += [word for sink in sinks for word in ("--sink", sink)]
    chosen += [word for delivery in deliveries for word in ("--delivery", delivery)]
    chosen += ["--runtime", runtime]
    done = oncely("semantics", "--out", folder, "--json", *chosen, timeout=_LONGEST, alone=True)
    found = json.loads((folder / "report.json").read_text())
    assert found == json.loads(done.stdout)
    assert [(one["sink"], one["delivery"], one["kill_point"]) for one in found] == [
        (sink, cell.delivery, cell.point)
        for sink in sinks
        for cell in cells(sink, points, deliveries)
    ]
    for sink in sinks:
        for delivery in deliveries:
            own = [one for one in found if (one["sink"], one["delivery"]) == (sink, delivery)]
            lost, doubled = (sum(one[what] for one in own) for what in ("lost", "duplicated"))
            assert bool(lost) is (delivery in ("none", "at_most_once")), own
            assert bool(doubled) is (delivery in ("none", "at_least_once")), own
    page = (folder / "report.html").read_text()
    assert all(point in page for point in {one["kill_point"] for one in found})
    assert "as promised" not in page


@pytest.mark.long
@pytest.mark.deep  # each delivery and sink, in every run: test_deliveries.py
@pytest.mark.timeout(_LONGEST)
@pytest.mark.parametrize("sinks", [("sql", "files"), ("kafka", "delta")], ids=" and ".join)
def test_at_every_step(tmp_path: Path, sinks: Sequence[str]) -> None:
    """Sinks run side by side; two of them load a machine with two cores."""
    shown(tmp_path, sinks, POINTS, ["at_least_once", "exactly_once"])


@pytest.mark.long
@pytest.mark.deep
@pytest.mark.timeout(_LONGEST)
def test_weaker_semantics_at_every_step(tmp_path: Path) -> None:
    shown(tmp_path, ["sql"], POINTS, ["none", "at_most_once"])


@pytest.mark.long
@pytest.mark.deep
@pytest.mark.timeout(_LONGEST)
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_on_spark(tmp_path: Path, delivery: str) -> None:
    """The same processes die: a driver, its JVM and a worker of Spark."""
    shown(tmp_path, ["sql"], POINTS_OF["sql"], [delivery], "spark")


def test_every_sink_is_killed() -> None:
    (pairs,) = [one.args[1] for one in test_at_every_step.pytestmark if one.name == "parametrize"]
    assert sorted(sink for pair in pairs for sink in pair) == sorted(SINKS)


def test_what_is_unknown_is_told(tmp_path: Path) -> None:
    told = oncely("semantics", "--kill-point", "never", "--out", tmp_path, expect=2).stderr
    assert "after the records" in told
    for option, one_of in [("--sink", "'files'"), ("--delivery", "'at_least_once'")]:
        assert one_of in oncely("semantics", option, "never", expect=2).stderr
    told = oncely("semantics", "--sink", "sql", "--kill-point", NAMING, expect=2).stderr
    assert "half of the records sent" in told
