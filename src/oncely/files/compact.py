"""Small files of a directory rewritten as one, by a transaction of the manifest's own.

Outputs are written first, under names that nobody knows. Then one Kafka transaction names them and
takes their inputs out. All compactions of a pipeline share one transactional id, and each
transaction has a producer instance of its own; its order is the compare-and-set, as everywhere:

1. ``init_transactions``: an earlier compaction's transaction ends, and whoever ran it is fenced.
2. The manifest is read, settled. Only compactions take files out (a run only adds some), and none
   but this instance can commit one now. So an input that is named here is named until our commit,
   or we are fenced and commit nothing.
3. Outputs whose inputs are not all named are dropped: another compaction was quicker. Nobody can
   publish them any more, since the instance that could have was fenced in 1: they are deleted.
4. Begin, send, and wait until the broker has the messages: from here on the coordinator's clock
   runs, and the transaction ends within its timeout. Only then the outputs' age is looked at. A
   process that is paused before has the age refused; one that is paused after has the broker
   abort. Between them ``vacuum`` can't come: see there.
5. Commit. When its answer is lost, 1 and 2 tell: outputs that are named were published, whole,
   by that very transaction; or none was, and it is tried again. Another compaction may have
   replaced the outputs since: then they were published, too, and readers may hold them.

A killed compaction leaves outputs that nobody names, for ``vacuum``. The inputs stay, for readers
that have looked at the manifest before, and for ``vacuum`` too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from oncely.clients.kafka.topics import largest_batch
from oncely.clients.kafka.transaction import Message
from oncely.decode.avro_names import arrow_schema_of
from oncely.errors import InvariantViolation, Stopped, Unavailable
from oncely.files.plan import Bin, bins, in_order, union
from oncely.files.reading import Named, rows_of
from oncely.files.table import Table
from oncely.files.times import instant
from oncely.lake.avro_file import AvroFiles
from oncely.lake.conform import Rounding
from oncely.lake.leases import Limits, StagingLeases
from oncely.lake.manifest import Contents, Manifest
from oncely.lake.names import is_mixed
from oncely.lake.parquet_file import ParquetFiles
from oncely.lake.paths import FileNames
from oncely.lake.records import ManifestFile, encode, path_key
from oncely.ledgers.topic.cluster import Cluster
from oncely.ledgers.topic.compare_and_set import compare_and_set

_TRIES = 5
_FETCHES = 8
_TOGETHER = 200  # outputs in one transaction


@dataclass(frozen=True)
class Compacted:
    """What a compaction has done, or would do.

    Attributes:
        dry_run: nothing was written.
        inputs, outputs: files that were taken out, and files that hold their rows now.
        rows: in them.
        bytes_before, bytes_after: of inputs and outputs; after is 0 for a dry run.
        dropped: inputs that another compaction has taken meanwhile.
        kept: inputs that stay as they are: a whole number in them is not the same in the type
            that its column has become.
        files: of the table afterwards.
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
        """For programs."""
        return asdict(self)


def compact(
    table: Table,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> Compacted:
    """Rewrite small files of each directory up to ``target_file_size``.

    Args:
        table: whose.
        dry_run: only say what would be done.
        progress: told how many files have been rewritten, and how many will be.

    Raises:
        ConfigError: never written to, or the store refuses us.
        DataLost: a file is not what was published.
        Stopped: writing took longer than ``max_staging_age``; nothing was published.
        Unavailable: no answer; a compaction that was under way has taken effect whole, or not.
    """
    with closing(Cluster(table.place)) as cluster, table.manifest() as manifest:
        contents = manifest.look()
        size = largest_batch(cluster.asker, [table.manifest_topic])[table.manifest_topic]
        resets = cluster.look().resets
        found = list(bins(contents.files, resets, target=table.target_file_size, largest=size))
        if dry_run:
            return _planned(contents, found)
        limits = Limits(table.max_staging_age, table.place.transaction_timeout)
        work = _Compaction(table, cluster, manifest, size, StagingLeases(table.store, limits))
        done: list[ManifestFile] = []
        for together in _chunks(found):
            done += work.publish(*work.write(together, contents))
            progress(sum(len(file.replaces) for file in done), sum(map(len, found)))
        return _done(contents, found, done, work.kept, len(manifest.settled().files))


def _planned(contents: Contents, found: Sequence[Bin]) -> Compacted:
    """What would be done."""
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
    """What was done: of the planned inputs some may be kept, or taken by another compaction."""
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
    kept: set[str] = field(default_factory=set)

    # -- outputs ---------------------------------------------------------------------------

    def write(
        self, together: Sequence[Bin], contents: Contents
    ) -> tuple[list[ManifestFile], datetime]:
        """One new file for each bin; with them the store's clock before the first one."""
        since = self.table.store.now()
        self.leases.hold()
        made = [self._write([contents.files[path] for path in one], contents) for one in together]
        self.table.store.durable()
        return [file for file in made if file is not None], since

    def _rows(self, file: ManifestFile, schema: pa.Schema) -> pa.Table | None:
        """A file's rows; None when one of its numbers would be rounded: then it is kept."""
        try:
            return rows_of(self.table.store, Named.of(file), schema)
        except Rounding:
            self.kept.add(file.path)
            return None

    def _write(self, files: Sequence[ManifestFile], contents: Contents) -> ManifestFile | None:
        """The rows of the files, in order, with the published columns of their scope.

        None when fewer than two of them can have these columns.
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
        data = form.prepare(rows, counted).file(0, counted)
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
        """One transaction; see the module.

        Returns:
            Those that were published.
        """
        identity = f"oncely/{self.table.place.pipeline}//compact"
        last: Unavailable | None = None
        for _ in range(_TRIES):
            with compare_and_set(self.cluster, identity, self.manifest.settled, [self.largest]) as (
                transaction,
                contents,
            ):
                named = contents.files
                done = [f for f in made if f.path in named or f.path in contents.removed]
                if done:
                    return done
                left = [file for file in made if all(path in named for path in file.replaces)]
                kept = {file.path for file in left}
                self.table.store.delete(f.path for f in made if f.path not in kept)
                made = left
                if not made:
                    return []
                try:
                    transaction.begin()
                    transaction.send(self.table.manifest_topic, _messages(made))
                    transaction.flush(self.table.place.timeout)
                    self._refuse_old(since)
                    transaction.commit()
                except Unavailable as error:
                    last = error
                    continue
                return list(made)
        raise last or InvariantViolation("a loop that returns or raises has ended")

    def _refuse_old(self, since: datetime) -> None:
        age = self.table.store.now() - since
        if age > timedelta(seconds=self.table.max_staging_age):
            raise Stopped(
                f"writing took {age}, longer than sink.max_staging_age: a vacuum may have removed"
                " what was written, so nothing is published",
                way_out="run it again; or raise sink.max_staging_age",
            )


def _messages(made: Sequence[ManifestFile]) -> Iterator[Message]:
    """New files before tombstones: each new one takes its inputs out by itself."""
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
