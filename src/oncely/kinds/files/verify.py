"""Reads every file and compares it with its manifest entry.

Files are checked while the pipeline runs and others compact and vacuum. Problems of a file that has
left the manifest meanwhile do not matter, so the manifest is read again at the end, and problems of
files that it no longer lists are dropped.

Overlapping source ranges of files in one directory may contain the same records twice. The range of
a file is a hull: it covers all its records, and also records of other directories. So only files of
the same partition values and scope are compared. Among these:

- Files of one batch may share one offset: a record that became several rows, split between files.
- Files of different batches share none, unless a reset has moved the position back in between: then
  the records were read again on purpose.
- A compaction joins files of several batches, and so may share such an offset with any other file.
- Rows that a transform has mixed have the ranges of their whole batch: files of one batch share
  them, and those of a compaction have no meaning.
- Replayed dead letters have ranges that other files have, and are not compared.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.ranges import Position, TopicPartition
from oncely.decode.avro_schema import arrow_schema_of
from oncely.errors import InvariantViolation
from oncely.kinds.conform import held_schema
from oncely.kinds.data_file import SourceRange, decoded
from oncely.kinds.files.manifest import Contents
from oncely.kinds.files.records import ManifestFile, Resets, is_mixed, is_replayed
from oncely.kinds.files.table import Table, instant, resolved
from oncely.kinds.partitions import NO_TIME, PartitionColumn, directory, is_file, split
from oncely.stores.objects.store import NoSuchFile, Store

_THREADS = 4
_QUEUED = 64


@dataclass(frozen=True)
class FileProblem:
    """A difference from the manifest; ``path`` is the file's."""

    path: str
    text: str


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Attributes:
        files, rows, bytes: totals of the manifest; all of the files were read.
        other_levels: files with other partition columns than the pipeline has now; the values of
            their rows were not compared with their directories.
        unnamed: files in the store that the manifest does not list and no reader reads: staged
            files and orphans.
        unnamed_bytes: the size of those.
        problems: the problems, sorted by path.
    """

    files: int
    rows: int
    bytes: int
    other_levels: int
    unnamed: int
    unnamed_bytes: int
    problems: tuple[FileProblem, ...]

    def as_json(self) -> dict[str, Any]:
        """The result as JSON-able values."""
        return {"ok": not self.problems, **asdict(self)}


def verify(table: Table, progress: Callable[[int, int], None] = lambda _, __: None) -> Verified:
    """Read every file and compare size, checksum, rows, columns, partition values and ranges.

    Args:
        table: the table.
        progress: called with the number of checked files, and the total.

    Raises:
        ConfigError: never written to, or the store refuses the client.
        Unavailable: cluster or store do not answer.
    """
    levels = table.levels
    with table.manifest() as manifest:
        contents = manifest.settled()
        found: list[tuple[str, str]] = []
        with ThreadPoolExecutor(_THREADS) as threads:
            look = _Look(table.store, contents, levels)
            for at, problems in enumerate(_mapped(threads, look, contents.files.values()), 1):
                found += problems
                progress(at, len(contents.files))
        found += overlaps(contents.files.values(), table.ledger().resets)
        now = manifest.look().files
    stored = [o for o in table.store.list() if is_file(o.path) and o.path not in now]
    files = contents.files.values()
    return Verified(
        len(files),
        sum(file.rows for file in files),
        sum(file.bytes for file in files),
        sum(list(file.partition) != [level.name for level in levels] for file in files),
        len(stored),
        sum(one.bytes for one in stored),
        tuple(FileProblem(path, text) for path, text in sorted(found) if path in now),
    )


def _mapped(
    threads: ThreadPoolExecutor, look: _Look, files: Iterable[ManifestFile]
) -> Iterator[Any]:
    """Like ``threads.map``, which would queue all files at once."""
    waiting = iter(files)
    while some := list(islice(waiting, _QUEUED)):
        yield from threads.map(look, some)


@dataclass(frozen=True)
class _Look:
    """Checks single files; safe for several threads."""

    store: Store
    contents: Contents
    levels: Sequence[PartitionColumn]

    def __call__(self, file: ManifestFile) -> list[tuple[str, str]]:
        return [(file.path, text) for text in self._look(file)]

    def _look(self, file: ManifestFile) -> Iterator[str]:
        try:
            data = self.store.read(file.path)
        except NoSuchFile:
            yield "it is not in the store"
            return
        if len(data) != file.bytes:
            yield f"it has {len(data):,} bytes, and {file.bytes:,} were published"
        found = hashlib.sha256(data).hexdigest()
        if found != file.sha256:
            yield f"its SHA-256 is {found}, and {file.sha256} was published"
            return
        try:
            rows = decoded(data, file.format)
        except InvariantViolation as error:
            yield error.message
            return
        if rows.num_rows != file.rows:
            yield f"it has {rows.num_rows:,} rows, and {file.rows:,} were published"
        yield from self._columns(file, rows)
        yield from _ranges(file)
        if list(file.partition) == [level.name for level in self.levels]:
            yield from self._values(file, rows)

    def _columns(self, file: ManifestFile, rows: pa.Table) -> Iterator[str]:
        published = self.contents.schemas.get(file.scope)
        if published is None:
            yield f"no schema is published for its scope {list(file.scope)}"
            return
        schema = arrow_schema_of(published.avro)
        for name in rows.column_names:
            if name not in schema.names and held_schema(rows.select([name])):
                yield f"its column {name!r} is not in the published schema"
        try:
            resolved(rows, schema)
        except InvariantViolation as error:
            yield f"its columns don't resolve to the published schema: {error.message}"

    def _values(self, file: ManifestFile, rows: pa.Table) -> Iterator[str]:
        """Check that each row is in the directory of its values, and the range of event times."""
        found = split(_as_partitioned(rows, self.levels), self.levels)
        for row, reason in found.rejected[:1]:
            yield f"row {row} could not have been written: {reason}"
        wanted = tuple(file.partition.values())
        for code in sorted(set(found.codes.tolist()) - {-1}):
            if found.groups[code] != wanted:
                yield f"it contains rows of {found.groups[code]}, and should of {wanted} only"
        if file.path.rpartition("/")[0] != directory(self.levels, wanted):
            yield f"it is not in the directory of {wanted}"
        times = found.times[found.times != NO_TIME] if found.times is not None else []
        span = (int(min(times)), int(max(times))) if len(times) else None
        published = tuple(map(instant, file.event_time)) if file.event_time else None
        if span != published:
            yield f"its event times span {span} µs, and {published} was published"


def _ranges(file: ManifestFile) -> Iterator[str]:
    for one in file.ranges:
        if one.start >= one.end:
            yield f"its range {one} is empty"


def _as_partitioned(rows: pa.Table, levels: Sequence[PartitionColumn]) -> pa.Table:
    """Rows as they were when their directory was chosen.

    A column of whole numbers may have become DOUBLE since: the file was written with the columns of
    its last row, and the earlier numbers are still whole.
    """
    for name in {level.column for level in levels} & set(rows.column_names):
        column = rows.column(name)
        if pa.types.is_floating(column.type):
            whole = pc.equal(pc.floor(column), column)
            if pc.all(whole).as_py() is not False:
                rows = rows.set_column(
                    rows.column_names.index(name), name, pc.cast(column, pa.int64(), safe=False)
                )
    return rows


# -- overlapping ranges ----------------------------------------------------------------------


class _Claim(NamedTuple):
    """A range of a file, and only the compared fields of the file, since there may be many."""

    start: int
    end: int
    path: str
    epoch: int
    batch: int
    mixed: bool
    rewritten: bool


def overlaps(files: Iterable[ManifestFile], resets: Resets) -> list[tuple[str, str]]:
    """Path and reason for each file that claims offsets of another file."""
    claims: dict[tuple[object, ...], list[_Claim]] = defaultdict(list)
    for file in files:
        if is_replayed(file) or (is_mixed(file) and file.replaces):
            continue
        where = (tuple(file.partition.items()), file.scope)
        for one in file.ranges:
            claims[*where, one.topic, one.partition].append(
                _Claim(
                    one.start,
                    one.end,
                    file.path,
                    file.epoch,
                    file.batch,
                    is_mixed(file),
                    bool(file.replaces),
                )
            )
    found: list[tuple[str, str]] = []
    for (*_, topic, number), own in claims.items():
        tp = TopicPartition(str(topic), int(str(number)))
        found += _of_partition(tp, own, resets.get(tp, {}))
    return found


def _of_partition(
    tp: TopicPartition, claims: list[_Claim], resets: Mapping[int, Position]
) -> Iterable[tuple[str, str]]:
    """Sweep: each claim is compared with those that have not ended before its start."""
    under_way: list[_Claim] = []
    for one in sorted(claims, key=lambda claim: claim[:2]):
        under_way = [other for other in under_way if other.end > one.start]
        for other in under_way:
            shared = SourceRange(*tp, one.start, min(one.end, other.end))
            if not _allowed(shared, one, other, resets):
                yield (
                    one.path,
                    f"offsets {shared.start} to {shared.end} of {tp} are in {other.path} too",
                )
        under_way.append(one)


def _allowed(
    shared: SourceRange, one: _Claim, other: _Claim, resets: Mapping[int, Position]
) -> bool:
    together = (one.epoch, one.batch) == (other.epoch, other.batch)
    if together and one.mixed and other.mixed:
        return True
    if (together or one.rewritten or other.rewritten) and shared.end - shared.start == 1:
        return True
    first, last = sorted((one.epoch, other.epoch))
    return any(first < epoch <= last and at <= shared.start for epoch, at in resets.items())
