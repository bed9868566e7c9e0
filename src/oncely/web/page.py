"""The model as HTML. Every text is escaped: records are written by others.

``form_token`` is what the forms of a session contain; without one a page is read-only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

from oncely.audit.page import picture
from oncely.audit.report import Report, verdict_sentence
from oncely.core.ranges import TopicPartition
from oncely.html import WIDTH, document, facts, key, of_unknown, rect, svg, table, time_of
from oncely.kafka.reset import VERBS
from oncely.kafka.source import GroupMember, PartitionLag
from oncely.pipeline.offsets import FENCED, Reset
from oncely.pipeline.rejects import Discarded
from oncely.pipeline.status import NOBODY, Judgement, Level
from oncely.verify.reading import AMENDMENTS
from oncely.web.changes import Change
from oncely.web.model import (
    Detail,
    Epoch,
    Lane,
    Letter,
    Letters,
    Overview,
    Point,
    Problem,
    Reason,
    Span,
    Subject,
    TableFiles,
)
from oncely.web.style import STYLE
from oncely.wording import duration, plural, printable

_LEAST = 2.0
_LANES = 200  # partitions that are drawn
_EPOCHS = 100
_text = partial(of_unknown, longest=4_000)
Listed = Sequence[tuple[Subject, Overview | None]]


def pipelines(found: Listed, asked: Mapping[str, str], form_token: str | None) -> str:
    """The page of all pipelines.

    Args:
        found: the pipelines.
        asked: ``q``, a text to search for; ``state``, a level; ``sort``, a column, from its other
            end after a minus.
        form_token: of the session.
    """
    levels = Counter(_judged(one).level for _, one in found)
    told = plural(len(found), "pipeline")
    named = [f"{levels[level]} {said}" for level, said in _HEADLINE.items() if levels[level]]
    told += f": {', '.join(named)}" if named else ", none of them with a problem"
    matching = [one for one in found if _matches(asked["q"], *one)]
    shown = [one for one in matching if asked["state"] in ("", _judged(one[1]).level)]
    shown.sort(key=lambda one: one[0].name)
    column = asked["sort"].removeprefix("-")
    reverse = column != asked["sort"]
    last = float("-inf" if reverse else "inf")
    shown.sort(key=lambda one: _order(column, last, *one), reverse=reverse)
    live = f'<p class="verdict">{told}</p>{_levels(matching, asked)}{_listed(shown, asked)}'
    return _page("Pipelines", f"<h1>Pipelines</h1>{_search(asked)}", live, "/events", form_token)


def pipeline(
    subject: Subject,
    overview: Overview | None,
    detail: Detail | None,
    audit: Report | None,
    job: Change | None,
    form_token: str | None,
) -> str:
    """The page of one pipeline."""
    parts = [
        f'<div class="{_judged(overview).level}">{_verdict(_judged(overview))}</div>',
        _problems(overview, detail),
        _job(job),
        _facts(overview, detail, audit),
        _positions(overview),
        _over_time(overview),
        _history(detail, overview),
        _letters(detail, subject, form_token),
        _files(detail),
        _audit(audit),
    ]
    head = f"<h1>{_text(subject.name)}</h1><p>{_text(subject.route)}</p>"
    after = _reset_form(subject, form_token) + _guarantee(subject)
    events = f"/p/{quote(subject.name, safe='')}/events"
    return _page(subject.name, head, "\n".join(filter(None, parts)), events, form_token, after)


def reset_plan(
    subject: Subject, asked: Mapping[str, str], plan: Reset | Problem, form_token: str | None
) -> str:
    """The dry run of a reset, with the form that executes it."""
    head = f"<h1>Reset of {_text(subject.name)}</h1>"
    back = f'<p><a href="{_path(subject)}">Back to the pipeline</a></p>'
    if isinstance(plan, Problem):
        return _page("Reset", head, _problem(plan) + back, None, form_token)
    rows = (
        (_text(tp), _n(plan.before.get(tp)), _n(at), escape(_effect(plan.before.get(tp), at)))
        for tp, at in sorted(plan.positions.items())
    )
    shown = table("Reset", ["Partition", "#Position", "#New position", "Effect"], rows)
    told = (*plan.notes, plan.warning, FENCED)
    notes = "".join(f"<p>{_text(one)}</p>" for one in told if one)
    dry = "<p>This is a dry run: nothing was written.</p>"
    form = (
        f'<form class="ask" method="post" action="{_path(subject)}/reset">{_hidden(form_token)}'
        f"{_again(asked)}"
        '<button class="change-it">Reset; a running pipeline is fenced</button></form>'
    )
    return _page("Reset", head, f"{dry}{shown}{notes}{form}{back}", None, form_token)


def discard_plan(
    subject: Subject, asked: Mapping[str, str], plan: Discarded | Problem, form_token: str | None
) -> str:
    """The dry run of a discard, with the filter, and the form that executes it."""
    head = f"<h1>Discard of dead letters of {_text(subject.name)}</h1>"
    back = f'<p><a href="{_path(subject)}">Back to the pipeline</a></p>'
    if isinstance(plan, Problem):
        body = _problem(plan)
    elif not plan.total:
        body = "<p>No dead letter is chosen.</p>"
    else:
        rows = ((_text(one.reason), _n(one.rejects)) for one in plan.reasons)
        shown = table("Dead letters by reason", ["Reason", "#Dead letters"], rows)
        body = (
            f"<p>This is a dry run: nothing was written. {plural(plan.total, 'dead letter')} would"
            " be discarded. Key, value and headers are removed for good: a discarded dead letter is"
            " not replayed any more. Its offset and a masked reason remain, so that audits account"
            f" for the record.</p>{shown}"
            f'<form class="ask" method="post" action="{_path(subject)}/discard">'
            f"{_hidden(form_token)}{_again({**asked, 'shown': plan.shown})}<button id='discard'"
            f" class='change-it'>Discard {plan.total:,} for good</button></form>"
        )
    return _page("Discard", head, body + _choice(subject, asked) + back, None, form_token)


def _choice(subject: Subject, asked: Mapping[str, str]) -> str:
    fields = (
        ("reason", "Part of the reason"), ("partition", "Only topic[:0,1]"),
        ("since", "Since (ISO 8601, or an age: 12h)"),
        ("before", "Before (ISO 8601, or an age: 90d)"),
    )  # fmt: skip
    labels = "".join(
        f'<label>{meaning}<input name="{name}" size="24" value="{escape(asked[name])}"></label>'
        for name, meaning in fields
    )
    return (
        "<h2>Choose dead letters</h2>"
        f'<form class="ask" method="get" action="{_path(subject)}/discard">{labels}'
        "<button>Dry run</button></form>"
    )


def login(wrong: bool) -> str:
    """The form for the token."""
    failed = '<p class="problem" role="alert">That is not the token.</p>' if wrong else ""
    body = (
        f"{failed}<form class='ask' method='post' action='/login'><label>Token"
        "<input name='token' type='password' autocomplete='current-password' required></label>"
        "<button>Log in</button></form>"
    )
    return _page("Log in", "<h1>Log in</h1>", body, None, None)


def message(title: str, text: str) -> str:
    """A page with one sentence."""
    return _page(title, f"<h1>{escape(title)}</h1>", f"<p>{escape(text)}</p>", None, None)


# -- frame -----------------------------------------------------------------------------------------


def _page(
    title: str, head: str, live: str, events: str | None, form_token: str | None, after: str = ""
) -> str:
    log = ""
    if form_token is not None:
        log = (
            f'<form method="post" action="/logout">{_hidden(form_token)}'
            "<button>Log out</button></form>"
        )
    watched = "" if events is None else f' data-events="{escape(events)}"'
    body = (
        '<a class="skip" href="#live">To the content</a>'
        f'<nav class="top" aria-label="Oncely"><a href="/">Oncely: all pipelines</a>{log}</nav>'
        f'{head}<div id="said" class="said" role="status"></div>'
        f'<div id="live" tabindex="-1"{watched}>{live}</div>{after}'
    )
    script = '<script src="/live.js" defer></script>\n' if events is not None else ""
    return document(f"{printable(title)} · Oncely", STYLE, body, script)


def _hidden(form_token: str | None) -> str:
    return f'<input type="hidden" name="form_token" value="{escape(form_token or "")}">'


def _again(asked: Mapping[str, str]) -> str:
    """The fields of a dry run, for the form that executes it."""
    return "".join(
        f'<input type="hidden" name="{escape(name)}" value="{escape(value)}">'
        for name, value in asked.items()
    )


def _path(subject: Subject) -> str:
    return f"/p/{quote(subject.name, safe='')}"


# -- overview --------------------------------------------------------------------------------------

_READING = Judgement("unread", "", "Reading; a server has not answered yet")
_HEADLINE: Mapping[Level, str] = {
    "bad": "with a problem", "warn": "behind, or with dead letters",
    "unknown": "not known or never started",
}  # fmt: skip
_LEVELS: Mapping[Level, str] = {
    "bad": "Problem", "warn": "Attention", "unknown": "Unknown", "busy": "Working", "fine": "Good",
}  # fmt: skip


def _judged(overview: Overview | None) -> Judgement:
    return overview.verdict if overview is not None else _READING


def _matches(text: str, subject: Subject, overview: Overview | None) -> bool:
    about = f"{subject.name} {subject.route} {_judged(overview).sentence}".lower()
    return all(word in about for word in text.lower().split())


def _search(asked: Mapping[str, str]) -> str:
    kept = _again({name: asked[name] for name in ("state", "sort") if asked[name]})
    return (
        f'<form class="ask" id="search" role="search" method="get" action="/">{kept}'
        f'<label>Name, route or state<input type="search" name="q" value="{escape(asked["q"])}">'
        "</label><button>Search</button></form>"
    )


def _link(asked: Mapping[str, str], name: str, value: str, told: str, *, chosen: bool) -> str:
    """A link to the same list with another choice; ``id`` keeps the focus when it is renewed."""
    query = urlencode({one: text for one, text in {**asked, name: value}.items() if text})
    current = ' aria-current="true"' if chosen else ""
    ident = f"{name}-{value.removeprefix('-')}"
    return f'<a id="{ident}" href="{escape(f"/?{query}")}"{current}>{told}</a>'


def _levels(matching: Listed, asked: Mapping[str, str]) -> str:
    number = Counter(_judged(one).level for _, one in matching)
    told = {"": f"All {len(matching):,}"}
    told |= {level: f"{_LEVELS[level]} {number[level]:,}" for level in _LEVELS if number[level]}
    links = " ".join(
        _link(asked, "state", level, said, chosen=asked["state"] == level)
        for level, said in told.items()
    )
    return f'<nav class="states" aria-label="By state">{links}</nav>'


def _listed(shown: Listed, asked: Mapping[str, str]) -> str:
    sort, heads = asked["sort"] or "state", []
    for name, label in _COLUMNS.items():
        mark = {name: " ↓", f"-{name}": " ↑"}.get(sort, "")
        link = f"-{name}" if sort == name else name
        heads.append(_link(asked, "sort", link, label + mark, chosen=bool(mark)))
    right = [*heads[:2], *(f"#{one}" for one in heads[2:])]
    times = [one.at for _, one in shown if one is not None and not one.age]
    told = f"The oldest reading is of {_clock(min(times))}." if times else ""
    rows = table("All pipelines", right, (_item(*one) for one in shown))
    return f'<div class="pipelines">{rows}<p class="note">{told or "None."}</p></div>'


def _item(subject: Subject, overview: Overview | None) -> Iterator[str]:
    verdict = _judged(overview)
    old = _read_at(overview.at, overview.age) if overview is not None else ""
    yield f'<a href="{_path(subject)}">{_text(subject.name)}</a><p>{_text(subject.route)}</p>'
    yield f'<div class="{verdict.level}">{_verdict(verdict)}{old}</div>'
    for name, label in list(_COLUMNS.items())[2:]:
        value = _number(name, overview)
        told = "–" if value is None else duration(value) if name == "waits" else f"{value:,.0f}"
        yield f"{told}<small class='number-of'> {label.lower()}</small>"


def _number(column: str, one: Overview | None) -> float | None:
    if one is None or (status := one.status) is None:
        return None
    waits, speed = status.lag_seconds or 0.0, one.per_second or 0.0
    return {"lag": status.lag, "waits": waits, "speed": speed, "letters": status.rejects}[column]


def _order(column: str, last: float, subject: Subject, one: Overview | None) -> Any:
    """By name, by a number with the largest first, or by state with the worst first."""
    if column == "name":
        return subject.name
    if column not in _COLUMNS or column == "state":
        return list(_LEVELS).index(_judged(one).level)
    return last if (number := _number(column, one)) is None else -number


_COLUMNS = {
    "name": "Pipeline", "state": "State", "lag": "Lag", "waits": "Oldest waits",
    "speed": "Offsets/s", "letters": "Dead letters",
}  # fmt: skip


def _verdict(verdict: Judgement) -> str:
    dot = f'<span class="dot" role="img" aria-label="{_LEVELS[verdict.level]}"></span>'
    return f'<p class="verdict">{dot}<span>{_text(verdict.sentence)}</span></p>'


def _problem(problem: Problem) -> str:
    return f'<div class="problem"><p>{_text(problem.message)}</p>{_way_out(problem)}</div>'


def _way_out(problem: Problem) -> str:
    return f'<p class="way-out">Way out: {_text(problem.way_out)}</p>' if problem.way_out else ""


def _problems(overview: Overview | None, detail: Detail | None) -> str:
    """Each problem once: the message of the first one is in the verdict."""
    found = dict.fromkeys(detail.problems if detail is not None else ())
    told = ""
    if overview is not None and overview.problem is not None:
        found.pop(overview.problem, None)
        told = _way_out(overview.problem) + _read_at(overview.at, overview.age)
    return told + "".join(map(_problem, found))


def _read_at(at: datetime, stale: object) -> str:
    """The time of what can't be read now; empty if it is not ``stale``."""
    age = duration((datetime.now(UTC) - at).total_seconds())
    return f"<p class='note'>As it was {age} ago, at {_clock(at)}.</p>" if stale else ""


