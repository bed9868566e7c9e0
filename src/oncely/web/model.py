"""What the page and ``oncely top`` show of a pipeline: plain values, read from its own functions.

Every text that comes from a server, a record or an error is without the pipeline's secrets.

Readings go on while somebody looks, each in a thread of its own. A page never waits long for a
server: it shows the last reading, and its time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from oncely.core.claim import NO_RECORDS, Counts
from oncely.core.ranges import TopicPartition
from oncely.decode.avro_schema import arrow_schema_of
from oncely.decode.schema import type_name
from oncely.errors import OncelyError, by_reason, masked
from oncely.kafka.records import in_words
from oncely.pipeline import Pipeline
from oncely.pipeline.guarantee import Guarantee, guarantee_of
from oncely.pipeline.rejects import as_json
from oncely.pipeline.status import Judgement, Status, judge, unreadable
from oncely.secrets import Secrets, scope
from oncely.verify.reading import AMENDMENTS, COMMITS, GAP, HOLE, RESET, Entry, Ledger, read_ledger

T = TypeVar("T")

_LETTERS = 500  # dead letters that are read
_SAMPLES = 20  # of them for each reason
_LONGEST = 2_000  # characters of a value
_DIRECTORIES = 50
_SCOPES = 20
POINTS, LONGEST = 500, 86_400.0
"""Points of a line over time, and its seconds, at most."""


class Problem(NamedTuple):
    """Why something can't be read, and the way out."""

    message: str
    way_out: str = ""

    @classmethod
    def of(cls, error: OncelyError) -> Problem:
        """The problem of an error, on one line."""
        return cls(" ".join(" ".join([error.message, *error.details]).split()), error.way_out)


@dataclass(frozen=True)
class Subject:
    """A pipeline file.

    Attributes:
        name: the pipeline's name; of a file that can't be read, the file's name.
        file: the file.
        pipeline: None if the file can't be read.
        problem: why it can't be read.
    """

    name: str
    file: Path
    pipeline: Pipeline | None = None
    problem: Problem | None = None

    @property
    def guarantee(self) -> Guarantee | None:
        """The guarantee, from the settings alone."""
        return None if self.pipeline is None else guarantee_of(self.pipeline.settings)

    @property
    def route(self) -> str:
        """Source and destination in a few words."""
        if self.pipeline is None:
            return str(self.file)
        settings = self.pipeline.settings
        text = f"{', '.join(settings.source.topics)} → {settings.target}"
        return self.pipeline.secrets.redact(text)


class Point(NamedTuple):
    """What was read at a time.

    Attributes:
        at: Unix time.
        lag: the largest lag since the point before; None if it could not be read.
        per_second: offsets that positions moved, per second since the point before.
    """

    at: float
    lag: int | None
    per_second: float = 0.0


@dataclass(frozen=True)
class Overview:
    """The progress of a pipeline.

    Attributes:
        verdict: in words.
        status: the last that could be read; None if none could.
        problem: why it can't be read now.
        per_second: offsets that positions moved between the last two readings, per second.
        age: seconds since the status was read; 0 if it can be read now.
        still: seconds since a position was seen to move.
        at: the time of the last reading without a problem, or of the first one.
        points: lag and speed of the readings until now.
    """

    verdict: Judgement
    status: Status | None = None
    problem: Problem | None = None
    per_second: float | None = None
    age: float = 0.0
    still: float = field(default=0.0, compare=False)
    at: datetime = field(default_factory=lambda: datetime.now(UTC), compare=False)
    clock: float = field(default_factory=time.monotonic, compare=False)
    points: Sequence[Point] = field(default=(), compare=False)


class Span(NamedTuple):
    """Adjacent committed ranges of one epoch.

    Attributes:
        start, end: their offsets.
        kind: ``data``, ``hole``, ``gap``, ``undone`` or an amendment.
        epoch: the epoch that committed them.
        ranges: their number.
        counts: their counts.
    """

    start: int
    end: int
    kind: str
    epoch: int
    ranges: int = 1
    counts: Counts = NO_RECORDS


@dataclass(frozen=True)
class Lane:
    """The committed ranges of one topic-partition."""

    partition: TopicPartition
    position: int
    epoch: int
    spans: Sequence[Span]


