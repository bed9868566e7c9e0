"""Merging of small files of a directory, by a separate transaction of the manifest.

How files are replaced in one transaction: :mod:`oncely.kinds.files.manifest`. Outputs whose inputs
are not all named any more are dropped: another transaction was faster. They cannot be published any
more, since the instance that could was fenced: they are deleted. If the answer of a commit is lost,
the manifest decides: if outputs are named, they were all published by that transaction; if none is,
it is repeated. Others may have replaced the outputs since: then they were published, too, and
readers may use them.

A killed compaction leaves unlisted outputs, for ``vacuum``. The inputs are kept for readers that
have read the manifest before, and for ``vacuum``, too.

:func:`bins` chooses small files to be merged: a pure decision, nothing is read or written.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.core.ranges import OffsetRange, TopicPartition, normalize
from oncely.decode.avro_schema import arrow_schema_of
from oncely.errors import InvariantViolation
from oncely.kafka.topics import largest_batch
from oncely.kafka.transaction import Message
from oncely.kinds.conform import Rounding
from oncely.kinds.data_file import AvroFiles, ParquetFiles, SourceRange, encode
from oncely.kinds.files.manifest import Contents, Manifest, Replacing
from oncely.kinds.files.records import ManifestFile, Resets, era, is_mixed, is_replayed, path_key
from oncely.kinds.files.sink import LeaseLimits, StagingLeases
from oncely.kinds.files.table import Named, Table, instant, rows_of
from oncely.kinds.partitions import FileNames
from oncely.stores.topic.cluster import Cluster

Bin: TypeAlias = "list[str]"
"""The paths of two or more files in the order of their rows, to be written as one."""

_FRAME = 1_000  # bytes of a batch and a record around key and value
_NUMBERS = 60  # bytes of a range in JSON, without its topic


def bins(
    files: Mapping[str, ManifestFile], resets: Resets, *, target: int, largest: int
) -> Iterator[Bin]:
    """Files of a directory that together have at most about ``target`` bytes.

    A file of half the target or more is not merged: otherwise every compaction would write it
    again. Files are merged if they have the same directory, scope and pipeline, and no reset is
    between them: records that were read twice on purpose are not merged into one file. Replayed
    dead letters, and rows that a transform has mixed, are merged only with each other, so that
    ranges keep their meaning.

    Args:
        files: the files of the table.
        resets: the resets in the ledger.
        target: the target size of a file, in bytes.
        largest: the limit of a manifest message, in bytes: it contains all paths of a bin.
    """
    # Entries of files take 1.8 kB each: only their sort keys are kept for all at a time.
    groups: dict[tuple[object, ...], list[tuple[int, int, str]]] = defaultdict(list)
    for file in files.values():
        if file.bytes * 2 < target:
            folder = file.path.rpartition("/")[0]
            kind = (is_mixed(file), is_replayed(file))
            key = (folder, file.scope, file.pipeline, era(file.epoch, resets), kind)
            groups[key].append(in_order(file))
    for group in groups.values():
        yield from _packed((files[path] for *_, path in sorted(group)), target, largest)


def in_order(file: ManifestFile) -> tuple[int, int, str]:
    """Batches in order, and within a batch names in the order of offsets."""
    return file.epoch, file.batch, file.path


def union(files: Iterable[ManifestFile]) -> list[SourceRange]:
    """The ranges of all files; touching or overlapping ranges are joined."""
    found: dict[TopicPartition, list[OffsetRange]] = defaultdict(list)
    for file in files:
        for one in file.ranges:
            found[TopicPartition(one.topic, one.partition)].append(OffsetRange(one.start, one.end))
    return [
        SourceRange(*tp, one.start, one.end)
        for tp, own in sorted(found.items())
        for one in normalize(own)
    ]


def _packed(files: Iterable[ManifestFile], target: int, largest: int) -> Iterator[Bin]:
    packed: Bin = []
    size = length = 0
    for file in files:
        entry = len(encode(file))
        if packed and (size + file.bytes > target or length + _more(file) > largest - _FRAME):
            if len(packed) > 1:
                yield packed
            packed = []
        if not packed:
            size, length = 0, entry
        packed.append(file.path)
        size, length = size + file.bytes, length + _more(file)
    if len(packed) > 1:
        yield packed


def _more(file: ManifestFile) -> int:
    """The bytes that a file adds to the message of the file that replaces it."""
    ranges = sum(len(one.topic) + _NUMBERS for one in file.ranges)
    return len(file.path) + len('"",') + ranges


_FETCHES = 8
_TOGETHER = 200  # outputs in one transaction


@dataclass(frozen=True)
class Compacted:
    """The result of a compaction, or of a dry run.

    Attributes:
        dry_run: nothing was written.
        inputs, outputs: files that were removed, and files that contain their rows now.
        rows: the number of rows in them.
        bytes_before, bytes_after: the sizes of inputs and outputs; after is 0 for a dry run.
        dropped: inputs that another compaction has replaced meanwhile.
        kept: inputs that are not rewritten: a whole number in them would change in the present type
            of its column.
        files: the number of files of the table afterwards.
    """

    dry_run: bool
    inputs: int
    outputs: int
    rows: int
    bytes_before: int
    bytes_after: int
    dropped: int
    files: int
    kept: int = 0

    def as_json(self) -> dict[str, Any]:
        """The result as JSON-able values."""
        return asdict(self)


def compact(
    table: Table,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda _, __: None,
    patience: Backoff | None = None,
) -> Compacted:
    """Merge small files of each directory up to ``target_file_size``.

    Args:
        table: the table.
        dry_run: only return the plan.
        progress: called with the number of rewritten files, and the total.
        patience: the time for which Kafka may be unavailable, for each transaction.

    Raises:
        ConfigError: never written to, or the store refuses the client.
        DataLost: a file differs from the published one.
        Stopped: writing took longer than ``max_staging_age``; nothing was published.
        Unavailable: no answer; the compaction has taken effect completely, or not at all.
    """
    with closing(Cluster(table.pipeline_topics)) as cluster, table.manifest() as manifest:
        contents = manifest.look()
        size = largest_batch(cluster.admin, [table.manifest_topic])[table.manifest_topic]
        resets = cluster.look().resets
        found = list(bins(contents.files, resets, target=table.target_file_size, largest=size))
        if dry_run:
            return _planned(contents, found)
        limits = LeaseLimits(table.max_staging_age, table.pipeline_topics.transaction_timeout)
        leases = StagingLeases(table.store, limits)
        work = _Compaction(table, cluster, manifest, size, leases, patience or Backoff())
        done: list[ManifestFile] = []
        for together in _chunks(found):
            done += work.publish(*work.write(together, contents))
            progress(sum(len(file.replaces) for file in done), sum(map(len, found)))
        return _done(contents, found, done, work.kept, len(manifest.settled().files))


def _planned(contents: Contents, found: Sequence[Bin]) -> Compacted:
    """The result of a dry run."""
    inputs = [contents.files[path] for one in found for path in one]
    return Compacted(
        dry_run=True,
        inputs=len(inputs),
        outputs=len(found),
        rows=sum(file.rows for file in inputs),
        bytes_before=sum(file.bytes for file in inputs),
        bytes_after=0,
        dropped=0,
        files=len(contents.files) - len(inputs) + len(found),
    )


def _done(
    contents: Contents,
    found: Sequence[Bin],
    done: Sequence[ManifestFile],
    kept: Collection[str],
    files: int,
) -> Compacted:
    """The result: of the planned inputs some may be kept, or replaced by another compaction."""
    gone = {path for file in done for path in file.replaces}
    planned = {path for one in found for path in one}
    return Compacted(
        dry_run=False,
        inputs=len(gone),
        outputs=len(done),
        rows=sum(file.rows for file in done),
        bytes_before=sum(contents.files[path].bytes for path in planned & gone),
        bytes_after=sum(file.bytes for file in done),
        dropped=len(planned) - len(gone) - len(kept),
        files=files,
        kept=len(kept),
    )


@dataclass(frozen=True)
class _Compaction:
    table: Table
    cluster: Cluster
    manifest: Manifest
    largest: int
    leases: StagingLeases
    patience: Backoff
    kept: set[str] = field(default_factory=set)

    # -- outputs ---------------------------------------------------------------------------

    def write(
        self, together: Sequence[Bin], contents: Contents
    ) -> tuple[list[ManifestFile], datetime]:
        """One new file for each bin; and the store's clock before the first one."""
        since = self.table.store.now()
        self.leases.hold()
        made = [self._write([contents.files[path] for path in one], contents) for one in together]
        self.table.store.durable()
        return [file for file in made if file is not None], since

    def _rows(self, file: ManifestFile, schema: pa.Schema) -> pa.Table | None:
        """A file's rows; None if a number would be rounded: then the file is kept."""
        try:
            return rows_of(self.table.store, Named.of(file), schema)
        except Rounding:
            self.kept.add(file.path)
            return None

    def _write(self, files: Sequence[ManifestFile], contents: Contents) -> ManifestFile | None:
        """The rows of the files, in order, with the published columns of their scope.

        None if fewer than two of them can have these columns.
        """
        table, published = self.table, contents.schemas[files[0].scope]
        schema = arrow_schema_of(published.avro)
        with ThreadPoolExecutor(_FETCHES) as threads:
            found = threads.map(lambda file: self._rows(file, schema), files)
            read = [(f, own) for f, own in zip(files, found, strict=True) if own is not None]
        if len(read) < 2:
            self.kept.update(file.path for file in files)
            return None
        files = [file for file, _ in read]
        rows = pa.concat_tables([own for _, own in read])
        counted = sum(file.rows for file in files)
        if rows.num_rows != counted:
            raise InvariantViolation(
                f"{files[0].path} and those after it: {rows.num_rows} rows, not {counted}"
            )
        form = (AvroFiles if table.format == "avro" else ParquetFiles)(schema)
        data = form.prepare(rows)(0, counted)
        newest = max(files, key=in_order)
        path = _path(files, newest, form.extension)
        table.store.write(path, data)
        return ManifestFile(
            path=path,
            format=table.format,
            rows=counted,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            partition=newest.partition,
            event_time=_span(files),
            ranges=union(files),
            scope=newest.scope,
            schema=published.id,
            pipeline=newest.pipeline,
            epoch=newest.epoch,
            batch=newest.batch,
            replaces=[file.path for file in files],
        )

    # -- their publication -----------------------------------------------------------------

    def publish(self, made: Sequence[ManifestFile], since: datetime) -> list[ManifestFile]:
        """Publish in one transaction; see the module.

        Returns:
            The files that were published.
        """
        left = list(made)
        replacing = Replacing(
            self.cluster, self.manifest, self.table.store, self.table.max_staging_age, self.largest
        )
        self.patience.reset()
        for attempt in attempts(self.patience):
            with attempt, replacing.compared() as (transaction, contents):
                done = [f for f in left if f.path in contents.files or f.path in contents.removed]
                if done:
                    return done
                left = self._still_wanted(left, contents)
                if left:
                    messages = {self.table.manifest_topic: list(_messages(left))}
                    replacing.commit(transaction, messages, since)
        return left

    def _still_wanted(self, made: list[ManifestFile], contents: Contents) -> list[ManifestFile]:
        """Outputs whose inputs are all named; the others are deleted."""
        named = contents.files
        left = [file for file in made if all(path in named for path in file.replaces)]
        kept = {file.path for file in left}
        self.table.store.delete(file.path for file in made if file.path not in kept)
        return left


def _messages(made: Sequence[ManifestFile]) -> Iterator[Message]:
    """New files before tombstones: each new file removes its inputs by itself."""
    for file in made:
        yield Message(encode(file), path_key(file.path))
    for file in made:
        for path in file.replaces:
            yield Message(None, path_key(path))


def _chunks(found: Sequence[Bin]) -> Iterator[Sequence[Bin]]:
    for at in range(0, len(found), _TOGETHER):
        yield found[at : at + _TOGETHER]


def _path(files: Sequence[ManifestFile], newest: ManifestFile, extension: str) -> str:
    ranges = () if is_mixed(newest) else union(files)
    first = min(((one.topic, one.partition, one.start) for one in ranges), default=None)
    name = FileNames(newest.epoch, newest.batch, "compact").name(first, extension)
    folder = newest.path.rpartition("/")[0]
    return f"{folder}/{name}" if folder else name


def _span(files: Sequence[ManifestFile]) -> tuple[str, str] | None:
    spans = [file.event_time for file in files if file.event_time]
    if not spans:
        return None
    return (
        min((first for first, _ in spans), key=instant),
        max((last for _, last in spans), key=instant),
    )