# -- one pipeline ----------------------------------------------------------------------------------


def _job(job: Change | None) -> str:
    if job is None:
        return ""
    states = {"running": "is going on", "done": "is done", "failed": "has failed"}
    told = f": {_text(job.text)}" if job.text else ""
    failed = _problem(job.problem) if job.problem else ""
    return (
        f"<section><h2>Last change</h2><p><strong>{escape(job.title)}</strong>"
        f" {states[job.state]}{told} ({_clock(job.at)})</p>{failed}</section>"
    )


def _members(found: Mapping[str, Sequence[GroupMember]] | None) -> str:
    if found is None:
        return "not known"
    told = (
        f"{one.client} at {one.host}: {plural(len(one.partitions), 'partition')}"
        for members in found.values() for one in members
    )  # fmt: skip
    return _text("; ".join(told) or NOBODY)


def _facts(overview: Overview | None, detail: Detail | None, audit: Report | None) -> str:
    shown: list[tuple[str, str]] = []
    if overview is not None and overview.status is not None:
        status = overview.status
        age = status.lag_seconds
        shown += [
            ("lag, in offsets", _n(status.lag)),
            ("oldest record waits", duration(age) if age else "–"),
            ("offsets per second", _n(round(overview.per_second or 0))),
            ("dead letters", _n(status.rejects)),
            ("last epoch", str(status.epoch or "none")),
            ("members", _members(status.members)),
        ]
    history = detail.history if detail is not None else None
    if history is not None and history.last_commit:
        shown.append(("last commit", time_of(history.last_commit)))
    if audit is not None:
        until = audit.complete_until.event_time or audit.complete_until.wall_time
        shown.append(("complete until, by the last audit", time_of(until) if until else "–"))
    if overview is not None:
        shown.append(("read at", _clock(overview.at)))
    return facts((*one, "") for one in shown) if shown else ""