@dataclass(frozen=True)
class Epoch:
    """What one run has done, as far as the history tells.

    Attributes:
        number: the epoch.
        first, last: the times of its first and last commit; None if they are not stored.
        counts: of the ranges in force.
        ranges: their number.
        partitions: those that it has committed to.
        holds: the partitions that it holds now.
        events: other steps: resets, gaps, replays, by name.
    """

    number: int
    first: datetime | None
    last: datetime | None
    counts: Counts
    ranges: int
    partitions: int
    holds: Sequence[TopicPartition]
    events: Mapping[str, int]


@dataclass(frozen=True)
class History:
    """The committed ranges by partition and by epoch."""

    lanes: Sequence[Lane]
    epochs: Sequence[Epoch]
    notes: Sequence[str] = ()

    @property
    def last_commit(self) -> datetime | None:
        """The time of the last commit; None if it is not stored."""
        return max((one.last for one in self.epochs if one.last), default=None)


class Letter(NamedTuple):
    """A dead letter, as text; the reason only if it differs from that of its group."""

    place: str
    reason: str | None
    time: datetime | None
    key: str | None
    value: str | None
    headers: Sequence[tuple[str, str | None]]


class Reason(NamedTuple):
    """Dead letters whose reasons differ in numbers and quoted values only, which are masked."""

    stage: str
    reason: str
    number: int
    letters: Sequence[Letter]


@dataclass(frozen=True)
class Letters:
    """The dead letters by reason, the most frequent first.

    Attributes:
        reasons: the groups.
        read: the number of those that are grouped.
        total: the number of all.
        no_replay: why they can't be replayed; None: they can.
        no_discard: why they can't be discarded; None: they can.
    """

    reasons: Sequence[Reason]
    read: int
    total: int
    no_replay: Problem | None = None
    no_discard: Problem | None = None


class ScopeColumns(NamedTuple):
    """The inferred columns of a scope.

    Attributes:
        scope: the values of the scope; empty: the whole table.
        files: the number of its files.
        versions: the number of schemas that its files were published with.
        columns: name and type.
    """

    scope: str
    files: int
    versions: int
    columns: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class TableFiles:
    """The files of a table.

    Attributes:
        files, rows, bytes: of the whole table.
        directories: directory, files and rows; the first ones.
        more: the number of directories that are left out.
        scopes: the columns of the first scopes.
        more_scopes: the number of scopes that are left out.
    """

    files: int
    rows: int
    bytes: int
    directories: Sequence[tuple[str, int, int]] = ()
    more: int = 0
    scopes: Sequence[ScopeColumns] = ()
    more_scopes: int = 0


@dataclass(frozen=True)
class Detail:
    """What only the page of one pipeline shows; each part is read by itself.

    Attributes:
        history, letters, files: the last that could be read; None if none could.
        problems: why parts can't be read now.
        at: the time at which the oldest part was read.
    """

    history: History | None = None
    letters: Letters | None = None
    files: TableFiles | None = None
    problems: Sequence[Problem] = ()
    at: datetime = field(default_factory=lambda: datetime.now(UTC), compare=False)


# -- reading ---------------------------------------------------------------------------------------


def overview(subject: Subject, before: Overview | None = None) -> Overview:
    """Read the progress; never raises.

    Args:
        subject: the pipeline.
        before: the reading before, for the speed, and for what can't be read now.
    """
    found: Status | Problem = subject.problem or Problem("the file can't be read")
    if subject.pipeline is not None:
        found = tried(subject.pipeline, subject.pipeline.status)
    if isinstance(found, Problem):
        new = Overview(unreadable(found.message), problem=found)
        now = before if before is not None and before.status is not None else new
        age = new.clock - now.clock
        now = replace(now, verdict=new.verdict, problem=found, age=age, per_second=None)
    else:
        now = judged(Overview(found.judgement, found), before)
    lag = now.status.lag if now.status is not None and now.problem is None else None
    point = Point(time.time(), lag, now.per_second or 0.0)
    return replace(now, points=extended(before.points if before else (), point))


def judged(now: Overview, before: Overview | None) -> Overview:
    """The reading with its speed and its verdict."""
    if now.status is None:
        return now
    per_second, still = None, 0.0
    if before is not None and before.status is not None:
        passed = max(now.clock - before.clock, 1e-9)
        moved = _moved(before.status, now.status)
        per_second = moved / passed
        still = 0.0 if moved or now.status.epoch != before.status.epoch else before.still + passed
    verdict = judge(now.status, still)
    return replace(now, per_second=per_second, still=still, verdict=verdict)


