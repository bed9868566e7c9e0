"""One version of a Delta table, the document that this version names, and the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from oncely.audit.delta_history import TableHistory
from oncely.audit.evidence import Committed, Span, moment
from oncely.audit.layout import skips
from oncely.audit.stored.data_file import Unreadable, rows_of
from oncely.audit.stored.dead_letters import Letter
from oncely.audit.stored.delta_document import (
    DeltaDocument,
    positions_of,
    read_commits,
    read_document,
    read_letters,
)
from oncely.clients.delta import DeltaConnect, connect, named_sizes, of_content
from oncely.clients.files.store import NoSuchFile, Store
from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition, from_tree
from oncely.errors import SourceMismatch, Stopped, Unavailable

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
