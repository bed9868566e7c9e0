"""Ratios of a benchmark against the recorded ones: what fell by more than the noise is told."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.measure import Sample, Series, told
from bench.recorded import Change, changes, compare, record


@pytest.mark.parametrize(
    ("found", "change"),
    [
        ([1.0, 1.1, 1.2], Change("a", 2.0, 1.1)),  # below all recorded rounds
        ([1.0, 1.85, 1.2], None),  # one round is within the recorded ones
        ([2.0, 2.1, 1.9], None),
        ([2.3, 2.4, 2.5], Change("a", 2.0, 2.4)),
    ],
)
def test_a_ratio_changed_when_no_round_overlaps(found: list[float], change: Change | None) -> None:
    assert changes({"a": [1.8, 2.0, 2.2]}, {"a": found, "new": [1.0]}) == (
        [change] if change else []
    )


def result(folder: Path, rates: list[float], records: int = 1_000) -> Path:
    ours = Series(1_000, [Sample(1_000 / one, 1.0) for one in rates])
    theirs = Series(1_000, [Sample(1.0, 1.0) for _ in rates])
    path = folder / "sql.json"
    numbers = told({"us": ours, "peer": theirs}, [("us / peer", "us", "peer", 1)])
    path.write_text(json.dumps({**numbers, "records": records}))
    return path


def test_a_ratio_that_fell_is_named_and_fails(tmp_path: Path) -> None:
    kept, shown = tmp_path / "recorded.json", io.StringIO()
    console = Console(file=shown, width=200)
    record([result(tmp_path, [2_000.0, 2_200.0])], console, path=kept)
    assert json.loads(kept.read_text()) == {"sql, 1,000 records: us / peer": [2.0, 2.2]}
    assert compare([result(tmp_path, [1_900.0, 2_300.0])], console, path=kept) == 0
    assert "fell" not in shown.getvalue()
    assert compare([result(tmp_path, [1_900.0, 1_800.0])], console, path=kept) == 1
    assert "2.10 recorded,  1.85 now   fell" in shown.getvalue()
    assert compare([result(tmp_path, [3_000.0, 2_800.0])], console, path=kept) == 0
    assert "rose" in shown.getvalue()


def test_runs_of_other_sizes_are_not_compared(tmp_path: Path) -> None:
    kept, shown = tmp_path / "recorded.json", io.StringIO()
    console = Console(file=shown, width=200)
    record([result(tmp_path, [2_000.0])], console, path=kept)
    assert compare([result(tmp_path, [500.0], records=10)], console, path=kept) == 0
    assert "1 not recorded" in shown.getvalue()


def test_what_was_recorded_by_another_benchmark_stays(tmp_path: Path) -> None:
    kept, console = tmp_path / "recorded.json", Console(file=io.StringIO())
    kept.write_text('{"kafka: us / peer": [1.0]}')
    record([result(tmp_path, [2_000.0])], console, path=kept)
    assert sorted(json.loads(kept.read_text())) == [
        "kafka: us / peer",
        "sql, 1,000 records: us / peer",
    ]