def _positions(overview: Overview | None) -> str:
    if overview is None or overview.status is None:
        return ""
    rows = (
        (_text(f"{p.topic}-{p.partition}"), *map(_n, (p.position, p.end, p.lag)), _age(p))
        for p in overview.status.partitions
    )
    head = ["Partition", "#Next offset", "#End", "#Lag", "#Oldest waits"]
    return f"<section><h2>Positions and lag</h2>{table('Positions', head, rows)}</section>"


def _age(one: PartitionLag) -> str:
    if not one.lag:
        return "–"
    return "not known" if one.lag_seconds is None else duration(one.lag_seconds)


def _over_time(overview: Overview | None) -> str:
    points = overview.points if overview is not None else ()
    if len(points) < 2:
        return ""
    drawn = _line("lag", "offsets", points, [one.lag for one in points])
    speeds = [None if one.lag is None else one.per_second for one in points]
    drawn += _line("speed", "offsets/s", points, speeds)
    first, last = (_clock(datetime.fromtimestamp(points[at].at, UTC)) for at in (0, -1))
    return (
        f"<section><h2>Over time</h2><figure><div class='plot'>{drawn}"
        f"</div><div class='lanes'><div class='axis'><span>{first}</span><span>{last}</span></div>"
        "</div></figure></section>"
    )


