"""The trials: sink, semantics and kill point; and their expected outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from oncely.config.pipeline import Delivery

SinkKind = Literal["sql", "kafka", "files", "delta"]
SINKS: tuple[SinkKind, ...] = ("sql", "kafka", "files", "delta")
DELIVERIES: tuple[Delivery, ...] = ("none", "at_most_once", "at_least_once", "exactly_once")

BEFORE, INSIDE, RECORDS, POSITION, COMMIT = (
    "before the first step",
    "half of the records sent",
    "after the records",
    "after the position",
    "after the commit",
)
WRITING, WRITTEN, STAGED, NAMING = (
    "before the first file",
    "after the first file",
    "after all files",
    "half the files named",
)
_STEPS = (BEFORE, INSIDE, RECORDS, POSITION, COMMIT)
POINTS_OF: Mapping[SinkKind, tuple[str, ...]] = {
    "sql": _STEPS,
    "kafka": _STEPS,
    "files": (WRITING, WRITTEN, STAGED, BEFORE, NAMING, RECORDS, POSITION, COMMIT),
    "delta": (WRITING, WRITTEN, STAGED, BEFORE, RECORDS, POSITION, COMMIT),
}
"""Kill points. Only exactly once has one commit; otherwise each step commits separately.

Files are staged first, in a task. The commit begins after that, in the driver: it *publishes* them
in the manifest topic, and only that makes their records take effect.
"""
POINTS = tuple(dict.fromkeys(point for points in POINTS_OF.values() for point in points))
"""The kill points of all sinks."""


@dataclass(frozen=True)
class Cell:
    """One trial: a pipeline that is killed at one point."""

    sink: SinkKind
    delivery: Delivery
    point: str

    @property
    def name(self) -> str:
        """The name of its pipeline, its table, its topic and its folder."""
        return f"{self.delivery}_{self.sink}_{POINTS_OF[self.sink].index(self.point)}"


@dataclass(frozen=True)
class Outcome:
    """The counts after the restart.

    Attributes:
        cell: the trial.
        records: number of records in the source topic.
        lost: number of records without an effect.
        duplicated: number of effects beyond the first of each record.
    """

    cell: Cell
    records: int
    lost: int
    duplicated: int

    def as_json(self) -> dict[str, object]:
        """A line of ``report.json``."""
        return {
            "sink": self.cell.sink,
            "delivery": self.cell.delivery,
            "kill_point": self.cell.point,
            "records": self.records,
            "lost": self.lost,
            "duplicated": self.duplicated,
        }


def cells(
    sink: SinkKind,
    points: Sequence[str] = POINTS,
    deliveries: Sequence[str] = DELIVERIES,
) -> list[Cell]:
    """Every trial of a sink, optionally restricted to some kill points or semantics."""
    return [
        Cell(sink, delivery, point)
        for delivery in DELIVERIES
        for point in POINTS_OF[sink]
        if _possible(sink, delivery, point) and point in points and delivery in deliveries
    ]


def _possible(sink: SinkKind, delivery: Delivery, point: str) -> bool:
    """True if the kill point exists; one commit of a Delta table has no middle."""
    if delivery != "exactly_once":
        return point != COMMIT
    return sink != "delta" or point not in (RECORDS, POSITION)


def problems(outcomes: Sequence[Outcome]) -> list[str]:
    """Differences between the counts and the semantics; also a kill point without any effect."""
    found = []
    for sink in sorted({one.cell.sink for one in outcomes}):
        for delivery in DELIVERIES:
            own = [o for o in outcomes if (o.cell.sink, o.cell.delivery) == (sink, delivery)]
            if own:
                found += [f"{sink}, {delivery}: {one}" for one in _judge(delivery, own)]
    return found


def _judge(delivery: Delivery, own: Iterable[Outcome]) -> list[str]:
    lost = {one.cell.point: one.lost for one in own if one.lost}
    twice = {one.cell.point: one.duplicated for one in own if one.duplicated}
    may_lose = delivery in ("none", "at_most_once")
    may_double = delivery in ("none", "at_least_once")
    found = []
    if lost and not may_lose:
        found.append(f"lost records {lost}")
    if twice and not may_double:
        found.append(f"doubled records {twice}")
    if may_lose and not lost:
        found.append("no kill point has lost a record: the trial can't see what it is for")
    if may_double and not twice:
        found.append("no kill point has doubled a record: the trial can't see what it is for")
    return found
