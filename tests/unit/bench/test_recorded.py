"""A benchmark's match: wrong results end it, and ratios that fell below the recorded are told."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from bench.match import Contender, Contest, Match, Stage, against
from bench.measure import Sample, Series, told
from bench.recorded import Change, changes, compare, record

STAGE = Stage(None, None, Console(file=io.StringIO(), width=200), None)  # type: ignore[arg-type]


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


@dataclass(frozen=True)
class Counting(Contest):
    removed: list[str] = field(default_factory=list)

    @contextmanager
    def fresh(self, name: str) -> Iterator[list[int]]:
        yield []
        self.removed.append(name)

    def wrong(self, place: list[int], result: int, sample: Sample) -> str | None:
        sample.figures["files"] = 7
        sample.seconds = float(result)
        return None if place == [self.records] else f"{place}, not {self.records}"


def test_each_round_has_a_fresh_place_and_the_first_warms_up() -> None:
    one, moved = Counting(STAGE, "t", 1_000, 10), list[str]()

    def run(place: list[int], *, name: str, seconds: int) -> int:
        place.append(1_000)
        moved.append(name)
        return seconds

    ways = [
        Contender("us", one, lambda place: run(place, name="us", seconds=1)),
        Contender("peer + fetch", one, lambda place: run(place, name="peer", seconds=2), False),
    ]
    match = Match("title", ways, against({("us", "peer + fetch"): 3.0}), (), ("files",))
    series = match.play(2)
    assert moved == ["us", "us", "peer", "us", "peer"]
    assert len(set(one.removed)) == len(moved)
    assert series["us"].rates == [1_000.0, 1_000.0]
    assert match.told(series, more=1).items() >= {
        "us": 1_000, "peer + fetch": 500, "records": 1_000, "records_per_batch": 10, "more": 1,
        "ratios": {"us / peer + fetch": 2.0},
    }.items()  # fmt: skip
    shown = one.stage.console.file.getvalue()  # type: ignore[attr-defined]
    assert "us / peer + fetch" in shown
    assert "goal 3.00   missed" in shown
    assert match.play(1, warm_up=False)["us"].figure("files") == 7


@pytest.mark.parametrize("moved", [[], [999], [1_000, 1_000]])
def test_a_wrong_result_ends_the_bench(moved: list[int]) -> None:
    one = Counting(STAGE, "t", 1_000, 10)
    match = Match("title", [Contender("us", one, lambda place: place.extend(moved) or 1)], [], ())
    with pytest.raises(SystemExit, match="1"):
        match.play(1)
    shown = one.stage.console.file.getvalue()  # type: ignore[attr-defined]
    assert f"us: a wrong result scores nothing: {moved}, not 1000" in shown.replace("\n", "")
