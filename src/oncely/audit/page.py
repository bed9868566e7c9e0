"""A report as one HTML file: no scripts, no external resources.

Every text of the report is escaped (:func:`of_unknown`): ids are written by whoever writes to the
topic.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from html import escape

from oncely.audit.report import (
    KINDS,
    MEANINGS,
    PROOFS,
    Finding,
    Hour,
    PartitionResult,
    Report,
    Undecided,
    verdict_sentence,
)
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.html import WIDTH, document, facts, key, of_unknown, rect, svg, table, time_of
from oncely.wording import plural, printable

_BARS = 240  # groups that are drawn one by one
_LISTED = 500  # findings, partitions and groups in a list
_OPEN = 30  # a longer list is folded
_HEIGHT, _LEAST = 100.0, 3.0

STYLE = """
:root { --other: 88, 80, 170; --unsure: 120, 128, 138; --card: #fff; }
@media (prefers-color-scheme: dark) { :root { --other: 158, 150, 240; --unsure: 150, 160, 170;
  --card: #1b1f23; } }
main { padding-top: 2rem; }
h1 { display: flex; gap: .6rem; align-items: baseline; overflow-wrap: anywhere; }
h1 .mark { flex: none; display: inline-grid; place-items: center; width: 2.1rem; height: 2.1rem;
  border-radius: 50%; font-size: 1.2rem; font-weight: 700; color: var(--page); }
.clean .mark { background: rgb(var(--fine)); } .damaged .mark { background: rgb(var(--lost)); }
.unknown .mark { background: rgb(var(--unsure)); }
h3 { font-size: 1rem; margin: 1.75rem 0 .25rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .5rem;
  margin: 1.5rem 0 0; font-variant-numeric: tabular-nums; }
.facts div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: .6rem .8rem; }
.facts dt { color: var(--soft); font-size: .8125rem; }
.facts dd { margin: 0; font-size: 1.2rem; font-weight: 600; overflow-wrap: anywhere; }
.facts .time dd { font-size: 1rem; }
.bad dd, b.bad { color: rgb(var(--lost)); }
td small { color: var(--soft); font-size: inherit; }
figure { margin: 1rem 0 0; }
svg { display: block; width: 100%; }
.bars { height: 9rem; border-bottom: 1px solid var(--rule); }
.bars .gone { fill-opacity: .75; }
.lanes { display: grid; grid-template-columns: 6.2rem 1fr; gap: 3px .5rem; align-items: center;
  margin-top: .4rem; font-size: .8125rem; color: var(--soft); }
.lanes svg { height: 1rem; } .lanes .axis { display: flex; justify-content: space-between;
  gap: 1rem; grid-column: 2; } .axis span:last-child { text-align: right; }
.plot { display: grid; grid-template-columns: 6.2rem 1fr; gap: 0 .5rem; font-size: .8125rem;
  color: var(--soft); }
.plot > span { text-align: right; font-variant-numeric: tabular-nums; line-height: 1; }
.fine { --colour: rgba(var(--fine), .55); } .base { --colour: rgba(var(--unsure), .14); }
.lost { --colour: rgb(var(--lost)); } .twice { --colour: rgb(var(--twice)); }
.other { --colour: rgb(var(--other)); } .unsure { --colour: rgb(var(--unsure)); }
rect { fill: var(--colour); } .key i { background: var(--colour); }
.parts { list-style: none; padding: 0; margin: 0; }
.parts li { padding: .7rem 0; border-top: 1px solid var(--rule); }
.parts b { overflow-wrap: anywhere; }
.parts svg { height: .9rem; margin: .35rem 0; border-radius: 4px; }
.parts small, .note { color: var(--soft); font-size: .875rem;
  font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid rgb(var(--other));
  outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem;
  font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: .8125rem; }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th.n, td.n { text-align: right; white-space: nowrap; }
tbody th { color: var(--ink); font-size: inherit; min-width: 6rem; overflow-wrap: anywhere; }
td:not(.n) { overflow-wrap: anywhere; min-width: 9rem; }
summary { cursor: pointer; color: var(--soft); padding: .4rem 0; }
bdi { unicode-bidi: isolate; }
@media (max-width: 34rem) { main { padding: 1.25rem 1rem 3rem; } h1 { font-size: 1.5rem; }
  th, td { padding-right: .5rem; }
  .facts { grid-template-columns: 1fr 1fr; } .plot, .lanes { grid-template-columns: 5rem 1fr; } }
"""
_ARRIVED = {
    "fine": "arrived", "lost": "missing in the destination", "twice": "there more than once",
    "other": "not in the source",
}  # fmt: skip
_COMPARED = {
    "fine": "compared, equal", "twice": "a range that differs", "lost": "damaged records",
    "unsure": "undecided", "base": "not compared",
}  # fmt: skip
_MARKS = {"clean": "✓", "damaged": "✕", "unknown": "?"}
_WORDS = {"clean": "Clean", "damaged": "Damaged", "unknown": "Unknown"}


def page(report: Report, file: str = "") -> str:
    """The page: the verdict in words, hours, partitions, findings, and what is undecided.

    Args:
        report: the report.
        file: the pipeline file, for the command that comes next.
    """
    parts = [
        _head(report),
        _next(report, file),
        _facts(report),
        _undecided(report.undecided),
        _hours(report.hours),
        _partitions(report),
        _findings(report),
        _method(report),
    ]
    title = f"{_WORDS[report.verdict]}: audit of {printable(report.pipeline)}"
    return document(title, STYLE, "\n".join(filter(None, parts)))


def picture(report: Report) -> str:
    """The hours and the partitions, as sections of another page that has :data:`STYLE`."""
    return _hours(report.hours) + _partitions(report)


def _head(report: Report) -> str:
    verdict = report.verdict
    compared = plural(report.records, "record")
    if report.partitions:
        compared += f" of {plural(len(report.partitions), 'partition')}"
    complete = report.complete_until.wall_time
    until = f" Complete until <strong>{time_of(complete)}</strong>." if complete else ""
    into = f" in <strong>{of_unknown(report.destination)}</strong>" if report.destination else ""
    return (
        f'<header class="{verdict}"><h1><span class="mark" role="img"'
        f' aria-label="{_WORDS[verdict]}">{_MARKS[verdict]}</span>'
        f"<span>{escape(verdict_sentence(report))}</span></h1>"
        f"<p>Audit of <strong>{of_unknown(report.pipeline)}</strong>{into}: {compared} compared on"
        f" {time_of(report.at)}, in {report.seconds:,.1f} s.{until}</p></header>"
    )


def _next(report: Report, file: str) -> str:
    if not report.destination or report.verdict != "damaged":
        return ""
    command = f"<code>oncely repair {of_unknown(shlex.quote(file))}</code>"
    return f"<p>Next: {command} tells what it would do, and does it with --execute.</p>"


def _facts(report: Report) -> str:
    shown = [("records", f"{report.records:,}", ""), ("accounted for", f"{report.accounted:,}", "")]
    for kind in KINDS:
        number = report.found.get(kind, 0)
        shown.append((kind, f"{number:,}", "bad" if number else ""))
    shown.append(("offsets without a record", f"{report.holes:,}", ""))
    until = report.complete_until.event_time
    shown.append(("complete until (event time)", time_of(until) if until else "not known", "time"))
    return facts(shown)


def _undecided(undecided: Sequence[Undecided]) -> str:
    if not undecided:
        return ""
    reasons: dict[str, list[Undecided]] = defaultdict(list)
    for one in undecided:
        reasons[one.reason].append(one)
    items = "".join(
        f"<h3>{of_unknown(reason)}</h3><p class='note'>{_offsets(same)}</p>"
        for reason, same in reasons.items()
    )
    return f"<section><h2>What could not be decided</h2>{items}</section>"


def _offsets(same: Sequence[Undecided]) -> str:
    shown = []
    for one in same[:20]:
        where = of_unknown(one.partition) if one.partition else "all partitions"
        if one.range is not None:
            where += f" offsets {one.range.start:,} to {one.range.end - 1:,}"
        shown.append(where)
    more = f" and {len(same) - 20:,} more" if len(same) > 20 else ""
    return "; ".join(shown) + more


# -- hours --------------------------------------------------------------------------------------


def _hours(hours: Sequence[Hour]) -> str:
    if not hours:
        return ""
    drawn = list(_binned(hours))
    most = max(1, *(max(one.topic, one.sink) for one in drawn))
    bad = [one for one in hours if one.missing or one.duplicated or one.unexpected]
    about = (
        f"{plural(len(hours), 'group')} of ids; {plural(len(bad), 'group')} with damage."
        " The same numbers are in the table below."
    )
    ends = f"<span>{of_unknown(hours[0].group)}</span>"
    if len(hours) > 1:
        ends += f"<span>{of_unknown(hours[-1].group)}</span>"
    lanes = "".join(
        f"<span>{label}</span>{_lane(drawn, numbers, style)}"
        for label, style, numbers in (
            ("missing", "lost", [one.missing for one in drawn]),
            ("duplicated", "twice", [one.duplicated for one in drawn]),
            ("unexpected", "other", [one.unexpected for one in drawn]),
        )
    )
    return (
        f"<section><h2>By group</h2><figure><div class='plot'><span>{most:,} ids</span>"
        f"{_bars(drawn, most, about)}</div><div class='lanes'>{lanes}"
        f"<div class='axis'>{ends}</div></div></figure>"
        f"{key(_ARRIVED)}"
        f"{_hour_table(hours, bad)}</section>"
    )


def _binned(hours: Sequence[Hour]) -> Iterable[Hour]:
    """At most :data:`_BARS` groups: neighbours are joined."""
    size = -(-len(hours) // _BARS)
    for at in range(0, len(hours), size):
        joined = hours[at : at + size]
        name = joined[0].group if size == 1 else f"{joined[0].group} to {joined[-1].group}"
        numbers = zip(*(astuple(one)[1:] for one in joined), strict=True)
        yield Hour(name, *map(sum, numbers))


def _bars(hours: Sequence[Hour], most: int, about: str) -> str:
    step = WIDTH / len(hours)
    drawn = []
    for at, one in enumerate(hours):
        left, width = at * step, step * (0.86 if len(hours) < 120 else 1.0)
        arrived = _HEIGHT * max(0, one.topic - one.missing) / most
        missing = max(_LEAST, _HEIGHT * one.missing / most) if one.missing else 0.0
        arrived = min(arrived, _HEIGHT - missing)
        drawn.append(
            f"<g><title>{escape(printable(_told(one)))}</title>"
            + rect("fine", left, width, _HEIGHT - arrived, arrived)
            + (rect("lost", left, width, _HEIGHT - arrived - missing, missing) if missing else "")
            + "</g>"
        )
    return svg("bars", _HEIGHT, about, drawn)


def _lane(hours: Sequence[Hour], numbers: Sequence[int], style: str) -> str:
    """One line of marks: a group has a mark if its number is not zero."""
    step = WIDTH / len(hours)
    drawn = [rect("base", 0, WIDTH, 0, 10)]
    for at, (one, number) in enumerate(zip(hours, numbers, strict=True)):
        if number:
            drawn.append(rect(style, at * step, max(step, _LEAST), 0, 10, _told(one)))
    return svg("", 10, "", drawn)


def _told(one: Hour) -> str:
    parts = [f"{one.topic:,} in the source", f"{one.sink:,} in the destination"]
    damage = {"missing": one.missing, "duplicated": one.duplicated, "unexpected": one.unexpected}
    parts += [f"{number:,} {name}" for name, number in damage.items() if number]
    return f"{one.group}: {', '.join(parts)}"


def _hour_table(hours: Sequence[Hour], bad: Sequence[Hour]) -> str:
    head = ["Group", "#Missing", "#Duplicated", "#Unexpected", "#Source", "#Destination"]

    def row(one: Hour) -> Iterator[str]:
        yield of_unknown(one.group)
        for number in (one.missing, one.duplicated, one.unexpected):
            yield f'<b class="bad">{number:,}</b>' if number else "<small>0</small>"
        yield from (f"{one.topic:,}", f"{one.sink:,}")

    told = ""
    if bad:
        listed = table("Groups with damage", head, map(row, bad[:_LISTED]))
        told = f"<h3>Groups with damage</h3>{listed}{_cut(len(bad))}"
    every = table("All groups", head, map(row, hours[:_LISTED])) + _cut(len(hours))
    summary = f"<summary>All {len(hours):,} groups</summary>"
    return f'{told}<details id="groups">{summary}{every}</details>'


# -- partitions -----------------------------------------------------------------------------------


def _partitions(report: Report) -> str:
    if not report.partitions:
        return ""
    found: dict[TopicPartition, list[int]] = defaultdict(list)
    for one in report.findings:
        if one.partition is not None and one.offset is not None:
            found[one.partition].append(one.offset)
    open_: dict[TopicPartition, list[OffsetRange]] = defaultdict(list)
    for undecided in report.undecided:
        if undecided.partition is not None and undecided.range is not None:
            open_[undecided.partition].append(undecided.range)
    # Damage first, so that the limit of the list never hides it.
    ordered = sorted(
        report.partitions,
        key=lambda one: (one.partition not in found and one.partition not in open_, one.partition),
    )
    items = "".join(
        f"<li>{_partition(one, found[one.partition], open_[one.partition])}</li>"
        for one in ordered[:_LISTED]
    )
    return (
        f'<section><h2>By partition</h2><ul class="parts">{items}</ul>{_cut(len(ordered))}'
        f"{key(_COMPARED)}</section>"
    )


def _partition(one: PartitionResult, found: Sequence[int], open_: Sequence[OffsetRange]) -> str:
    compared, position = one.compared, one.compared.end
    last = max([one.end, position, compared.start + 1, *(at + 1 for at in found)])
    scale = WIDTH / (last - compared.start)

    def marks(style: str, ranges: Iterable[tuple[int, int]]) -> list[str]:
        """The ranges, in steps of the least width: those that share a step are one mark."""
        drawn: list[tuple[float, float]] = []
        for start, end in sorted(ranges):
            left = (max(start, compared.start) - compared.start) * scale // _LEAST * _LEAST
            right = max(left + _LEAST, (end - compared.start) * scale)
            if drawn and left <= drawn[-1][1]:
                drawn[-1] = drawn[-1][0], max(drawn[-1][1], right)
            else:
                drawn.append((left, right))
        return [rect(style, left, right - left, 0, 10) for left, right in drawn]

    drawn = [
        rect("base", 0, WIDTH, 0, 10),
        *(marks("fine", [(compared.start, position)]) if position > compared.start else []),
        *marks("twice", ((r.start, r.end) for r in one.differing)),
        *marks("unsure", ((r.start, r.end) for r in open_)),
        *marks("lost", ((at, at + 1) for at in found)),
    ]
    words = [
        f"{plural(one.records, 'record')} in offsets {compared.start:,} to {position:,}",
        f"{one.accounted:,} accounted for",
        f"{plural(one.holes, 'offset')} without a record" if one.holes else "",
        f"{plural(len(one.differing), 'range')} differed" if one.differing else "",
        f"{plural(one.end - position, 'offset')} not committed yet" if one.end > position else "",
    ]
    state = "damaged" if found else "undecided" if open_ else "equal"
    about = f"{one.partition}: {state}"
    return (
        f"<b{' class=bad' if found else ''}>{of_unknown(one.partition)}</b> <small>{state}</small>"
        f"{svg('', 10, about, drawn)}<small>{'; '.join(filter(None, words))}</small>"
    )


# -- findings -------------------------------------------------------------------------------------


def _findings(report: Report) -> str:
    sections = []
    for kind in KINDS:
        number = report.found.get(kind, 0)
        if not number:
            continue
        listed = [one for one in report.findings if one.kind == kind]
        table = _finding_table(kind, listed[:_LISTED])
        if len(listed) > _OPEN:
            table = f"<details><summary>Show {_shown(listed, number)}</summary>{table}</details>"
        elif number > len(listed):
            table += f'<p class="note">{_shown(listed, number)} are listed.</p>'
        sections.append(f"<h3>{number:,} {kind}</h3><p class='note'>{MEANINGS[kind]}</p>{table}")
    if not sections:
        return ""
    return f"<section><h2>Damaged records</h2>{''.join(sections)}</section>"


def _shown(listed: Sequence[Finding], number: int) -> str:
    shown = min(len(listed), _LISTED)
    return f"all {number:,}" if shown == number else f"{shown:,} of {number:,}"


def _finding_table(kind: str, listed: Sequence[Finding]) -> str:
    rows = (
        (
            of_unknown(one.partition) if one.partition else "–",
            "–" if one.offset is None else f"{one.offset}",
            of_unknown(one.detail),
            *((of_unknown(part, 200) if part is not None else "null") for part in one.record),
            *["–"] * (2 - len(one.record)),
        )
        for one in listed
    )
    head = ["Partition", "#Offset", "Detail", "Key", "Value"]
    return table(f"Records that are {kind}", head, rows)


def _method(report: Report) -> str:
    source = ""
    if report.source is not None:
        topics = ", ".join(
            f"{of_unknown(k)} ({of_unknown(v)})" for k, v in report.source.topic_ids.items()
        )
        source = f" Cluster {of_unknown(report.source.cluster_id)}; topic ids: {topics}."
    limits = "".join(f"<p>{of_unknown(one)}</p>" for one in report.limits)
    return (
        f"<footer>{limits}<p>{PROOFS[report.proof]} Offsets without a record are markers of"
        " transactions, aborted, compacted or deleted records; they are no losses."
        f" “Clean” is said only if everything was proved.{source}</p></footer>"
    )


# -- parts ----------------------------------------------------------------------------------------


def _cut(number: int) -> str:
    if number <= _LISTED:
        return ""
    return f'<p class="note">{number - _LISTED:,} more are not listed; the JSON has them all.</p>'
