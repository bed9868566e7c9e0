"""Readers: the ledger of a pipeline, of any kind of sink, as the values of the check.

The values are the ledger of one pipeline, and its files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from oncely.audit.stored import delta_document as delta
from oncely.audit.stored import manifest as manifests
from oncely.audit.stored import sql_ledger, topic_ledger
from oncely.audit.stored.log import Topics
from oncely.config import PipelineSettings
from oncely.core.claim import NO_RECORDS, SKIPPED, Counts
from oncely.core.ranges import OffsetRange, Position, TopicPartition, grouped, normalize
from oncely.errors import ConfigError, TableMismatch
from oncely.stores.objects.store import NoSuchFile, Store
from oncely.stores.sql.dialects import dialect_for

DATA = "data"
HOLE = "hole"
GAP = "gap"
JOINED = "joined"
AHEAD = "ahead"
"""Committed while the position was before it: its epoch may be older than those before it."""
TAKEN = "taken"
"""The position got another epoch and was not moved."""
RESET = "reset"
COMMITS = frozenset({DATA, HOLE, GAP, JOINED, AHEAD})
MOVES = frozenset({*COMMITS, SKIPPED, TAKEN, RESET})
AMENDMENTS = frozenset({"replay", "repair", "backfill"})
"""Later changes within ranges that were committed before; no position depends on them."""


AROUND = 3
"""Entries that are shown before and after a broken one."""


@dataclass(frozen=True)
class Entry:
    """An entry of the history: a committed range, or a change of a position without one.

    Attributes:
        partition: the topic-partition.
        start, end: its offsets; they may be invalid.
        epoch: the run that wrote it.
        kind: as stored.
        counts: None if they are not stored.
        superseded: the epoch of the reset that has undone it; 0 if it counts.
        at: when it was written, by the clock of the store.
        letters: the dead letters within it; None if they are not counted.
        place: where it is stored.
    """

    partition: TopicPartition
    start: int
    end: int
    epoch: int
    kind: str = DATA
    counts: Counts | None = NO_RECORDS
    superseded: int = 0
    at: datetime | None = None
    letters: int | None = None
    place: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Epoch and offset."""
        return self.epoch, self.start

    def covers(self, start: int, end: int) -> bool:
        """True if the offsets are within the entry."""
        return self.start <= start and end <= self.end

    def __str__(self) -> str:
        said = [f"{self.partition} [{self.start}, {self.end}) {self.kind} by epoch {self.epoch}"]
        if self.counts is not None and self.kind in COMMITS:
            c = self.counts
            said.append(
                f"{c.records} records, {c.rows} rows, {c.rejects} rejects, {c.filtered} filtered"
            )
        if self.superseded:
            said.append(f"superseded by the reset of epoch {self.superseded}")
        if self.at is not None:
            said.append(f"at {self.at.isoformat()}")
        if self.place:
            said.append(self.place)
        return ", ".join(said)


def shown(entries: Sequence[Entry], at: int) -> tuple[str, ...]:
    """The entries around an index."""
    return tuple(str(one) for one in entries[max(0, at - AROUND) : at + AROUND])


class Covered:
    """The offsets that ranges cover, in an order in which they are found by bisection."""

    def __init__(self, ranges: Iterable[OffsetRange]) -> None:
        self._ranges = normalize(ranges)

    def lacks(self, one: OffsetRange) -> tuple[OffsetRange, ...]:
        """The offsets of a range that none of them covers: disjoint, ascending, never empty."""
        first = bisect_right(self._ranges, one.start, key=lambda it: it.end)
        end = bisect_left(self._ranges, one.end, first, key=lambda it: it.start)
        return one.minus(self._ranges[first:end])


class Held(NamedTuple):
    """A position, and the epoch that holds it."""

    position: Position
    epoch: int


@dataclass(frozen=True)
class NamedFile:
    """A file that belongs to the table.

    Attributes:
        path: below the root.
        bytes: its size; None if it is not stored.
        ranges: the offsets that contain all of its records.
        epoch, batch: its publisher.
        batched: False if it contains replayed dead letters, or rows of other files.
    """

    path: str
    bytes: int | None = None
    ranges: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0
    batched: bool = False


