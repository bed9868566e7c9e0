"""The trials: sink, semantics and kill point; and their expected outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oncely.config.pipeline import Delivery
from oncely.kinds.kind import kinds
from oncely.kinds.trial import COMMIT, Trial

DELIVERIES: tuple[Delivery, ...] = ("none", "at_most_once", "at_least_once", "exactly_once")
TRIALS: Mapping[str, Trial] = {
    kind.name: kind.trial() for kind in kinds() if kind.trial is not None
}
"""By the kind of the sink."""
SINKS = tuple(TRIALS)
POINTS_OF: Mapping[str, tuple[str, ...]] = {sink: one.points for sink, one in TRIALS.items()}
POINTS = tuple(dict.fromkeys(point for points in POINTS_OF.values() for point in points))
"""The kill points of all sinks."""


@dataclass(frozen=True)
class Cell:
    """One trial: a pipeline that is killed at one point."""

    sink: str
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
    sink: str,
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


def _possible(sink: str, delivery: Delivery, point: str) -> bool:
    """True if the kill point exists."""
    if delivery != "exactly_once":
        return point != COMMIT
    return point not in TRIALS[sink].one_commit


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