def _line(name: str, unit: str, points: Sequence[Point], values: Sequence[float | None]) -> str:
    """A line of values over time; it has a hole where they could not be read."""
    start, known = points[0].at, [one for one in values if one is not None]
    if not known:
        return ""
    wide = WIDTH / max(points[-1].at - start, 1e-9)
    high, pen, drawn = 100 / max(*known, 1), "M", list[str]()
    for point, value in zip(points, values, strict=True):
        if value is not None:
            drawn.append(f"{pen}{(point.at - start) * wide:.1f} {100 - value * high:.1f}")
        pen = "M" if value is None else "L"
    about = f"{name}: at most {max(known):,.0f}, last {known[-1]:,.0f} {unit}"
    line = svg("line", 100, about, [f'<path d="{"".join(drawn)}"/>'])
    return f"<span>{name}, at most<br>{max(known):,.0f} {unit}</span>{line}"


# -- history ---------------------------------------------------------------------------------------


_KEY = {
    "e0 e1 e2": "committed; another colour is another epoch", "hole": "offsets without a record",
    "gap": "deleted before they were read", "undone": "undone by a reset",
    "change": "replayed or repaired", "base": "not committed yet",
}  # fmt: skip


def _history(detail: Detail | None, overview: Overview | None) -> str:
    title = "<h2>Committed ranges and takeovers</h2>"
    if detail is None:
        return f"<section>{title}<p>The ledger is being read.</p></section>"
    history = detail.history
    if history is None:
        return ""
    title += _read_at(detail.at, detail.problems)
    status = overview.status if overview is not None else None
    ends = (
        {TopicPartition(p.topic, p.partition): p.end for p in status.partitions} if status else {}
    )
    committed = (span for lane in history.lanes for span in lane.spans if span.kind == "data")
    numbers = sorted({span.epoch for span in committed})
    colours = {number: f"e{at % 3}" for at, number in enumerate(numbers)}
    lanes = "".join(_lane(one, ends.get(one.partition), colours) for one in history.lanes[:_LANES])
    more = _left_out(len(history.lanes) - _LANES, "partitions", "drawn")
    notes = "".join(f"<p class='note'>{_text(one)}</p>" for one in history.notes)
    drawn = f'<ul class="lanes-of">{lanes}</ul>{more}{key(_KEY)}' if lanes else ""
    return f"<section>{title}{notes}{drawn}{_epochs(history.epochs)}</section>"