@dataclass(frozen=True)
class Files:
    """The files of a table, and those that are stored.

    Attributes:
        named: the files of the table.
        stored: the files below the root, path to size.
        again: paths that were named more than once.
    """

    named: Sequence[NamedFile] = ()
    stored: Mapping[str, int] = field(default_factory=dict)
    again: Sequence[str] = ()


@dataclass(frozen=True)
class Ledger:
    """The ledger of one pipeline.

    Attributes:
        pipeline: its name.
        epoch: the last epoch that was given out.
        positions: position and epoch of each partition.
        history: the entries; of a partition in the order of the store.
        moves: True: the entries are the changes of the positions in the order of time, as in a log.
            False: the ranges in force, and superseded ones, in any order.
        complete: no entry is missing, from the start of each partition on.
        resets: the epoch of each reset, and the position that it has set.
        stray: dead letters that are in no range in force: partition and offset.
        files: the files of the table; None if rows are not in files.
        problems: stored values that are invalid.
        unknown: reasons for which something can't be decided.
    """

    pipeline: str
    epoch: int = 0
    positions: Mapping[TopicPartition, Held] = field(default_factory=dict)
    history: Sequence[Entry] = ()
    moves: bool = False
    complete: bool = True
    resets: Mapping[TopicPartition, Mapping[int, Position]] = field(default_factory=dict)
    stray: Sequence[tuple[TopicPartition, int]] = ()
    files: Files | None = None
    problems: Sequence[str] = ()
    unknown: Sequence[str] = ()

    def of(self, tp: TopicPartition) -> list[Entry]:
        """The entries of a partition."""
        return self._by_partition.get(tp, [])

    @cached_property
    def digested(self) -> frozenset[int]:
        """The epochs whose runs have stored digests of rows."""
        counted = ((one.epoch, one.counts) for one in self.history if one.kind in COMMITS)
        return frozenset(at for at, c in counted if c and c.rows > 0 and c.digest is not None)

    @cached_property
    def _by_partition(self) -> dict[TopicPartition, list[Entry]]:
        return grouped((one.partition, one) for one in self.history)


@dataclass(frozen=True)
class Rules:
    """What follows from the settings of the pipeline.

    Attributes:
        timed: positions move on a timer, independent of the records.
        counted: the ledger's counts are those of the written records.
        mixed: a Spark transform mixes the records: rows belong to no range.
        one_row: each record that is neither rejected nor filtered has exactly one row.
    """

    timed: bool = False
    counted: bool = True
    mixed: bool = False
    one_row: bool = False


_OWN = ("_oncely/", "_READ_THE_MANIFEST.txt", "_delta_log/", ".oncely-probe-")


def rules_of(settings: PipelineSettings) -> Rules:
    """The rules of a pipeline."""
    return Rules(
        timed=settings.delivery == "none",
        counted=settings.delivery in ("exactly_once", "at_least_once"),
        mixed=settings.by_spark,
        one_row=settings.transform is None,
    )


def read_ledger(settings: PipelineSettings) -> Ledger:
    """The ledger of a pipeline, read now.

    Raises:
        WrongInput: a server refuses the login.
        Unavailable: a server does not answer.
    """
    if settings.offsets.store != "ledger":
        store = settings.offsets.store
        reason = f'positions are in the store "{store}", which keeps no history'
        return Ledger(settings.name, unknown=[reason])
    kind = settings.sink.kind
    if kind not in _READERS:
        way_out = f"the ledgers of {', '.join(_READERS)} can be verified"
        raise ConfigError("sink.kind", f"nothing can read the ledger of {kind}", way_out=way_out)
    found = _READERS[kind](settings)
    if found is None:
        return Ledger(settings.name, unknown=["nothing is stored: the pipeline has never run"])
    return found


# -- SQL -------------------------------------------------------------------------------------------


