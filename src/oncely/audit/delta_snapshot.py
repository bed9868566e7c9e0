"""One version of a Delta table, the document that this version names, and the log.

The table's history tells which commits of a pipeline its files come from, and which foreign commits
have taken rows away.

A file's origins are the pipeline's commits whose rows it may contain: the commit that added it, or
the origins of all files that the commit has rewritten which added it. A commit that only rewrites
files (OPTIMIZE) changes no row. Any other commit of another writer that removes files of these
origins is named with the rows that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from oncely.audit.evidence import Committed, Span, moment
from oncely.audit.layout import skips
from oncely.audit.stored.delta_document import (
    DeltaCommit,
    DeltaDocument,
    FileAction,
    positions_of,
    read_commits,
    read_document,
    read_letters,
)
from oncely.audit.stored.manifest import Unreadable, rows_of
from oncely.audit.stored.topic_ledger import Letter
from oncely.core.claim import NO_RECORDS, Counts
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition, cut, from_tree
from oncely.errors import SourceMismatch, Stopped, Unavailable
from oncely.stores.delta import DeltaConnect, connect, named_sizes, of_content
from oncely.stores.objects.store import NoSuchFile, Store
from oncely.stores.sql.claims import Claim

OTHERS = -1
"""Among a file's origins: it may also contain rows of other writers, or of commits that the log no
longer contains."""

_USER = ("userMetadata", "userName", "engineInfo")


@dataclass(frozen=True)
class Blame:
    """A foreign commit that has changed rows of the pipeline.

    Attributes:
        commit: the version.
        origins: the versions whose rows it has changed.
        removed, added: rows in the files that it removed and added; None if the log lacks them.
    """

    commit: DeltaCommit
    origins: frozenset[int]
    removed: int | None
    added: int | None

    @property
    def text(self) -> str:
        """Version, operation, time and user of the commit, and its rows."""
        at = self.commit.at_ms
        when = "" if at is None else f" of {moment(at).isoformat()}"
        given = {name: self.commit.info.get(name) for name in _USER}
        by = "".join(f", {name} {one!r}" for name, one in given.items() if one)
        what = self.commit.operation or "a commit"
        rows = f"{_rows(self.removed)} removed, {_rows(self.added)} added"
        return f"version {self.commit.version}, {what}{when}{by}: {rows}"


@dataclass
class TableHistory:
    """Replays the log of a table for one pipeline.

    Attributes:
        pipeline: the pipeline's name.
        commits: the versions that the log still contains, ascending.
        live: the files of the table now, and the commits that they come from.
        blames: the foreign commits that have changed rows.
        rows: by version, the number of rows that a commit of the pipeline has added; None if the
            log lacks it.
        replayed: by version, the rows that replays of its dead letters have added.
        backfilled: the pipeline has backfilled records: the ledger's totals tell of them.
        foreign: files that other writers have added, and that replaced no file of the pipeline.
        counted: the rows of each file that the log contains, without those that are deleted.
        letters: by file of dead letters, the commits whose records were rejected.
    """

    pipeline: str
    commits: Sequence[DeltaCommit]
    live: dict[str, frozenset[int]] = field(default_factory=dict)
    blames: list[Blame] = field(default_factory=list)
    rows: dict[int, int | None] = field(default_factory=dict)
    replayed: dict[int, int] = field(default_factory=dict)
    backfilled: bool = False
    foreign: set[str] = field(default_factory=set)
    letters: dict[str, frozenset[int]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for commit in self.commits:
            self._take(commit)

    @property
    def is_whole(self) -> bool:
        """True if the log contains the table's first version."""
        return bool(self.commits) and self.commits[0].version == 0

    @property
    def ours(self) -> list[int]:
        """The commits of the pipeline that have moved positions over offsets."""
        return [one.version for one in self.commits if self._spans[one.version]]

    def spans(self, version: int) -> tuple[Span, ...]:
        """The offsets that a commit of the pipeline has moved positions over."""
        return self._spans[version]

    def counts(self, version: int) -> dict[TopicPartition, Counts]:
        """The counts and digests of a commit's ranges."""
        counts = self._commits[version].tree(self.pipeline, "counts")
        return {tp: _counts(told) for tp, told in counts.items()}

    def started(self) -> dict[TopicPartition, Position]:
        """The positions at which partitions began, as far as the log shows."""
        found: dict[TopicPartition, Position] = {}
        for commit in self.commits:
            for tp, at in commit.tree(self.pipeline, "positions").items():
                found.setdefault(tp, self._first_start(commit, tp, at))
        return found

    def _first_start(self, commit: DeltaCommit, tp: TopicPartition, at: Position) -> Position:
        """The start of the range of the first commit that mentions a partition, or its position."""
        starts = [one.range.start for one in self._of(commit) if one.partition == tp]
        return min([at, *starts])

    @cached_property
    def skipped(self) -> dict[TopicPartition, list[OffsetRange]]:
        """The offsets that resets have passed over, and no later one has gone back to."""
        found: dict[TopicPartition, list[OffsetRange]] = {}
        known: dict[TopicPartition, Position] = {}
        for commit in self.commits:
            told = commit.told_by(self.pipeline)
            moved = commit.tree(self.pipeline, "positions")
            for tp, at in moved.items() if told and told.get("kind") == "reset" else ():
                found[tp] = cut(found.get(tp, ()), at)
                if known.get(tp, at) < at:
                    found[tp].append(OffsetRange(known[tp], at))
            known |= moved
        return found

    @property
    def claims(self) -> list[Claim]:
        """What other pipelines have committed, as far as the log shows."""
        return [
            (name, tp, OffsetRange(*one))
            for commit in self.commits
            for name in (app.removeprefix("oncely/") for app in commit.transactions)
            for tp, one in commit.tree(name, "ranges").items()
            if name != self.pipeline
        ]

    # -- parts -----------------------------------------------------------------------------

    @cached_property
    def _commits(self) -> Mapping[int, DeltaCommit]:
        return {one.version: one for one in self.commits}

    @cached_property
    def _spans(self) -> Mapping[int, tuple[Span, ...]]:
        return {one.version: self._of(one) for one in self.commits}

    def _of(self, commit: DeltaCommit) -> tuple[Span, ...]:
        ranges = commit.tree(self.pipeline, "ranges")
        return tuple(Span(tp, OffsetRange(*one)) for tp, one in ranges.items())

    def _take(self, commit: DeltaCommit) -> None:
        told = commit.told_by(self.pipeline)
        others = frozenset({OTHERS})
        removed = {one.path: self.live.pop(one.path, others) for one in commit.removed}
        origins = frozenset[int]().union(*removed.values())
        ours = self._ours(commit, told) if told is not None else frozenset[int]()
        if told is None and not origins:
            origins = others
        for one in commit.added:
            self.live[one.path] = removed.get(one.path) or origins | ours
            if one.rows is not None:
                self.counted[one.path] = one.rows
        self.foreign = {path for path, of in self.live.items() if of == others}
        changes = any(one.changes_data for one in (*commit.removed, *commit.added))
        hit = origins - others
        if told is None and hit and changes:
            self.blames.append(Blame(commit, hit, _rows_of(commit.removed), _rows_of(commit.added)))

    def _ours(self, commit: DeltaCommit, told: Mapping[str, Any]) -> frozenset[int]:
        """The origins of the rows that a commit of the pipeline adds: itself, or, of a replay, the
        commits whose dead letters it has replayed."""
        origins = frozenset({commit.version})
        self.backfilled |= told.get("kind") == "backfill"
        if told.get("kind") == "replay":
            origins = self.letters.get(str(told.get("replayed")), origins)
        replaced = told.get("replaced") or {}  # by a discard
        for path in told.get("rejects") or ():
            self.letters[path] = self.letters.get(replaced.get(path, ""), origins)
        first, added = min(origins), _rows_of(commit.added)
        if told.get("kind") == "replay":
            self.replayed[first] = self.replayed.get(first, 0) + (added or 0)
        before = self.rows.get(first, 0)
        self.rows[first] = None if before is None or added is None else before + added
        return origins