def _lane(lane: Lane, end: int | None, colours: Mapping[int, str]) -> str:
    spans = lane.spans
    start = min((one.start for one in spans), default=lane.position)
    last = max([lane.position, start + 1, end or 0, *(one.end for one in spans)])
    scale = WIDTH / (last - start)
    drawn = [rect("base", 0, WIDTH, 0, 10, "not committed yet")]
    # What a reset has undone is a strip over what was committed again.
    for one in sorted(spans, key=lambda span: span.kind == "undone"):
        left = min((one.start - start) * scale, WIDTH - _LEAST)
        width, top = max(_LEAST, (one.end - one.start) * scale), 7 * (one.kind == "undone")
        drawn.append(rect(_style(one, colours), left, width, top, 10 - top, _told(one)))
    epochs = sorted({one.epoch for one in spans})
    wait = f"; {end - lane.position:,} offsets wait" if end and end > lane.position else ""
    about = (
        f"{lane.partition}: offsets {start:,} to {lane.position:,} are committed, by"
        f" {plural(len(epochs), 'epoch')}{wait}"
    )
    return (
        f"<li><b>{_text(lane.partition)}</b> <small>epoch {lane.epoch}</small>"
        f"{svg('', 10, about, drawn)}<small>offsets {start:,} to {lane.position:,}{wait}</small>"
    )


def _style(one: Span, colours: Mapping[int, str]) -> str:
    if one.kind in AMENDMENTS:
        return "change"
    return colours.get(one.epoch, "e0") if one.kind == "data" else one.kind


