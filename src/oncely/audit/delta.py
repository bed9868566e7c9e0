"""A Delta table as evidence: one version of it, the document that this version names, and the log.

If the rows contain their offsets, they are compared by offset. Otherwise they are compared in
groups: the rows of a commit, and of several commits whose files were rewritten together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from oncely.audit.content import Group, Rows
from oncely.audit.delta_history import OTHERS, TableHistory, total
from oncely.audit.digests import digests_of, recipe_of
from oncely.audit.evidence import Committed, OfLedger, Span, moment
from oncely.audit.grouping import Component, Node, components
from oncely.audit.report import Finding, Proof, Undecided
from oncely.audit.scan import Scanned, ScannedRows
from oncely.audit.stored.data_file import Unreadable, rows_of
from oncely.audit.stored.delta_document import (
    DeltaDocument,
    positions_of,
    read_commits,
    read_document,
    read_letters,
)
from oncely.clients.delta import DeltaConnect, connect
from oncely.clients.files.store import NoSuchFile, Store
from oncely.config import DeltaSinkSettings, PipelineSettings
from oncely.core.claim import NO_RECORDS, Counts
from oncely.core.digest import Recipe, row_digests
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, SourceIdentity, TopicPartition, from_tree
from oncely.errors import SourceMismatch, Stopped, Unavailable

SOURCE = ("kafka_topic", "kafka_partition", "kafka_offset")
_TRIES = 20
_BLAMES = 20
LOG_CUT = "the table's log no longer contains the commits of these offsets"
NOT_READ = "the rows were not read, only counted: --download compares their content"


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
        if self.history.replayed or self.history.backfilled:
            return [
                Committed(
                    Span(tp, OffsetRange(one.since, self.positions[tp])), "joined", one.counts
                )
                for tp, one in sorted(from_tree(self.document.totals).items())
            ]
        found = []
        for one in self.history.commits:
            at = None if one.at_ms is None else moment(one.at_ms)
            counts = self.history.counts(one.version)
            for span in self.history.spans(one.version):
                if span.range.end <= self.positions.get(span.partition, 0):
                    own = counts.get(span.partition, NO_RECORDS)
                    found.append(Committed(span, "data", own, at=at))
        return sorted(found, key=lambda one: one.span)

    @cached_property
    def letters(self) -> frozenset[tuple[TopicPartition, int]]:
        """The dead letters that wait."""
        return frozenset(read_letters(self.store, self.document))

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
        named = pa.table(self.table.get_add_actions(flatten=True)).to_pylist()
        wanted = {unquote(row["path"]): row["size_bytes"] for row in named}
        found = dict.fromkeys(self.missing, "it is missing, and the table still names it")
        for path, size in wanted.items():
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
            if fragment.path in there:
                try:
                    for batch in fragment.to_batches(schema=dataset.schema, columns=list(columns)):
                        yield fragment.path, batch
                except (pa.ArrowException, OSError) as error:
                    self._damaged(fragment.path, error)

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


class _OfTable(OfLedger):
    """What both forms of evidence have in common."""

    snapshot: DeltaSnapshot

    @property
    def started(self) -> Mapping[TopicPartition, Position]:
        """The first positions that the log still contains."""
        return self.snapshot.started

    def rejects(self, spans: Sequence[Span]) -> Sequence[tuple[TopicPartition, int]]:
        """The dead letters of these spans."""
        return self.snapshot.inside(spans)


@dataclass
class DeltaGroups(_OfTable):
    """A table whose rows do not contain offsets, as
    :class:`oncely.audit.content.GroupedEvidence`.

    Attributes:
        snapshot: the version.
        reads: the values of all rows are compared.
    """

    snapshot: DeltaSnapshot
    reads: bool = False
    groups: list[Group] = field(default_factory=list, init=False)
    limits: list[str] = field(default_factory=list, init=False)
    unexpected: list[Finding] = field(default_factory=list, init=False)
    _files: dict[str, list[str]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        history = self.snapshot.history
        if not self.reads:
            self.limits.append(NOT_READ)
        if history.foreign:
            self.limits.append(
                f"{len(history.foreign):,} files were added by other writers: not compared"
            )
        nodes = [Node(history.spans(one), one) for one in history.ours]
        for origins, paths in self._by_origins().items():
            spans = tuple(s for one in sorted(origins) for s in history.spans(one))
            nodes.append(Node(spans, paths))
        nodes = [one for one in nodes if one.spans]
        found = components(nodes, self.whole(self.started))
        self.groups = [*map(self._of, found), *self._before_the_log()]

    @property
    def proof(self) -> Proof:
        """By values if the rows are read."""
        return "content" if self.reads else "counts"

    def recipe(self, group: Group) -> str:
        """The ledger's recipe, or all columns of the table."""
        if group.stated is not None and group.stated.recipe:
            return group.stated.recipe
        return str(recipe_of(pa.schema(self.snapshot.table.schema().to_arrow())))

    def contents(self, group: Group, recipe: str) -> Iterator[Rows]:
        """The rows of the group's files."""
        columns = Recipe.parse(recipe)
        names = [name for name, _ in columns.columns]
        for path, batch in self.snapshot.batches(names, self._files[group.name]):
            yield digests_of(pa.Table.from_batches([batch]), columns, path)

    def _by_origins(self) -> dict[frozenset[int], list[str]]:
        """The table's files by the commits that they come from."""
        found: dict[frozenset[int], list[str]] = {}
        for path in self.snapshot.live:
            origins = self.snapshot.history.live.get(path, frozenset({OTHERS}))
            found.setdefault(origins - {OTHERS}, []).append(path)
        return found

    def _before_the_log(self) -> Iterator[Group]:
        """The offsets of commits that the log no longer contains."""
        history = self.snapshot.history
        if spans := self.snapshot.before(self.started):
            first = history.commits[0].version if history.commits else self.snapshot.table.version()
            yield Group(f"before version {first}", tuple(spans), 0, doubt=LOG_CUT)

    def _of(self, found: Component) -> Group:
        versions = sorted(n.what for n in found.nodes if isinstance(n.what, int))
        paths = [path for n in found.nodes if isinstance(n.what, list) for path in n.what]
        history, live = self.snapshot.history, self.snapshot.live
        named = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions}"
        group = Group(
            name=f"{', '.join(f'{s.partition} {s.range}' for s in found.spans)} ({named})",
            spans=found.spans,
            rows=sum(live[path] or 0 for path in paths),
            damage=tuple(self._damage(versions, paths)),
            gone=sum(live[path] or 0 for path in paths if path in self.snapshot.missing),
            stated=self._stated(versions),
            committed=total(history.rows.get(one) for one in versions),
            replayed=sum(history.replayed.get(one, 0) for one in versions),
            others=any(OTHERS in history.live.get(path, ()) for path in paths),
        )
        self._files[group.name] = paths
        return group

    def _stated(self, versions: Sequence[int]) -> Counts | None:
        """The counts of commits, if all of them have any."""
        history = self.snapshot.history
        each = [(history.counts(one), history.spans(one)) for one in versions]
        if not each or any(len(counts) != len(spans) for counts, spans in each):
            return None
        return sum((one for counts, _ in each for one in counts.values()), NO_RECORDS)

    def _damage(self, versions: Sequence[int], paths: Sequence[str]) -> Iterator[str]:
        for blame in self.snapshot.history.blames:
            if blame.origins & set(versions):
                yield blame.text
        for path in sorted(self.snapshot.problems.keys() & set(paths)):
            yield f"{path}: {self.snapshot.problems[path]}"