def _of_sql(settings: PipelineSettings) -> Ledger | None:
    sink: Any = settings.sink
    dialect = dialect_for(sink.url.get_secret_value(), sink.connect_timeout)
    try:
        with sql_ledger.open_ledger(dialect, sink.table, settings.name) as tables:
            return of_tables(tables)
    except TableMismatch:  # a database file that does not exist
        return None


def of_tables(tables: sql_ledger.LedgerTables) -> Ledger | None:
    """The ledger of open tables; None if the pipeline has never run."""
    registered = None if tables.missing(tables.all[1:]) else tables.registered()
    if registered is None:
        return None
    letters = tables.letters()
    runs: dict[int, set[str]] = {}
    for epoch, run in tables.runs():
        runs.setdefault(epoch, set()).add(run)
    return Ledger(
        tables.pipeline,
        registered[1],
        {tp: Held(one.position, one.epoch) for tp, one in tables.held().items()},
        [
            *(_entry(one, letters) for one in tables.entries(sql_ledger.RANGES)),
            *(_entry(one, {}) for one in tables.entries(sql_ledger.AMENDMENTS)),
        ],
        stray=tables.stray(),
        problems=[
            f"epoch {epoch} was given to one run, and {len(own)} have it: the epoch of a position"
            " was changed"
            for epoch, own in sorted(runs.items())
            if len(own) > 1
        ],
    )


def _entry(
    one: sql_ledger.RangeRow, letters: Mapping[tuple[TopicPartition, int, int], int]
) -> Entry:
    return Entry(
        one.partition, one.start, one.end, one.epoch, one.kind, one.counts,
        one.superseded, one.at, letters.get((one.partition, one.start, one.epoch), 0),
    )  # fmt: skip


# -- topics ----------------------------------------------------------------------------------------


def _of_topic(settings: PipelineSettings) -> Ledger | None:
    sink: Any = settings.sink
    with _topics(settings) as topics:
        found = topic_ledger.read_ledger(topics, sink.ledger_topic, settings.name)
    return _of_messages(settings.name, found, sink.ledger_topic)


def _of_files(settings: PipelineSettings) -> Ledger | None:
    sink: Any = settings.sink
    with _topics(settings) as topics:
        # Before the ledger: what is published by then lies below its positions.
        manifest = manifests.read_manifest(topics, sink.manifest_topic)
        found = topic_ledger.read_ledger(topics, sink.ledger_topic, settings.name)
    ledger = _of_messages(settings.name, found, sink.ledger_topic)
    if ledger is None:
        return None
    problems = [f"{sink.manifest_topic}:{at}: {why}" for at, why in manifest.problems]
    if manifest.first:
        problems.append(
            f"{sink.manifest_topic} begins at offset {manifest.first}: entries were deleted"
        )
    files = _files(manifest, sink.store)
    return replace(ledger, files=files, problems=[*ledger.problems, *problems])


def _topics(settings: PipelineSettings) -> Topics:
    source = settings.source
    return Topics(source.brokers, source.kafka_properties(), group=settings.group)


def _of_messages(
    pipeline: str, found: topic_ledger.TopicLedger, ledger_topic: str
) -> Ledger | None:
    if found.pipeline is None and not found.problems and not found.positions:
        return None
    epochs = [one.epoch for one in found.positions.values()]
    return Ledger(
        pipeline,
        max([found.pipeline.epoch if found.pipeline else 0, *epochs]),
        {tp: Held(one.position, one.epoch) for tp, one in found.positions.items()},
        list(_steps(found)),
        moves=True,
        complete=False,
        resets=found.resets,
        problems=[f"{ledger_topic}:{at}: {why}" for at, why in found.problems],
    )


def _steps(found: topic_ledger.TopicLedger) -> Iterator[Entry]:
    for message in found.messages:
        tp, one = message.partition, message.entry
        if tp is None or not isinstance(one, topic_ledger.PositionEntry):
            continue
        counts = Counts(one.records, one.rows, one.rejects, one.filtered)
        place = f"ledger topic, offset {message.offset}"
        yield Entry(tp, one.start, one.end, one.epoch, one.kind, counts, place=place)