def _counts(told: Mapping[str, Any]) -> Counts:
    """Counts in a commit's metadata; the digest is a text there."""
    records, rows, rejects, filtered = (
        int(told.get(name, 0)) for name in ("records", "rows", "rejects", "filtered")
    )
    digest = int(told["digest"]) if "digest" in told else None
    return Counts(records, rows, rejects, filtered, digest, str(told.get("recipe", "")))


def _rows_of(files: Iterable[FileAction]) -> int | None:
    return total(one.rows for one in files)


def total(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if a number is not known."""
    found = list(numbers)
    return None if None in found else sum(one for one in found if one is not None)


def _rows(number: int | None) -> str:
    return "an unknown number of rows" if number is None else f"{number:,} rows"


_TRIES = 20


@dataclass
class DeltaSnapshot:
    """One version of a table.

    Attributes:
        pipeline: the pipeline's name.
        store: the table's root.
        table: the handle of delta-rs, at this version.
        document: the ledger that this version names.
        history: the log up to this version.
    """

    pipeline: str
    store: Store
    table: Any
    document: DeltaDocument
    history: TableHistory

    @property
    def source(self) -> SourceIdentity:
        """Cluster and topics that were read."""
        return SourceIdentity(self.document.cluster_id, self.document.topic_ids)

    @property
    def positions(self) -> Mapping[TopicPartition, Position]:
        """The position of each partition."""
        return positions_of(self.document)

    @cached_property
    def started(self) -> Mapping[TopicPartition, Position]:
        """The first positions that the log still contains."""
        found = self.history.started()
        return {tp: min(at, found.get(tp, at)) for tp, at in self.positions.items()}

    @cached_property
    def counted(self) -> Mapping[TopicPartition, Position]:
        """The same, or where the ledger's totals begin: they stay when the log is cut."""
        totals = from_tree(self.document.totals)
        return {
            tp: min(at, totals[tp].since) if tp in totals else at for tp, at in self.started.items()
        }

    def before(self, known: Mapping[TopicPartition, Position]) -> list[Span]:
        """The offsets before known ones that may have been committed, if the log was cut."""
        begun: dict[TopicPartition, int] = from_tree(self.document.started)
        spans = {} if self.history.is_whole else known
        return [
            Span(tp, OffsetRange(begun.get(tp, 0), at))
            for tp, at in sorted(spans.items())
            if begun.get(tp, 0) < at
        ]

    @cached_property
    def committed(self) -> Sequence[Committed]:
        """The commits that the log still contains, by partition and range; after a replay, which
        changes the totals only, these."""
        found = [
            one for tp, own in self.history.skipped.items() if tp in self.positions
            for one in skips(tp, own)
        ]  # fmt: skip
        if self.history.replayed or self.history.backfilled:
            found += [
                Committed(
                    Span(tp, OffsetRange(one.since, self.positions[tp])), "joined", one.counts
                )
                for tp, one in from_tree(self.document.totals).items()
            ]
            return sorted(found, key=lambda one: one.span)
        for one in self.history.commits:
            at = None if one.at_ms is None else moment(one.at_ms)
            counts = self.history.counts(one.version)
            for span in self.history.spans(one.version):
                if span.range.end <= self.positions.get(span.partition, 0):
                    own = counts.get(span.partition, NO_RECORDS)
                    found.append(Committed(span, "data", own, at=at))
        return sorted(found, key=lambda one: one.span)

    @cached_property
    def _kept(self) -> list[Letter]:
        return sorted(read_letters(self.store, self.document))

    def kept(self) -> Sequence[Letter]:
        """The dead letters, by partition and offset."""
        return self._kept

    @property
    def letters(self) -> frozenset[tuple[TopicPartition, int]]:
        """Their records."""
        return frozenset((one.of, one.offset) for one in self._kept)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The files below the root, and their sizes."""
        return {one.path: one.bytes for one in self.store.list()}

    @cached_property
    def live(self) -> Mapping[str, int | None]:
        """The table's files and their rows, as delta-rs lists them."""
        rows = pa.table(self.table.get_add_actions(flatten=True)).to_pylist()
        counted = self.history.counted
        known = {unquote(row["path"]): row["num_records"] for row in rows}
        return {path: counted.get(path, stored) for path, stored in known.items()}

    @cached_property
    def missing(self) -> frozenset[str]:
        """Files of the table that are not in the store."""
        return frozenset(path for path in self.live if "://" not in path and path not in self.sizes)

    @cached_property
    def problems(self) -> dict[str, str]:
        """What is wrong with files of the table; those that can't be read are added as they are
        read."""
        found = dict.fromkeys(self.missing, "it is missing, and the table still names it")
        for path, size in named_sizes(self.table).items():
            if self.sizes.get(path, size) != size:
                found[path] = f"it has {self.sizes[path]:,} bytes, and the table names {size:,}"
        return found

    def batches(self, columns: Sequence[str], paths: Iterable[str] | None = None) -> Iterator[Any]:
        """Batches of rows with the path of their file, of all files or of some; a damaged file may
        have none.

        Raises:
            Unreadable: the table has a feature that delta-rs can't read into Arrow.
            Unavailable: a file can't be read, and is not damaged.
        """
        there = (set(self.live) if paths is None else set(paths)) - self.missing
        try:
            dataset = self.table.to_pyarrow_dataset()
        except Exception as error:  # DeltaProtocolError, without the package it is no name
            raise Unreadable(f"the table can't be read: {error}"[:300]) from None
        for fragment in dataset.get_fragments():
            if fragment.path in there & self.problems.keys():
                yield from self._rewritten(fragment, dataset.schema, columns)
            elif fragment.path in there:
                try:
                    for batch in fragment.to_batches(schema=dataset.schema, columns=list(columns)):
                        yield fragment.path, batch
                except (pa.ArrowException, OSError) as error:
                    self._damaged(fragment.path, error)

    def _rewritten(
        self, fragment: Any, schema: pa.Schema, columns: Sequence[str]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows of a file that has another size than the table names, by which delta-rs would
        read it; none if it can't be read."""
        with suppress(NoSuchFile, OSError, pa.ArrowException):
            whole = of_content(fragment, self.store.read(fragment.path))
            rows = whole.to_table(schema=schema, columns=list(columns))
            yield from ((fragment.path, one) for one in rows.to_batches())

    def _damaged(self, path: str, error: Exception) -> None:
        """Note a file of which nothing can be read, if its bytes are the reason."""
        try:
            rows_of(self.store.read(path), "parquet")
        except Unreadable as reason:
            self.problems.setdefault(path, str(reason))
            return
        except NoSuchFile:
            pass
        raise Unavailable(f"{path} can't be read: {error}"[:300], way_out="try again") from error

    def inside(self, spans: Iterable[Span]) -> list[tuple[TopicPartition, int]]:
        """The dead letters of these spans."""
        return sorted(
            {one for one in self.letters for s in spans
             if s.partition == one[0] and one[1] in s.range}
        )  # fmt: skip


def snapshot_of(pipeline: str, store: Store, connect: DeltaConnect = connect) -> DeltaSnapshot:
    """The newest version whose document is there: a newer commit may have removed it."""
    tables, app_id = connect(store.url, store.s3), f"oncely/{pipeline}"
    for _ in range(_TRIES):
        table = tables.load()
        number = None if table is None else table.transaction_version(app_id)
        if number is None:
            raise SourceMismatch(
                f"the table {store!r} contains nothing of pipeline {pipeline!r}",
                way_out="run the pipeline first; or correct name, or sink.url",
            )
        try:
            document = read_document(store, pipeline, number)
        except NoSuchFile:
            continue
        commits = read_commits(store, table.version())
        return DeltaSnapshot(pipeline, store, table, document, TableHistory(pipeline, commits))
    raise Stopped(
        f"pipeline {pipeline!r}: the table names a ledger, and its document is gone",
        way_out="restore _oncely/ from a backup; without it no position is known",
    )