@dataclass
class DeltaOffsets(ScannedRows, _OfTable):
    """A table whose rows contain their offsets, as :class:`oncely.audit.evidence.Evidence`.

    Attributes:
        snapshot: the version.
    """

    snapshot: DeltaSnapshot
    proof: Proof = "offsets"

    @property
    def started(self) -> Mapping[TopicPartition, Position]:
        """The first offsets of which log or totals tell."""
        return self.snapshot.counted

    def __post_init__(self) -> None:
        self.untold = [Undecided(*one, LOG_CUT) for one in self.snapshot.before(self.started)]

    @property
    def limits(self) -> Sequence[str]:
        """The damaged files."""
        return [f"{path}: {problem}" for path, problem in sorted(self.snapshot.problems.items())]

    @property
    def committed(self) -> Sequence[Committed]:
        """The commits, and an amendment for each partition if dead letters were replayed."""
        own = self.snapshot.committed
        if not self.snapshot.document.replay:
            return own
        whole = {
            tp: OffsetRange(min(self.started[tp], at), at) for tp, at in self.positions.items()
        }
        again = [Committed(Span(*one), "replay", NO_RECORDS) for one in sorted(whole.items())]
        return [*own, *again]

    @property
    def blames(self) -> Sequence[str]:
        """The newest commits of other writers that have changed rows of the pipeline."""
        return [one.text for one in self.snapshot.history.blames[-_BLAMES:]]

    def unable(self, recipe: str) -> str:
        """A column that the table no longer has."""
        names = pa.schema(self.snapshot.table.schema().to_arrow()).names
        lacking = [name for name, _ in Recipe.parse(recipe).columns if name not in names]
        return f"the table has no column {lacking[0]!r} any more" if lacking else ""

    def outside(self, whole: Mapping[TopicPartition, OffsetRange]) -> Iterator[pa.RecordBatch]:
        """Rows and dead letters of other offsets."""
        letters = (Scanned(tp, np.array([at])) for tp, at in sorted(self.snapshot.letters))
        for one in chain(self.scan(""), letters):
            range_ = whole.get(one.partition, OffsetRange(0, 0))
            start = range_.start if self.snapshot.history.is_whole else 0
            yield from one.only((one.offsets < start) | (one.offsets >= range_.end))

    def letters(self) -> Collection[tuple[TopicPartition, int]]:
        """The dead letters that wait."""
        return self.snapshot.letters

    def scan(self, recipe: str) -> Iterator[Scanned]:
        """The rows of each file, by partition; with digests if the table has all columns."""
        covered = None if not recipe or self.unable(recipe) else Recipe.parse(recipe)
        more = [name for name, _ in covered.columns if name not in SOURCE] if covered else []
        for _, batch in self.snapshot.batches([*SOURCE, *more]):
            rows = pa.table(batch)
            rows = rows.filter(rows.column(SOURCE[2]).is_valid())
            offsets = rows.column(SOURCE[2]).to_numpy().astype(np.int64)
            digests = None if covered is None else row_digests(rows, offsets, covered)
            topics = rows.column(SOURCE[0]).combine_chunks().dictionary_encode()
            numbers = rows.column(SOURCE[1]).to_numpy()
            for at, topic in enumerate(topics.dictionary.to_pylist()):
                same = topics.indices.to_numpy() == at
                for number in np.unique(numbers[same]).tolist():
                    own = same & (numbers == number)
                    digest = None if digests is None else digests[own]
                    yield Scanned(TopicPartition(topic, int(number)), offsets[own], digest)


def open_delta(
    settings: PipelineSettings,
    sink: DeltaSinkSettings,
    *,
    download: bool = False,
    connect: DeltaConnect = connect,
) -> DeltaGroups | DeltaOffsets:
    """A snapshot of a Delta table.

    Raises:
        SourceMismatch: there is no table, or the pipeline never ran.
        Stopped: the ledger's document is gone.
        Unavailable: the store does not answer.
    """
    taken = snapshot_of(settings.name, sink.store, connect)
    columns = pa.schema(taken.table.schema().to_arrow()).names
    if set(SOURCE) <= set(columns):
        return DeltaOffsets(taken)
    return DeltaGroups(taken, download)


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
