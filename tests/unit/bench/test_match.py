"""The match of benchmarks: a wrong result ends it, and the first round is not counted."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from bench.match import Contender, Contest, Match, Stage, against
from bench.measure import Sample


@dataclass(frozen=True)
class Counting(Contest):
    """A place holds the number of records that its run has moved."""

    removed: list[str] = field(default_factory=list)

    @contextmanager
    def fresh(self, name: str) -> Iterator[list[int]]:
        yield []
        self.removed.append(name)

    def wrong(self, place: list[int], result: int, sample: Sample) -> str | None:
        sample.figures["files"] = 7
        sample.seconds = float(result)
        return None if place == [self.records] else f"{place}, not {self.records}"


def contest() -> Counting:
    console = Console(file=io.StringIO(), width=200)
    stage = Stage(None, None, console, None)  # type: ignore[arg-type]
    return Counting(stage, "t", 1_000, 10)


def test_each_round_has_a_fresh_place_and_the_first_warms_up() -> None:
    one, moved = contest(), list[str]()

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
    one = contest()
    match = Match("title", [Contender("us", one, lambda place: place.extend(moved) or 1)], [], ())
    with pytest.raises(SystemExit, match="1"):
        match.play(1)
    shown = one.stage.console.file.getvalue()  # type: ignore[attr-defined]
    assert f"us: a wrong result scores nothing: {moved}, not 1000" in shown.replace("\n", "")