def extended(points: Sequence[Point], new: Point) -> Sequence[Point]:
    """The line with one more point; of too many, the two that are closest to each other are one."""
    line = [*(one for one in points if one.at > new.at - LONGEST), new]
    if len(line) > POINTS:
        n = min(range(1, len(line) - 1), key=lambda n: line[n + 1].at - line[n - 1].at)
        start, first, second = line[n - 1].at, line[n], line[n + 1]
        lag = None if None in (first.lag, second.lag) else max(first.lag or 0, second.lag or 0)
        moved = first.per_second * (first.at - start) + second.per_second * (second.at - first.at)
        line[n : n + 2] = [Point(second.at, lag, moved / (second.at - start))]
    return line


def _moved(before: Status, now: Status) -> int:
    old = {(one.topic, one.partition): one.position for one in before.partitions}
    pairs = ((old.get((one.topic, one.partition)), one.position) for one in now.partitions)
    return sum(abs(new - at) for at, new in pairs if at is not None and new is not None)


def detail(subject: Subject, before: Detail | None = None) -> Detail:
    """Read history, dead letters and files; never raises. What can't be read is as before."""
    pipeline = subject.pipeline
    if pipeline is None:
        return Detail(problems=[subject.problem or Problem("the file can't be read")])
    redact = pipeline.secrets.redact
    parts: dict[str, Any] = {
        "history": tried(pipeline, lambda: history_of(read_ledger(pipeline.settings), redact)),
        "letters": tried(pipeline, lambda: _letters(pipeline)),
    }
    if (listed := pipeline.kind.listed) is not None:
        parts["files"] = tried(pipeline, lambda: files_of(listed(pipeline), redact))
    problems = tuple(dict.fromkeys(one for one in parts.values() if isinstance(one, Problem)))
    known = {name: one for name, one in parts.items() if not isinstance(one, Problem)}
    kept = before if before is not None and problems else Detail()
    return replace(kept, **known, problems=problems)


def tried(pipeline: Pipeline, read: Callable[[], T]) -> T | Problem:
    """The value, or why there is none, without secrets."""
    secrets = pipeline.secrets
    with scope(secrets):
        try:
            return read()
        except OncelyError as error:
            error.hide(secrets)
            return Problem.of(error)
        except Exception as error:  # a page shows the other parts and pipelines
            return Problem(secrets.redact(f"unexpected {type(error).__name__}: {error}"))


# -- the history -----------------------------------------------------------------------------------


def history_of(ledger: Ledger, redact: Callable[[str], str] = str) -> History:
    """The history of a ledger by partition and by epoch."""
    partitions = sorted({*ledger.positions, *(one.partition for one in ledger.history)})
    notes = [redact(text) for text in (*ledger.problems, *ledger.unknown)]
    return History(
        [_lane(tp, ledger) for tp in partitions], _epochs(ledger), tuple(notes)
    )  # fmt: skip


def _lane(tp: TopicPartition, ledger: Ledger) -> Lane:
    held = ledger.positions.get(tp)
    entries = [one for one in ledger.of(tp) if one.kind in COMMITS | AMENDMENTS]
    position = held.position if held else max((one.end for one in entries), default=0)
    cut = _cut_by_resets(ledger, tp, position)
    parts = [part for one in entries for part in _parts(one, cut(one)) if part.end > part.start]
    drawn: list[Span] = []
    last: dict[tuple[str, int], int] = {}  # of each kind and epoch: where it is in the list
    for one in sorted(parts, key=_order):
        at = last.get((one.kind, one.epoch))
        if at is not None and drawn[at].end == one.start:
            ranges, counts = drawn[at].ranges + 1, drawn[at].counts + one.counts
            drawn[at] = drawn[at]._replace(end=one.end, ranges=ranges, counts=counts)
        else:
            last[one.kind, one.epoch] = len(drawn)
            drawn.append(one)
    drawn.sort(key=_order)
    return Lane(tp, position, held.epoch if held else 0, drawn)


def _order(one: Span) -> tuple[int, int, str, int]:
    return one[:4]


def _parts(one: Entry, cut: int) -> list[Span]:
    """The part that counts, and the part from ``cut`` on, which a reset has undone."""
    counts = one.counts or NO_RECORDS
    if cut >= one.end:
        return [Span(one.start, one.end, _kind(one), one.epoch, 1, counts)]
    at = max(cut, one.start)
    kept = Span(one.start, at, _kind(one), one.epoch)
    return [kept, Span(at, one.end, "undone", one.epoch, 1, counts)]


