"""The report's page: one HTML file, nothing loaded from elsewhere, readable without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from oncely.testing.semantics.cells import DELIVERIES, POINTS_OF, Cell, Outcome, SinkKind, cells

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
_SINKS: Mapping[SinkKind, str] = {
    "sql": "Into PostgreSQL",
    "kafka": "Into a Kafka topic",
    "files": "Into files",
}
_NOTES: Mapping[SinkKind, str] = {
    "files": "A task writes files; then the driver names them in the manifest topic, and only what"
    " is named has taken effect. So “after the records” is: after all files are named."
    " What a kill leaves unnamed is no part of the table, and nobody reads it.",
}

_STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --ink: #1d2126; --soft: #5d6670;
  --rule: #d9d6d0; --lost: 168, 50, 31; --twice: 201, 134, 22; --fine: 27, 110, 70; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e4e6e8; --soft: #9aa4ae;
  --rule: #343a41; --lost: 226, 104, 84; --twice: 226, 166, 62; --fine: 92, 184, 138; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .75rem;
  text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 2.75rem 0 .75rem; }
p { max-width: 44rem; margin: 0 0 1rem; text-wrap: pretty; color: var(--soft); }
p strong { color: var(--ink); font-weight: 600; }
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
.key { display: flex; gap: 1.5rem; flex-wrap: wrap; font-size: .875rem; color: var(--soft);
  margin: 1rem 0 0; padding: 0; list-style: none; }
.key i { display: inline-block; width: .9rem; height: .9rem; border-radius: 3px;
  vertical-align: -.1rem; margin-right: .4rem; }
footer { margin-top: 3rem; color: var(--soft); font-size: .875rem; }
"""


def page(outcomes: Sequence[Outcome], problems: Sequence[str]) -> str:
    """The HTML page: a heat map for each sink, rows kill points, columns semantics."""
    sinks = list(dict.fromkeys(one.cell.sink for one in outcomes))
    parts = [
        f"<h1>{_headline(problems)}</h1>",
        f"<p>{_lead(outcomes)}</p>",
        *_problems(problems),
        *(f"<h2>{_SINKS[sink]}</h2>{_note(sink)}{_map(sink, outcomes)}" for sink in sinks),
        _KEY,
        f"<h2>How it was done</h2><p>{_how()}</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Delivery semantics under crashes</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(parts)}\n</main>\n</body>\n</html>\n"
    )


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


def _note(sink: SinkKind) -> str:
    return f"<p>{_NOTES[sink]}</p>" if sink in _NOTES else ""


def _map(sink: SinkKind, outcomes: Sequence[Outcome]) -> str:
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
        why = "each step commits itself" if cell not in cells(cell.sink) else "not tried"
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
        " PostgreSQL. In its third micro-batch (without a guarantee also at the hand-out of the"
        " second), the process that reaches the kill point ends driver, JVM and worker by SIGKILL."
        " A new run resumes where the stored position says. Then plain clients, which share no"
        " code with the pipeline, count every id in the table, in the topic with"
        " isolation.level=read_committed, or in the files that the manifest topic names to such a"
        " reader: a file that is named and missing, or has another checksum, counts as lost."
    )
