"""Readers: the ledger of a pipeline, of any kind of sink, as the values of the check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from oncely.audit.stored import delta_document as delta
from oncely.audit.stored import manifest as manifests
from oncely.audit.stored import sql_ledger, topic_ledger
from oncely.audit.stored.log import Topics
from oncely.clients.files.store import NoSuchFile, Store
from oncely.clients.sql.dialects import dialect_for
from oncely.config import (
    DeltaSinkSettings,
    FilesSinkSettings,
    HandlersSinkSettings,
    KafkaSinkSettings,
    PipelineSettings,
    SqlSinkSettings,
)
from oncely.core.claim import Counts
from oncely.core.ranges import TopicPartition
from oncely.errors import TableMismatch
from oncely.verify.state import RESET, TAKEN, Entry, Files, Held, Ledger, NamedFile, Rules

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
    sink = settings.sink
    if isinstance(sink, SqlSinkSettings | HandlersSinkSettings):
        found = _of_sql(settings, sink)
    elif isinstance(sink, DeltaSinkSettings):
        found = _of_delta(settings, sink)
    else:
        found = _of_topic(settings, sink)
    if found is None:
        return Ledger(settings.name, unknown=["nothing is stored: the pipeline has never run"])
    return found


# -- SQL -------------------------------------------------------------------------------------------


def _of_sql(
    settings: PipelineSettings, sink: SqlSinkSettings | HandlersSinkSettings
) -> Ledger | None:
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


def _of_topic(
    settings: PipelineSettings, sink: KafkaSinkSettings | FilesSinkSettings
) -> Ledger | None:
    source, name = settings.source, settings.name
    with Topics(source.brokers, source.kafka_properties(), group=settings.group) as topics:
        # Before the ledger: what is published by then lies below its positions.
        manifest = None
        if isinstance(sink, FilesSinkSettings):
            manifest = manifests.read_manifest(topics, sink.manifest_topic)
        found = topic_ledger.read_ledger(topics, sink.ledger_topic, name)
    if found.pipeline is None and not found.problems and not found.positions:
        return None
    problems = [f"{sink.ledger_topic}:{at}: {why}" for at, why in found.problems]
    files = None
    if manifest is not None and isinstance(sink, FilesSinkSettings):
        problems += [f"{sink.manifest_topic}:{at}: {why}" for at, why in manifest.problems]
        if manifest.first:
            problems.append(
                f"{sink.manifest_topic} begins at offset {manifest.first}: entries were deleted"
            )
        files = _files(manifest, sink.store)
    epochs = [one.epoch for one in found.positions.values()]
    return Ledger(
        name,
        max([found.pipeline.epoch if found.pipeline else 0, *epochs]),
        {tp: Held(one.position, one.epoch) for tp, one in found.positions.items()},
        list(_steps(found)),
        moves=True,
        complete=False,
        resets=found.resets,
        files=files,
        problems=problems,
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


def _of_delta(settings: PipelineSettings, sink: DeltaSinkSettings) -> Ledger | None:
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
