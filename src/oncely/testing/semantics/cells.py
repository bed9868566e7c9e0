"""The trials, each a sink, a semantics and a kill point: their outcomes, and the report of them.

The report is JSON, and one HTML file without external resources or scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from oncely.config.pipeline import Delivery
from oncely.html import document
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


# -- the report ------------------------------------------------------------------------------

TITLES: Mapping[str, str] = {
    "none": "No guarantee",
    "at_most_once": "At most once",
    "at_least_once": "At least once",
    "exactly_once": "Exactly once",
}
_ORDERS: Mapping[str, str] = {
    "none": "position on a timer",
    "at_most_once": "position, then records",
    "at_least_once": "records, then position",
    "exactly_once": "in one transaction",
}
_STYLE = """
.map { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 4px; width: 100%; min-width: 44rem;
  font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; padding: .5rem .75rem .5rem 0; vertical-align: bottom; }
tbody th { vertical-align: middle; }
thead th { font-weight: 600; padding-left: .75rem; width: 19%; }
thead th:first-child { padding-left: 0; width: 24%; }
th small { display: block; font-weight: 400; color: var(--soft); font-size: .8125rem; }
td { border-radius: 6px; padding: .55rem .75rem; height: 3.6rem; line-height: 1.3; }
td b { font-weight: 600; } td span { display: block; }
.zero { background: rgba(var(--fine), .10); color: rgb(var(--fine)); }
.lost { background: rgba(var(--lost), var(--much)); }
.twice { background: rgba(var(--twice), var(--much)); }
.no { color: var(--soft); border: 1px dashed var(--rule); font-size: .875rem; }
.problems { border-left: 3px solid rgb(var(--lost)); padding-left: 1rem; }
"""


def page(outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """The HTML page: a heat map for each sink, rows kill points, columns semantics."""
    sinks = list(dict.fromkeys(one.cell.sink for one in outcomes))
    parts = [
        f"<h1>{_headline(problems)}</h1>",
        f"<p>{_lead(outcomes)}</p>",
        *_problems(problems),
        *(f"<h2>{TRIALS[sink].title}</h2>{_note(sink)}{_map(sink, outcomes)}" for sink in sinks),
        _KEY,
        f"<h2>How it was done</h2><p>{_how()}</p>",
    ]
    return document("Delivery semantics under crashes", _STYLE, "".join(parts))


_KEY = (
    '<ul class="key"><li><i style="background:rgba(var(--lost),.6)"></i>records lost</li>'
    '<li><i style="background:rgba(var(--twice),.6)"></i>records written twice</li>'
    '<li><i style="background:rgba(var(--fine),.25)"></i>neither</li></ul>'
)


def _headline(problems: Sequence[str]) -> str:
    if problems:
        return "The semantics do not show as promised"
    return "Four promises, and what a crash makes of each"


def _lead(outcomes: Sequence[Outcome]) -> str:
    records = max((one.records for one in outcomes), default=0)
    exact = [one for one in outcomes if one.cell.delivery == "exactly_once"]
    clean = sum(1 for one in exact if not one.lost and not one.duplicated)
    return (
        f"<strong>{len(outcomes)} pipelines</strong> of {records:,} records each were killed at one"
        " step of a commit, started again, and counted. Exactly once came through"
        f" <strong>{clean} of {len(exact)}</strong> kills without a lost or a doubled record."
    )


def _problems(problems: Sequence[str]) -> list[str]:
    if not problems:
        return []
    lines = "".join(f"<p>{escape(one)}</p>" for one in problems)
    return [f'<div class="problems">{lines}</div>']


def _note(sink: str) -> str:
    note = TRIALS[sink].note
    return f"<p>{note}</p>" if note else ""


def _map(sink: str, outcomes: Sequence[Outcome]) -> str:
    found = {one.cell: one for one in outcomes if one.cell.sink == sink}
    most = max((one.lost + one.duplicated for one in found.values()), default=0)
    head = "".join(f"<th>{TITLES[d]}<small>{_ORDERS[d]}</small></th>" for d in DELIVERIES)
    rows = []
    for point in POINTS_OF[sink]:
        row = [Cell(sink, delivery, point) for delivery in DELIVERIES]
        if any(one in found for one in row):
            shown = "".join(_cell(one, found.get(one), most) for one in row)
            rows.append(f"<tr><th>{escape(point)}</th>{shown}</tr>")
    return (
        f'<div class="map"><table><thead><tr><th>Killed</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(cell: Cell, one: Outcome | None, most: int) -> str:
    if one is None:
        one_commit = cell.delivery == "exactly_once"
        none = "one commit holds both" if one_commit else "each step commits itself"
        why = none if cell not in cells(cell.sink) else "not tried"
        return f'<td class="no">{why}</td>'
    if not one.lost and not one.duplicated:
        return '<td class="zero"><b>0</b> lost<span><b>0</b> twice</span></td>'
    kind = "lost" if one.lost else "twice"
    much = 0.25 + 0.5 * (one.lost + one.duplicated) / most
    return (
        f'<td class="{kind}" style="--much:{much:.2f}"><b>{one.lost:,}</b> lost'
        f"<span><b>{one.duplicated:,}</b> twice</span></td>"
    )


def _how() -> str:
    return (
        "Each trial is a pipeline of its own on Spark, with a real Kafka broker and a real"
        " PostgreSQL. In its third batch (without a guarantee also at the hand-out of the"
        " second), the process that reaches the kill point ends driver, JVM and worker by SIGKILL."
        " A new run resumes where the stored position says. Then plain clients, which share no"
        " code with the pipeline, count every id in the table, in the topic with"
        " isolation.level=read_committed, or in the files that the manifest topic names to such a"
        " reader: a file that is named and missing, or has another checksum, counts as lost."
    )


def write(outcomes: Sequence[Outcome], folder: Path) -> tuple[Path, Path]:
    """Write both files, and return their paths.

    ``report.json`` is a list of ``{"sink", "delivery", "kill_point", "records", "lost",
    "duplicated"}``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_html = folder / "report.json", folder / "report.html"
    as_json.write_text(json.dumps([one.as_json() for one in outcomes], indent=2) + "\n")
    as_html.write_text(page(outcomes, problems(outcomes)))
    return as_json, as_html