def _kind(one: Entry) -> str:
    return one.kind if one.kind in (HOLE, GAP) or one.kind in AMENDMENTS else "data"


def _cut_by_resets(ledger: Ledger, tp: TopicPartition, position: int) -> Callable[[Entry], int]:
    """The offset from which on a reset has undone an entry; its end if none has.

    A range that a reset has marked counts up to the reset's position. That is not stored in tables:
    it is where later epochs have begun. In a log of moves nothing is marked, and resets are stored.
    """
    entries = ledger.of(tp)
    resets = dict(ledger.resets.get(tp, {}))
    resets |= {one.epoch: one.start for one in entries if one.kind == RESET}

    def cut(one: Entry) -> int:
        if one.superseded:
            later = (e.start for e in entries if e.epoch > one.superseded and e.kind in COMMITS)
            return min(later, default=position)
        return min((at for epoch, at in resets.items() if epoch > one.epoch), default=one.end)

    return cut


def _epochs(ledger: Ledger) -> list[Epoch]:
    holds: dict[int, list[TopicPartition]] = {}
    for tp, held in sorted(ledger.positions.items()):
        holds.setdefault(held.epoch, []).append(tp)
    by_epoch: dict[int, list[Entry]] = {number: [] for number in holds}
    for one in ledger.history:
        by_epoch.setdefault(one.epoch, []).append(one)
    resets = {one.superseded for one in ledger.history if one.superseded}
    resets |= {epoch for own in ledger.resets.values() for epoch in own}
    numbers = sorted({*by_epoch, *resets}, reverse=True)
    return [_epoch(n, by_epoch.get(n, ()), holds, reset=n in resets) for n in numbers]


def _epoch(
    number: int,
    entries: Sequence[Entry],
    holds: Mapping[int, Sequence[TopicPartition]],
    *,
    reset: bool,
) -> Epoch:
    times = sorted(one.at for one in entries if one.at is not None)
    commits = [one for one in entries if one.kind in COMMITS and not one.superseded]
    events = Counter(one.kind for one in entries if one.kind in {GAP, *AMENDMENTS})
    if reset or any(one.kind == RESET for one in entries):
        events["reset"] = 1
    events["undone range"] = sum(1 for one in entries if one.superseded)
    return Epoch(
        number,
        times[0] if times else None,
        times[-1] if times else None,
        sum((one.counts for one in commits if one.counts), NO_RECORDS),
        len(commits),
        len({one.partition for one in commits}),
        tuple(holds.get(number, ())),
        +events,
    )


# -- dead letters and files ------------------------------------------------------------------------


def _letters(pipeline: Pipeline) -> Letters:
    found = as_json(pipeline.rejects(_LETTERS))
    letters = grouped(found["rejects"], found["total"], pipeline.secrets)
    if not letters.total:
        return letters
    to = pipeline.destination
    found_out = [tried(pipeline, check) for check in (to.check_replay, to.discarding)]
    no_replay, no_discard = (one if isinstance(one, Problem) else None for one in found_out)
    return replace(letters, no_replay=no_replay, no_discard=no_discard)


def grouped(found: Iterable[Mapping[str, Any]], total: int, secrets: Secrets) -> Letters:
    """Dead letters, in the form of ``oncely rejects list --json``, by reason."""
    # Secrets are redacted before a reason is masked: a part of a secret is not recognised.
    listed = [{**one, "reason": secrets.redact(one["reason"])} for one in found]
    reasons = []
    for own in by_reason([one["reason"] for one in listed]):
        letters = [listed[at] for at in own]
        shared = {one["reason"] for one in letters}
        reason = shared.pop() if len(shared) == 1 else masked(letters[0]["reason"])
        shown = [_letter(one, reason, secrets) for one in letters[:_SAMPLES]]
        reasons.append(Reason(letters[0]["stage"], reason, len(letters), shown))
    return Letters(reasons, len(listed), total)


def _letter(one: Mapping[str, Any], reason: str, secrets: Secrets) -> Letter:
    def text(value: Any) -> str | None:
        if (shown := in_words(value)) is None:
            return None
        shown = secrets.redact(shown)  # before it is cut: a part of a secret is not recognised
        return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"

    at = one["timestamp_ms"]
    return Letter(
        f"{one['topic']}-{one['partition']}@{one['offset']}",
        None if one["reason"] == reason else one["reason"],
        None if at is None else _time(at),
        text(one["key"]),
        text(one["value"]),
        [(str(text(name)), text(value)) for name, value in one["headers"]],
    )


