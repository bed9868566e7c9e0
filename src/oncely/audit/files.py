"""Files and their manifest as evidence.

A file's entry states its size, its checksum and its number of rows, and offset ranges that contain
all its records. Rows do not contain their offsets, so they are compared in groups: files whose
ranges overlap, and the ranges of the ledger's history that the topic still contains.

Files are not read unless ``download`` is set: then every file's checksum, rows and values are
compared. A group that differs is read in any case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import pyarrow as pa

from oncely.audit.content import Component, Group, Node, Rows, components, digests_of, recipe_of
from oncely.audit.evidence import Committed, OfLedger, Span
from oncely.audit.report import Finding, Proof
from oncely.audit.stored.log import Topics
from oncely.audit.stored.manifest import (
    Manifest,
    NamedFile,
    Unreadable,
    read_manifest,
    row_count,
    rows_of,
)
from oncely.audit.stored.topic_ledger import TopicLedger
from oncely.audit.topic_snapshot import TopicSnapshot, take
from oncely.config import PipelineSettings
from oncely.core.claim import NO_RECORDS, SKIPPED, Counts
from oncely.core.digest import Recipe
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.stores.objects.store import NoSuchFile, Store

_THREADS = 4
NOT_READ = "the files were not read, only listed: --download compares their content"


@dataclass(frozen=True)
class _Kept:
    """A file of the manifest as it is stored.

    Attributes:
        file: its entry.
        problem: what is wrong with it; empty if nothing is.
        rows: the number of rows that it contains now.
    """

    file: NamedFile
    problem: str
    rows: int


@dataclass(frozen=True)
class _Read:
    """What is read between the two readings of the ledger."""

    manifest: Manifest
    files: Mapping[str, _Kept]
    foreign: Sequence[_Kept]


@dataclass
class FilesEvidence(OfLedger):
    """The table of a manifest, as :class:`oncely.audit.content.GroupedEvidence`.

    Attributes:
        pipeline: the pipeline's name.
        store: the root of the files.
        snapshot: ledger, dead letters and manifest.
        downloaded: every file was read and has the checksum with which it was published, so that
            its values need no comparison of their own.
    """

    reads: ClassVar[bool] = False

    pipeline: str
    store: Store
    snapshot: TopicSnapshot[_Read]
    downloaded: bool = False
    groups: list[Group] = field(default_factory=list, init=False)
    limits: list[str] = field(default_factory=list, init=False)
    unexpected: list[Finding] = field(default_factory=list, init=False)
    started: dict[TopicPartition, Position] = field(default_factory=dict, init=False)
    _files: dict[str, list[_Kept]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        read = self.snapshot.content
        current = [one for one in read.files.values() if not self._is_void(one.file)]
        void = len(read.files) - len(current)
        if void:
            self.limits.append(
                f"{void:,} files were written before a reset, and their records read again: they"
                " are not compared"
            )
        if not self.downloaded:
            self.limits.append(NOT_READ)
        self._unexpected(current)
        inside = [one for one in current if not self._is_beyond(one.file, self.positions)]
        of_files = [(one.of, one.start) for kept in inside for one in kept.file.ranges]
        self.started = self.snapshot.started(of_files)
        self._group(inside)

    @property
    def proof(self) -> Proof:
        """By checksum if the files were read."""
        return "content" if self.downloaded else "counts"

    def rejects(self, spans: Sequence[Span]) -> Sequence[tuple[TopicPartition, int]]:
        """The dead letters that wait."""
        return self.snapshot.waiting(spans)

    def recipe(self, group: Group) -> str:
        """The ledger's recipe, or all columns of a file that can be read."""
        if group.stated is not None and group.stated.recipe:
            return group.stated.recipe
        anywhere = (one for files in self._files.values() for one in files)
        for one in chain(self._files[group.name], anywhere):
            with suppress(NoSuchFile, Unreadable):
                return str(recipe_of(self._rows(one.file).schema))
        return str(recipe_of(pa.schema([])))

    def contents(self, group: Group, recipe: str) -> Iterator[Rows]:
        """The rows of the group's files that can be read; a damaged file may have none."""
        columns, kept = Recipe.parse(recipe), self._files[group.name]
        with ThreadPoolExecutor(_THREADS) as threads:
            yield from threads.map(lambda one: self._digests(one.file, columns), kept)

    # -- parts -----------------------------------------------------------------------------

    def _digests(self, file: NamedFile, recipe: Recipe) -> Rows:
        rows = pa.table({})
        with suppress(NoSuchFile, Unreadable):
            rows = self._rows(file)
        return digests_of(rows, recipe, file.path)

    def _rows(self, file: NamedFile) -> pa.Table:
        return rows_of(self.store.read(file.path), file.format)

    def _unexpected(self, files: Iterable[_Kept]) -> None:
        for one in files:
            if self._is_beyond(one.file, self.snapshot.reached):
                text = f"{one.rows:,} rows of records beyond the position, in {one.file.path}"
                self._files[one.file.path] = [one]
                self._find(one, text, tuple(self._spans(one.file)))
        for one in self.snapshot.content.foreign:
            text = f"{one.rows:,} rows of pipeline {one.file.pipeline!r}, in {one.file.path}"
            self._find(one, text)
        for letter in self.snapshot.beyond():
            text = f"a dead letter beyond the position, at {letter.at[0]} {letter.at[1]}"
            self.unexpected.append(Finding(letter.of, letter.offset, "unexpected", text))

    def _find(self, one: _Kept, text: str, within: tuple[Span, ...] = ()) -> None:
        ranges = one.file.ranges
        tp = ranges[0].of if len(ranges) == 1 else None
        offset = ranges[0].start if len(ranges) == 1 else None
        self.unexpected.append(Finding(tp, offset, "unexpected", text, within, one.file.path))

    def _is_beyond(self, file: NamedFile, positions: Mapping[TopicPartition, Position]) -> bool:
        return any(one.start >= positions.get(one.of, 0) for one in file.ranges)

    def _is_void(self, file: NamedFile) -> bool:
        """True if a later reset has made the pipeline read the file's records again."""
        undone = self.snapshot.ledger.undone
        return any(undone(one.of, file.epoch, one.start) for one in file.ranges)

    def _group(self, files: Sequence[_Kept]) -> None:
        known = self.snapshot.committed
        nodes = [Node((o.span,), o) for o in known if not self.snapshot.is_backfilled(o.span)]
        nodes += [Node(self._spans(one.file), one) for one in files]
        for one in components(nodes, self.whole(self.started)):
            if all(isinstance(n.what, Committed) and n.what.kind == SKIPPED for n in one.nodes):
                continue
            group = self._of(one)
            self._files[group.name] = [n.what for n in one.nodes if isinstance(n.what, _Kept)]
            self.groups.append(group)

    def _spans(self, file: NamedFile) -> tuple[Span, ...]:
        """The file's offsets; the range of a file may reach beyond the position's partition."""
        return tuple(Span(one.of, OffsetRange(one.start, one.end)) for one in file.ranges)

    def _of(self, found: Component) -> Group:
        entries = [one.what for one in found.nodes if isinstance(one.what, Committed)]
        files = [one.what for one in found.nodes if isinstance(one.what, _Kept)]
        stated = stated_of(found.spans, entries)
        damaged = [one for one in files if one.problem]
        doubt = "deleted from the topic before they were read" if _has_gap(entries) else ""
        return Group(
            name=_name(found.spans, files),
            spans=found.spans,
            rows=sum(one.file.rows for one in files),
            stated=stated,
            replayed=0 if any(e.amended for e in entries) else self.snapshot.replayed(found.spans),
            damage=tuple(f"{one.file.path}: {one.problem}" for one in damaged),
            gone=sum(max(0, one.file.rows - one.rows) for one in damaged),
            doubt=doubt,
        )


