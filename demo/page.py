"""The report's page: one HTML file, nothing loaded from elsewhere, readable without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from demo import audit_page, lake_page
from demo.picture import picture

_TITLES = {"oncely": "Oncely", "control": "foreachBatch + JDBC append"}
_COUNTS = (
    ("records", "Records in the topic"),
    ("rows", "Rows in the table"),
    ("rejects", "Rejects kept with their bytes"),
    ("lost", "Lost"),
    ("duplicated", "Duplicated"),
    ("changed", "Rows unlike their record"),
    ("unexpected", "Rows of broken or aborted records"),
)

_STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --ink: #1d2126; --soft: #5d6670; --rule: #d9d6d0;
  --grid: #eceae6; --panel: #ffffff; --offsets: #1f5c99; --ahead: #b0491f; --good: #1b6e46;
  --bad: #a8321f; --mark: #3c434b; --mark-ink: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e4e6e8; --soft: #9aa4ae;
  --rule: #343a41; --grid: #262b31; --panel: #1a1e22; --offsets: #78b2ea; --ahead: #eb9a6c;
  --good: #6cc79a; --bad: #f08a76; --mark: #c3cad1; --mark-ink: #14171a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .75rem;
  text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 2.75rem 0 .75rem; letter-spacing: -.005em; }
p { max-width: 44rem; margin: 0 0 1rem; text-wrap: pretty; }
.lead { font-size: 1.1rem; color: var(--soft); }
.lead strong { color: var(--ink); font-weight: 600; }
figure { margin: 2rem 0 0; }
.plot { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
  padding: 1rem .75rem .5rem; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 40rem; height: auto; font-family: inherit;
  font-size: 12px; font-variant-numeric: tabular-nums; }
figcaption { margin-top: .75rem; color: var(--soft); font-size: .875rem; max-width: 44rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: .875rem; padding-bottom: .5rem; }
th, td { text-align: left; padding: .5rem .75rem .5rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
thead th { font-weight: 600; font-size: .875rem; color: var(--soft); }
tbody th { font-weight: 500; }
.n { text-align: right; padding-right: 1.5rem; white-space: nowrap; }
.n:last-child { padding-right: 0; } thead .n { white-space: normal; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.soft { color: var(--soft); } small { font-size: .8125rem; color: var(--soft); display: block; }
.badge { display: inline-block; min-width: 1.5rem; height: 1.5rem; border-radius: .75rem;
  background: var(--mark); color: var(--mark-ink); font-size: .8125rem; font-weight: 600;
  line-height: 1.5rem; text-align: center; }
.problems { border-left: 3px solid var(--bad); padding-left: 1rem; }
footer { margin-top: 3rem; color: var(--soft); font-size: .875rem; }
.axis { fill: var(--soft); } .name { fill: var(--ink); font-size: 15px; font-weight: 600; }
.grid { stroke: var(--grid); } .base { stroke: var(--rule); }
.offsets, .ahead { fill: none; stroke-width: 2; stroke-linejoin: round; }
.offsets { stroke: var(--offsets); } .ahead { stroke: var(--ahead); stroke-width: 1.5; }
.area { fill: var(--ahead); fill-opacity: .18; }
.offsets-ink { fill: var(--offsets); font-weight: 600; }
.ahead-ink { fill: var(--ahead); font-weight: 600; }
.offsets-ink, .ahead-ink { paint-order: stroke; stroke: var(--panel); stroke-width: 5px; }
.fault { fill: none; stroke: var(--mark); stroke-opacity: .4; } .dot { fill: var(--mark); }
.dot-ink { fill: var(--mark-ink); font-weight: 600; font-size: 11px; }
.good-ink, .bad-ink { font-weight: 600; font-size: 13px; }
.good-ink { fill: var(--good); } .bad-ink { fill: var(--bad); }
"""


def page(found: Mapping[str, Any], kinds: Mapping[str, str], of_files: Mapping[str, str]) -> str:
    """Return the HTML page of a report.

    Args:
        found: what ``report.json`` holds.
        kinds: kind of fault to its name in words, in the order of their numbers.
        of_files: the same of the files pipeline.
    """
    numbers = {kind: number for number, kind in enumerate(kinds, 1)}
    parts = [
        f"<h1>{escape(_headline(found))}</h1>",
        f'<p class="lead">{_lead(found)}</p>',
        _problems(found["problems"]),
        f'<figure><div class="plot">{picture(found, numbers, _TITLES)}</div>'
        f"<figcaption>{_caption(found)}</figcaption></figure>",
        "<h2>What was counted</h2>",
        _counts(found),
        "<h2>What was done to them</h2>",
        _faults(found, kinds),
        "<h2>How it was checked</h2>",
        f"<p>{_how(found)}</p>",
        lake_page.section(found["files"], of_files),
        audit_page.section(found["audit"]),
        f"<footer>{_footer(found)}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_headline(found))}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(parts)}\n</main>\n</body>\n</html>\n"
    )


def _headline(found: Mapping[str, Any]) -> str:
    ours = found["oncely"]
    faults = len(ours["faults"])
    if ours["lost"] or ours["duplicated"]:
        return f"{faults} faults: {ours['lost']:,} lost, {ours['duplicated']:,} duplicated"
    return f"{_word(faults)} faults, {ours['records']:,} records, none lost, none twice"