def _time(timestamp_ms: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # any 64 bits may be a timestamp
        return None


def files_of(contents: Any, redact: Callable[[str], str] = str) -> TableFiles:
    """The files of a table, and the columns of its scopes, as
    :attr:`oncely.kinds.kind.Kind.listed` tells them."""
    files = contents.files.values()
    number, rows = Counter[str](), Counter[str]()
    for one in files:
        directory = one.path.rpartition("/")[0] or "."
        number[directory] += 1
        rows[directory] += one.rows
    of_scope = Counter(one.scope for one in files)
    versions = {(one.scope, one.schema) for one in files}
    scopes = [
        ScopeColumns(
            redact(", ".join("no value" if part is None else part for part in scope)),
            of_scope[scope],
            sum(1 for other, _ in versions if other == scope),
            [(redact(one.name), type_name(one.type)) for one in arrow_schema_of(published.avro)],
        )
        for scope, published in list(contents.schemas.items())[:_SCOPES]
    ]
    names = sorted(number)
    return TableFiles(
        len(files),
        sum(one.rows for one in files),
        sum(one.bytes for one in files),
        [(redact(name), number[name], rows[name]) for name in names[:_DIRECTORIES]],
        max(0, len(names) - _DIRECTORIES),
        scopes,
        max(0, len(contents.schemas) - _SCOPES),
    )


# -- readings while somebody looks ----------------------------------------------------------

_KEEP = 30.0  # seconds without a look after which nobody looks
_UNSEEN = 60.0  # seconds between two readings of an overview while nobody looks


class Reading(Generic[T]):
    """A value that is read again at an interval, from the first look at it on.

    Args:
        read: reads; gets the value before.
        every: seconds between two readings.
        unseen: the same while nobody looks; None: the reading ends then, until the next look.

    Attributes:
        version: grows with each reading that has another value.
    """

    def __init__(
        self, read: Callable[[T | None], T], every: float, unseen: float | None = None
    ) -> None:
        self._read, self._every, self._unseen = read, every, unseen
        self._changed = threading.Condition()
        self._value: T | None = None
        self._at = self._looked = float("-inf")
        self._thread: threading.Thread | None = None
        self._hurry = self._closed = self._slow = False
        self.version = 0

    def get(self, wait: float = 0.0) -> T | None:
        """The last value; None if there is none after ``wait`` seconds."""
        with self._changed:
            self._looked = time.monotonic()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._go, name="reading", daemon=True)
                self._thread.start()
            oldest = self._looked - 3 * self._every
            self._hurry |= self._slow
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._at >= oldest or self._closed, wait)
            return self._value

    def hurry(self) -> None:
        """Read again now."""
        with self._changed:
            self._hurry, self._at = True, float("-inf")
            self._changed.notify_all()

    def close(self) -> None:
        """End after the reading in hand."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _go(self) -> None:
        while True:
            value = self._read(self._value)
            with self._changed:
                self.version += value != self._value
                self._value, self._at = value, time.monotonic()
                self._changed.notify_all()
                self._slow = self._at - self._looked > max(_KEEP, 3 * self._every)
                pause = self._unseen if self._slow else self._every
                if pause is not None:
                    self._changed.wait_for(lambda: self._hurry or self._closed, pause)
                self._hurry = False
                if self._closed or pause is None:
                    self._thread, self._slow = None, False
                    return


@dataclass
class Watched:
    """A pipeline and its readings.

    Attributes:
        subject: the pipeline.
        every: seconds between two readings of the overview; the rest is read half as often. While
            nobody looks, the overview is read once a minute, for the line of lag and speed.
    """

    subject: Subject
    every: float = 5.0
    overview: Reading[Overview] = field(init=False)
    detail: Reading[Detail] = field(init=False)

    def __post_init__(self) -> None:
        self.overview = Reading(partial(overview, self.subject), self.every, _UNSEEN)
        self.detail = Reading(partial(detail, self.subject), 2 * self.every)

    def hurry(self) -> None:
        """Read again now: something was changed."""
        self.overview.hurry()
        self.detail.hurry()

    def close(self) -> None:
        """End the readings."""
        self.overview.close()
        self.detail.close()