def _told(one: Span) -> str:
    kinds = {
        "data": "committed", "hole": "without a record", "gap": "deleted before they were read",
        "undone": "undone by a reset",
    }  # fmt: skip
    counts = one.counts
    return (
        f"epoch {one.epoch}: offsets {one.start:,} to {one.end:,} {kinds.get(one.kind, one.kind)},"
        f" {plural(one.ranges, 'range')}, {counts.records:,} records, {counts.rejects:,} rejects"
    )


def _epochs(epochs: Sequence[Epoch]) -> str:
    if not epochs:
        return ""
    rows = (
        (
            f"{one.number}",
            *(time_of(at) if at else "–" for at in (one.first, one.last)),
            *map(_n, (one.counts.records, one.counts.rows, one.counts.rejects)),
            escape(_doings(one)) or "–",
        )
        for one in epochs[:_EPOCHS]
    )
    head = ["Epoch", "First commit", "Last commit", "#Records", "#Rows", "#Rejects", "Notes"]
    cut = _left_out(len(epochs) - _EPOCHS, "epochs")
    about = "<p class='note'>Each start of the pipeline takes an epoch; an older one can't commit"
    return f"<h3>Takeovers</h3>{about} any more.</p>{table('Takeovers', head, rows)}{cut}"


def _doings(one: Epoch) -> str:
    held = [f"holds {plural(len(one.holds), 'partition')}"] if one.holds else []
    return "; ".join([*held, *(plural(number, name) for name, number in one.events.items())])


# -- dead letters ----------------------------------------------------------------------------------


def _letters(detail: Detail | None, subject: Subject, form_token: str | None) -> str:
    if detail is None or detail.letters is None:
        return ""
    letters, title = detail.letters, "<h2>Dead letters</h2>" + _read_at(detail.at, detail.problems)
    if not letters.total:
        return f"<section>{title}<p>There are none.</p></section>"
    told = plural(letters.total, "record") + " could not be written"
    if letters.read < letters.total:
        told += f"; the first {letters.read:,} are grouped here"
    groups = "".join(_reason(at, one) for at, one in enumerate(letters.reasons))
    ways = _replay(letters, subject, form_token) + _discard(letters, subject, form_token)
    return f"<section>{title}<p>{told}.</p>{groups}{ways}</section>"


def _reason(at: int, one: Reason) -> str:
    rows = "".join(_letter(letter) for letter in one.letters)
    cut = _left_out(one.number - len(one.letters), "with this reason")
    return (
        f'<details id="reason-{at}"><summary><b>{one.number:,}</b> {_text(one.reason)}'
        f" <small>({escape(one.stage)})</small></summary>{rows}{cut}</details>"
    )


def _letter(one: Letter) -> str:
    at = f" · {time_of(one.time)}" if one.time is not None else ""
    fields = [("reason", one.reason), ("key", one.key), ("value", one.value)]
    fields = [*fields[one.reason is None :], *((f"header {n}", value) for n, value in one.headers)]
    shown = "".join(
        f"<div><dt>{_text(name)}</dt><dd><pre>{'null' if value is None else _lines(value)}</pre>"
        "</dd></div>"
        for name, value in fields
    )
    return f'<div class="letter"><p><b>{_text(one.place)}</b>{at}</p><dl>{shown}</dl></div>'


def _replay(letters: Letters, subject: Subject, form_token: str | None) -> str:
    if letters.no_replay is not None:
        return _impossible("replayed", letters.no_replay)
    if subject.pipeline is not None and subject.pipeline.spark_path is not None:
        return "<p>A replay needs Spark: run <code>oncely rejects replay</code>.</p>"
    if form_token is None:
        return _read_only("rejects replay", "decodes them again")
    return (
        f'<form class="ask" method="post" action="{_path(subject)}/replay">{_hidden(form_token)}'
        f'<button id="replay" class="change-it">Replay {letters.total:,}, each exactly once'
        "</button></form>"
    )


def _discard(letters: Letters, subject: Subject, form_token: str | None) -> str:
    if letters.no_discard is not None:
        return _impossible("discarded", letters.no_discard)
    if form_token is None:
        return _read_only("rejects discard", "removes their content")
    return (
        f'<form class="ask" method="get" action="{_path(subject)}/discard">'
        '<button id="to-discard">Discard: dry run</button></form>'
    )


