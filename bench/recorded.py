"""Ratios of this run compared with those that the repository holds (``bench/recorded.json``).

A ratio of two contenders in one run carries over from machine to machine better than a rate. Its
noise is what its rounds show: it fell when all of its rounds are below all recorded ones.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

RECORDED = Path(__file__).with_name("recorded.json")

Rounds = Mapping[str, Sequence[float]]
"""The ratio of each round, by label."""


@dataclass(frozen=True)
class Change:
    """A ratio that left the range of the recorded rounds.

    Attributes:
        label: of the ratio, behind the name of its benchmark.
        was, found: the medians.
    """

    label: str
    was: float
    found: float

    @property
    def fell(self) -> bool:
        """Whether it is worse than recorded."""
        return self.found < self.was


def changes(recorded: Rounds, found: Rounds) -> list[Change]:
    """Ratios in both whose rounds do not overlap; the others are within the noise."""
    return [
        Change(label, statistics.median(recorded[label]), statistics.median(rounds))
        for label, rounds in found.items()
        if label in recorded
        and (max(rounds) < min(recorded[label]) or min(rounds) > max(recorded[label]))
    ]


def rounds_of(results: Iterable[Path]) -> dict[str, list[float]]:
    """The ratios in the result files of benchmarks.

    Labels begin with the file's name and the number of records: a shorter run has other ratios.
    """
    told = {path.stem: json.loads(path.read_text()) for path in results}
    return {
        f"{name}, {one['records']:,} records: {label}": rounds
        for name, one in told.items()
        for label, rounds in one.get("ratio_rounds", {}).items()
    }


def compare(results: Iterable[Path], console: Console, *, path: Path = RECORDED) -> int:
    """Print the ratios that changed by more than their noise; 1 when one fell, else 0."""
    recorded: Rounds = json.loads(path.read_text()) if path.exists() else {}
    found = rounds_of(results)
    changed = changes(recorded, found)
    for one in changed:
        verdict = "[red]fell" if one.fell else "[green]rose"
        console.print(f"{one.label:80} {one.was:5.2f} recorded, {one.found:5.2f} now   {verdict}")
    new = [label for label in found if label not in recorded]
    console.print(
        f"{len(found)} ratios, {len(changed)} changed by more than the noise of their rounds,"
        f" {len(new)} not recorded (--record keeps them)"
    )
    return 1 if any(one.fell for one in changed) else 0


def record(results: Iterable[Path], console: Console, *, path: Path = RECORDED) -> None:
    """Keep the ratios of this run; those of other benchmarks stay."""
    kept: dict[str, Sequence[float]] = json.loads(path.read_text()) if path.exists() else {}
    found = rounds_of(results)
    path.write_text(json.dumps({**kept, **found}, indent=2, sort_keys=True) + "\n")
    console.print(f"{len(found)} ratios recorded in {path.name}")