def _word(number: int) -> str:
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    return words[number] if number < len(words) else str(number)


def _lead(found: Mapping[str, Any]) -> str:
    control = found["control"]
    return (
        "The flights that left New York City in 2013 went from a Kafka topic into a PostgreSQL"
        " table twice: by Oncely, and by the usual answer, <code>foreachBatch</code> with Spark’s"
        " JDBC writer. Both were hurt in the same ways while they committed. The usual answer ended"
        f" with <strong>{control['duplicated']:,} flights twice in the table and"
        f" {control['lost'] or 'none'} missing</strong>."
    )


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f'<div class="problems"><h2>Not as it must be</h2><ul>{items}</ul></div>'


def _caption(found: Mapping[str, Any]) -> str:
    ours, control = found["oncely"], found["control"]
    looks = len(ours["samples"])
    apart = sum(rows != flights for _, _, rows, flights in ours["samples"])
    kept = (
        f"At each of {looks:,} looks Oncely’s table held exactly the flights before its committed"
        " offsets"
        if not apart
        else f"At {apart:,} of {looks:,} looks Oncely’s table and its offsets did not agree"
    )
    return (
        "Above, the offsets that a pipeline had committed; below, the rows in its table that those"
        " offsets do not account for, looked at four times a second. The numbers are the faults"
        " listed further down; where a line lies flat after a kill or a stop, Spark is starting"
        f" again. {kept}. The control’s rows come first and its offsets later: what"
        " a fault leaves in between is written again. It ends with"
        f" {control['duplicated']:,} rows that are there twice and {control['unexpected']:,} rows"
        " of broken records."
    )


def _counts(found: Mapping[str, Any]) -> str:
    rows = []
    for name, words in _COUNTS:
        cells = "".join(_count(found[run], run, name) for run in _TITLES)
        rows.append(f'<tr><th scope="row">{words}</th>{cells}</tr>')
    heads = "".join(f'<th scope="col" class="n">{title}</th>' for title in _TITLES.values())
    return (
        '<div class="table"><table><caption>The control keeps no rejects, so lost and duplicated'
        " are counted over its good records only.</caption>"
        f"<thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _count(run: Mapping[str, Any], name: str, what: str) -> str:
    if what == "rejects" and name == "control":
        return '<td class="n soft">dropped</td>'
    tone = ""
    if what not in ("records", "rows", "rejects"):
        tone = " bad" if run[what] else " good"
    return f'<td class="n{tone}">{run[what]:,}</td>'


def _faults(found: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    rows = []
    for number, (kind, words) in enumerate(kinds.items(), 1):
        cells = "".join(_fault(found[run]["faults"], kind) for run in _TITLES)
        badge = f'<span class="badge">{number}</span>'
        rows.append(f'<tr><td>{badge}</td><th scope="row">{escape(words)}</th>{cells}</tr>')
    heads = "".join(f'<th scope="col">{title}</th>' for title in _TITLES.values())
    return (
        '<div class="table"><table><caption>Each was fired while the whole pipeline stood still'
        " and PostgreSQL showed its transaction open.</caption><thead><tr>"
        f'<th scope="col">No.</th><th scope="col">Fault</th>{heads}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _fault(faults: Sequence[Mapping[str, Any]], kind: str) -> str:
    of_kind = [fault for fault in faults if fault["kind"] == kind]
    if not of_kind:
        return '<td class="bad">not fired</td>'
    told = []
    for fault in of_kind:
        seen = fault["seen"]
        state = (
            f"inside {seen['statement']}, transaction open for {seen['open_ms']:.0f} ms"
            if fault["open_transaction"]
            else "no open transaction"
        )
        lines = (state, fault["also"], _said(fault))
        more = "".join(f"<small>{escape(line)}</small>" for line in lines if line)
        told.append(f"at {fault['at']:.1f} s{more}")
    return f"<td>{'<br>'.join(told)}</td>"


def _said(fault: Mapping[str, Any]) -> str:
    said = str(fault["postgres_said"]).split("; ")[-1]
    return f"PostgreSQL: {said}" if said else ""


def _how(found: Mapping[str, Any]) -> str:
    published, ours = found["published"], found["oncely"]
    return (
        f"{published['flights']:,} flights were published as JSON to four partitions, among them"
        f" {published['broken']:,} broken records. {published['transactions']} parts came in"
        f" transactions; {published['aborted']:,} more records were in transactions that were"
        " aborted and must never be seen. When both pipelines had ended, a reader that shares no"
        " code with Oncely, in a process of its own, read the topic with"
        " <code>read_committed</code> up to its last stable offsets, judged every record by rules"
        " of its own with Python’s <code>json</code>, read each table in one snapshot, and compared"
        " record by record: rows by id and by every value, rejects by partition, offset and bytes."
        f" Oncely’s {ours['rows']:,} rows and {ours['rejects']:,} rejects make"
        f" {ours['rows'] + ours['rejects']:,} of {ours['records']:,} records."
    )


def _footer(found: Mapping[str, Any]) -> str:
    runs = " ".join(
        f"{title} ran {found[name]['run_seconds']:.0f} s and was started again"
        f" {len(found[name]['restarts'])} times."
        for name, title in _TITLES.items()
    )
    return f"{runs} The whole demo took {found['seconds']:.0f} s on one machine."