def _read_only(command: str, does: str) -> str:
    return f"<p>This page is read-only; <code>oncely {command}</code> {does}.</p>"


def _impossible(verb: str, why: Problem) -> str:
    way = f" Way out: {_text(why.way_out)}." if why.way_out else ""
    return f"<p>They can't be {verb} here: {_text(why.message)}.{way}</p>"


# -- reset, files, audit, guarantee ----------------------------------------------------------------


def _reset_form(subject: Subject, form_token: str | None) -> str:
    if subject.pipeline is None:
        return ""
    options = "".join(
        f'<option value="{name}">{escape(meaning)}</option>' for name, meaning in VERBS.items()
    )
    title = "<section><h2>Reset of positions</h2>"
    if form_token is None:
        return f"{title}{_read_only('offsets reset', 'moves them')}</section>"
    return (
        f"{title}<p>The dry run shows the new positions and writes nothing.</p>"
        f'<form class="ask" method="get" action="{_path(subject)}/reset">'
        f'<label>Move<select name="verb">{options}</select></label>'
        '<label>Offset, time or duration<input name="value" size="20"></label>'
        '<label>Only topic[:0,1]<input name="topic" size="16"></label>'
        "<button>Dry run</button></form></section>"
    )


def _effect(before: int | None, after: int) -> str:
    if before is None:
        return "begins here"
    if after == before:
        return "stays"
    if after < before:
        return f"{before - after:,} are read again"
    return f"{after - before:,} are skipped"


def _files(detail: Detail | None) -> str:
    if detail is None or detail.files is None:
        return ""
    files, title = detail.files, "<h2>Files and columns</h2>" + _read_at(detail.at, detail.problems)
    told = f"{plural(files.files, 'file')}, {plural(files.rows, 'row')}, {_bytes(files.bytes)}."
    rows = ((_text(name), _n(number), _n(count)) for name, number, count in files.directories)
    listed = table("Directories", ["Directory", "#Files", "#Rows"], rows)
    listed += _left_out(files.more, "directories")
    return f"<section>{title}<p>{told}</p>{listed}{_scopes(files)}</section>"


def _scopes(files: TableFiles) -> str:
    shown = []
    for at, one in enumerate(files.scopes):
        columns = "".join(f"<li>{_text(name)} {_text(kind)}</li>" for name, kind in one.columns)
        shown.append(
            f'<details id="scope-{at}"><summary>{_text(one.scope or "the whole table")}: '
            f"{plural(len(one.columns), 'column')}, {plural(one.files, 'file')} with"
            f" {plural(one.versions, 'version')} of the schema</summary>"
            f"<ul>{columns}</ul></details>"
        )
    cut = _left_out(files.more_scopes, "scopes")
    return f"<h3>Columns</h3>{''.join(shown)}{cut}" if shown else ""


def _bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def _audit(report: Report | None) -> str:
    if report is None:
        return ""
    told = f"{verdict_sentence(report)}. The audit was made at {time_of(report.at)}"
    return (
        f'<section class="{report.verdict}"><h2>Last audit</h2><p>{told}.</p></section>'
        f"{picture(report)}"
    )


def _guarantee(subject: Subject) -> str:
    found = subject.guarantee
    if found is None:
        return ""
    limits = "".join(f"<li>{_text(one)}</li>" for one in found.ends)
    return (
        f"<section><h2>Guarantee: {escape(found.delivery.replace('_', ' '))}</h2>"
        f"<p>{_text(_sentence(found.means))}</p><p>{_text(_sentence(found.rejects))}</p>"
        f"<details><summary>Limits and reasons</summary><p>{_text(_sentence(found.why))}</p>"
        f"<ul>{limits}</ul></details></section>"
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# -- parts -----------------------------------------------------------------------------------------


def _lines(text: str) -> str:
    """A text of several lines."""
    return "\n".join(_text(line) for line in text.splitlines()) if text else "(empty)"


def _left_out(number: int, what: str, done: str = "listed") -> str:
    return f"<p class='note'>{number:,} more {what} are not {done}.</p>" if number > 0 else ""


def _n(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _clock(at: datetime) -> str:
    return f'<time datetime="{escape(at.isoformat())}">{at:%H:%M:%S} UTC</time>'