def open_files(settings: PipelineSettings, *, download: bool = False) -> FilesEvidence:
    """A snapshot of a files sink.

    Raises:
        SourceMismatch: the pipeline never ran.
        Unavailable: cluster or store do not answer.
    """
    sink: Any = settings.sink
    source, store = settings.source, sink.store
    topics = Topics(source.brokers, source.kafka_properties())

    def read(_: TopicLedger) -> _Read:
        return _read(topics, sink.manifest_topic, settings.name, store, download=download)

    with closing(topics):
        taken = take(topics, sink.ledger_topic, sink.rejects, settings.name, read)
    return FilesEvidence(settings.name, store, taken, download)


def _read(
    topics: Topics, manifest_topic: str, pipeline: str, store: Store, *, download: bool
) -> _Read:
    """The manifest, and its files as they are stored.

    A file that is missing may have been compacted and vacuumed since: then the manifest is read
    again.
    """
    manifest = read_manifest(topics, manifest_topic)
    while True:
        sizes = {one.path: one.bytes for one in store.list()}
        ours = [one for one in manifest.files.values() if one.pipeline == pipeline]
        with ThreadPoolExecutor(_THREADS) as threads:
            kept = list(threads.map(partial(_look, store, sizes, download), ours))
        now = read_manifest(topics, manifest_topic)
        if all(one.file.path in now.files for one in kept if one.problem):
            break
        manifest = now
    others = [one for one in manifest.files.values() if one.pipeline != pipeline]
    foreign = [_look(store, sizes, download, one) for one in others if one.path in sizes]
    return _Read(manifest, {one.file.path: one for one in kept}, foreign)


def _look(store: Store, sizes: Mapping[str, int], download: bool, file: NamedFile) -> _Kept:
    size = sizes.get(file.path)
    if size is None:
        return _Kept(file, "it is missing", 0)
    problem, rows = "", file.rows
    if size != file.bytes:
        problem = f"it has {size:,} bytes, and {file.bytes:,} were published"
    try:
        if download:
            differs, rows = _content(store, file)
            problem = problem or differs
        if (problem and not download) or store.local:
            with closing(store.open(file.path)) as opened:
                rows = row_count(opened, file.format)
    except NoSuchFile:
        return _Kept(file, "it is missing", 0)
    except Unreadable as error:
        return _Kept(file, problem or str(error), 0)
    if rows != file.rows:
        problem = problem or f"it has {rows:,} rows, and {file.rows:,} were published"
    return _Kept(file, problem, rows)


def _content(store: Store, file: NamedFile) -> tuple[str, int]:
    data = store.read(file.path)
    rows = rows_of(data, file.format).num_rows
    same = hashlib.sha256(data).hexdigest() == file.sha256
    return "" if same else "its SHA-256 is another one than was published", rows


def stated_of(spans: Sequence[Span], entries: Sequence[Committed]) -> Counts | None:
    """The sum of the history's entries, if they cover exactly these spans."""
    covered = sum(one.span.range.end - one.span.range.start for one in entries)
    if not entries or covered != sum(one.range.end - one.range.start for one in spans):
        return None
    return sum((one.counts for one in entries), NO_RECORDS)


def _has_gap(entries: Iterable[Committed]) -> bool:
    return any(one.kind == "gap" for one in entries)


def _name(spans: Sequence[Span], files: Sequence[_Kept]) -> str:
    where = ", ".join(f"{one.partition} {one.range}" for one in spans)
    if not files:
        return f"{where} (no file)"
    return f"{where} ({len(files):,} files)" if len(files) > 1 else files[0].file.path