def _files(manifest: manifests.Manifest, store: Store) -> Files:
    named = [
        NamedFile(
            one.path,
            one.bytes,
            _whole({(part.of, (part.start, part.end)) for part in one.ranges}),
            one.epoch,
            one.batch,
            batched=not one.is_replayed and not one.replaces,
        )
        for one in manifest.files.values()
    ]
    return Files(named, _stored(store), manifest.again)


def _whole(
    ranges: set[tuple[TopicPartition, tuple[int, int]]],
) -> dict[TopicPartition, tuple[int, int]]:
    whole: dict[TopicPartition, tuple[int, int]] = {}
    for tp, (start, end) in ranges:
        known = whole.get(tp, (start, end))
        whole[tp] = min(start, known[0]), max(end, known[1])
    return whole


def _stored(store: Store) -> dict[str, int]:
    return {one.path: one.bytes for one in store.list() if not one.path.startswith(_OWN)}


# -- Delta -----------------------------------------------------------------------------------------


def _of_delta(settings: PipelineSettings) -> Ledger | None:
    sink: Any = settings.sink
    name, store = settings.name, sink.store
    app = f"oncely/{name}"
    commits = delta.read_commits(store)
    ours = [(one, told) for one in commits if (told := one.told_by(name)) is not None]
    if not ours:
        numbers = delta.document_numbers(store, name)
        reason = "the table's log no longer contains a commit of the pipeline"
        return Ledger(name, unknown=[reason]) if numbers else None
    counts = [one.transactions[app] >> 32 for one, _ in ours]
    problems = [
        f"version {ours[at][0].version}: the pipeline's commit {other} follows its commit {one}"
        for at, (one, other) in enumerate(pairwise(counts), 1)
        if other != one + 1
    ]
    last, told = ours[-1]
    positions = last.tree(name, "positions")
    problems += _document_problems(store, name, last.transactions[app], positions)
    epoch = int(told.get("epoch", 0))
    entries = [entry for one, said in ours for entry in _changes(one, name, said)]
    return Ledger(
        name,
        epoch,
        {tp: Held(at, epoch) for tp, at in positions.items()},
        entries,
        moves=True,
        complete=counts[0] == 1,
        files=_added(commits, store),
        problems=problems,
    )


def _changes(one: delta.DeltaCommit, name: str, told: Mapping[str, Any]) -> Iterator[Entry]:
    kind, epoch, place = str(told.get("kind")), told.get("epoch", 0), f"version {one.version}"
    ranges = one.tree(name, "ranges")
    for tp, at in one.tree(name, "positions").items():
        if tp in ranges:
            start, end = ranges[tp]
            yield Entry(tp, start, end, epoch, kind, None, place=place)
        else:
            moved = RESET if kind == "reset" else TAKEN
            yield Entry(tp, at, at, epoch, moved, None, place=place)


def _document_problems(
    store: Store, name: str, number: int, positions: Mapping[TopicPartition, int]
) -> list[str]:
    try:
        document = delta.read_document(store, name, number)
    except (NoSuchFile, ValueError) as error:
        return [f"the ledger document {number} can't be read: {error}"]
    if delta.positions_of(document) != positions:
        return [f"the ledger document {number} has other positions than its commit"]
    return []


def _added(commits: Sequence[delta.DeltaCommit], store: Store) -> Files:
    """The files that the versions in the log have added and not removed."""
    live: dict[str, int | None] = {}
    again = []
    for commit in commits:
        for one in commit.removed:
            live.pop(one.path, None)
        for one in commit.added:
            if one.path in live and one.changes_data and one.vector is None:
                again.append(one.path)
            live[one.path] = one.bytes
    named = [NamedFile(path, size) for path, size in live.items() if "://" not in path]
    return Files(named, _stored(store), again)


_READERS: Mapping[str, Callable[[PipelineSettings], Ledger | None]] = {
    "sql": _of_sql,
    "kafka": _of_topic,
    "files": _of_files,
    "delta": _of_delta,
    "handlers": _of_sql,
}
"""By the kind of the destination."""
