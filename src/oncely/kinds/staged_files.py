"""Rows as files: staged by a task, and written.

No file stays open: rows wait as Arrow, and a file is encoded and written at once. So ten thousand
partitions need memory for their rows only.

A group's rows are written when they reach the target size. When memory is used up the largest
groups are written, until half of it is free, so that small groups have time to grow.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from oncely.core.batch import Chunk, IntArray, Rejection, Staged, StagedRowsGone
from oncely.core.change import Reprocessed
from oncely.core.claim import Fence
from oncely.core.ranges import TopicPartition
from oncely.decode.avro_schema import avro_schema_of, schema_id
from oncely.decode.infer import typed
from oncely.decode.merging import CAPS, CannotMerge, merge
from oncely.decode.schema import same_schema
from oncely.errors import check
from oncely.kinds.conform import conform
from oncely.kinds.data_file import (
    VALUE,
    AvroFiles,
    FileFormat,
    Format,
    ParquetFiles,
    Receipt,
    Scope,
    WrittenFile,
    encode,
)
from oncely.kinds.gathered import (
    Description,
    Gathered,
    Ints,
    Origin,
    describe,
    file_starts,
    joined,
    whole_records,
)
from oncely.kinds.partitions import (
    FileNames,
    PartitionColumn,
    Rejected,
    Splitter,
    Values,
    directory,
    split,
)
from oncely.kinds.rows import NO_SINGLE_RECORD, row_refused
from oncely.stores.objects.store import Bytes, Store, Uploads

__all__ = ["FileWriter", "Origin"]

_KINDS: dict[Format, type[AvroFiles] | type[ParquetFiles]] = {
    "avro": AvroFiles,
    "parquet": ParquetFiles,
}
_BESIDE = 24  # bytes per row besides its columns
_PIECE = 8_000_000  # bytes of Arrow that are sorted and encoded at a time
_SHARE = 4  # full groups are written when they are this fraction of the waiting rows
_LOOKS = 16  # checks while a file, or the memory, fills
_SAMPLE = 2_000  # rows
_THREADS = 16


# CLOCK_BOOTTIME keeps counting while the process or the machine is suspended.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    """Seconds on a clock that also counts while the process or the machine is suspended."""
    return time.clock_gettime(_CLOCK)


def refuse_old(began: float, max_age: float) -> None:
    """Refuse files of a batch that began so long ago, by :func:`clock`, that they may be gone.

    Raises:
        StagedRowsGone: they are older than ``max_age``, in seconds.
    """
    age = clock() - began
    if age > max_age:
        raise StagedRowsGone(
            f"files of this batch may be {age:.0f} s old, and sink.max_staging_age is"
            f" {max_age:g} s: they may have been vacuumed; the batch is repeated"
        )


class FileWriter:
    """Writes the rows of one task. Not thread-safe.

    After an error of any method only :meth:`abandon` may be called.

    Args:
        store: the store of the files.
        format: ``avro`` or ``parquet``.
        columns: the columns of ``sink.partition_by``.
        target_bytes: approximate size of a file.
        memory_bytes: memory of waiting rows; the peak is twice as much and about 150 MB.
        names: the names of the attempt's files.
    """

    def __init__(
        self,
        store: Store,
        format: Format,
        columns: Sequence[PartitionColumn],
        target_bytes: int,
        memory_bytes: int,
        names: FileNames,
    ) -> None:
        self._kind, self._columns, self._names = _KINDS[format], tuple(columns), names
        self._target, self._memory = target_bytes, memory_bytes
        self._plain = [i for i, one in enumerate(columns) if one.kind == "column"]
        self._splitter = Splitter(columns)
        self._uploads = Uploads(store, _THREADS)
        self._sources: dict[tuple[str, int], int] = {}
        self._formats: dict[pa.Schema, AvroFiles | ParquetFiles] = {}
        self._newest: dict[Scope, pa.Schema] = {}
        self._waiting: list[tuple[Scope | None, Gathered]] = []
        self._waits = np.zeros(0, np.int64)  # rows by group
        self._bytes = self._rows = 0
        self._look_at = 0  # waiting bytes at which the sizes of groups are checked again
        self._arrow = self._encoded = 0  # bytes, of the files written so far
        self._files: list[WrittenFile] = []
        self._schemas: dict[str, str] = {}

    def add(self, rows: pa.Table, origin: Origin | None, scope: Scope | None) -> list[Rejected]:
        """Add rows; rejected rows are not written, nor is any row of their records.

        Args:
            rows: the rows, of any schema that files support; for a scope, one that extends the
                earlier ones. In order of offset within a topic-partition, if files shall have that
                order.
            origin: the origin of the rows; None if a transform has mixed them. Either always None
                or never.
            scope: the scope of the rows' schema; None if each row's scope follows from its values.

        Returns:
            Index of each row that cannot be partitioned, and the reason; ascending.

        Raises:
            TableMismatch: a column that can't be stored in a file.
            Unavailable, Stopped, ConfigError: see :class:`Store`.
        """
        self._format(rows.schema)
        split = self._splitter.split(rows)
        gathered = Gathered(rows, split.codes, *self._origin(origin), split.times)
        if split.rejected:
            gathered = gathered.taken(np.flatnonzero(~whole_records(gathered, split.codes < 0)))
        if gathered.count:
            if scope is not None:
                self._newest[scope] = rows.schema
            self._waiting.append((scope, gathered))
            self._count(gathered)
            if self._used >= self._look_at:
                self._make_room()
                self._look_at = self._used + min(self._target, self._memory) // _LOOKS
        return split.rejected

    def finish(self) -> Receipt:
        """Write the waiting rows; when this returns, all files are durable."""
        self._write(None)
        self._uploads.complete()
        return Receipt(self._files, self._schemas)

    def abandon(self) -> None:
        """Delete the written files, best effort; names are unique, so vacuum removes the rest."""
        self._waiting, self._files = [], []
        self._uploads.undo()

    def _origin(self, origin: Origin | None) -> tuple[Ints | None, Ints | None]:
        if origin is None:
            return None, None
        ours = [self._sources.setdefault(tp, len(self._sources)) for tp in origin.partitions]
        index = np.asarray(ours, np.int32)[np.asarray(origin.index)]
        return index, np.asarray(origin.offset, np.int64)

    def _format(self, schema: pa.Schema) -> AvroFiles | ParquetFiles:
        known = self._formats.get(schema)
        if known is None:
            known = self._formats[schema] = self._kind(schema)
        return known

    def _count(self, gathered: Gathered) -> None:
        missing = self._splitter.groups - len(self._waits)
        if missing > 0:  # double the size, or many small tables would cost quadratic time
            grown = np.zeros(len(self._waits) + missing, np.int64)
            self._waits = np.concatenate([self._waits, grown])
        np.add.at(self._waits, gathered.codes, 1)
        self._bytes += gathered.rows.nbytes
        self._rows += gathered.count

    @property
    def _used(self) -> int:
        """The number of waiting bytes."""
        return self._bytes + _BESIDE * self._rows

    def _make_room(self) -> None:
        """Write full groups, and more groups if memory is used up."""
        each = self._bytes / self._rows
        if self._rows * each >= self._target:
            full = self._waits * each * self._ratio() >= self._target
            if self._waits[full].sum() * _SHARE >= self._rows or (
                full.any() and self._used >= self._memory
            ):
                self._write(full)
        if self._used >= self._memory:
            largest = np.argsort(-self._waits, kind="stable")
            enough = np.searchsorted(np.cumsum(self._waits[largest]), self._rows // 2) + 1
            goes = np.zeros(len(self._waits), bool)
            goes[largest[:enough]] = True
            self._write(goes)

    def _ratio(self) -> float:
        """Bytes of a file per byte of Arrow so far; at first measured on a few rows."""
        if not self._arrow:
            gathered = self._waiting[-1][1]
            sample = gathered.rows.slice(0, _SAMPLE)
            files = self._format(sample.schema)
            count = min(_SAMPLE, gathered.count)
            encoded = len(files.prepare(sample)(0, count)) - files.overhead
            return float(max(1, encoded) / max(1, sample.nbytes))
        return float(self._encoded / self._arrow)

    def _write(self, chosen: Ints | None) -> None:
        """Write the waiting rows of the chosen groups, or of all; the others keep waiting."""
        waiting, self._waiting = self._waiting, []
        self._waits[:] = 0
        self._bytes = self._rows = 0
        families: dict[tuple[pa.Schema, bool], list[Gathered]] = {}
        for scope, gathered in waiting:
            schema = gathered.rows.schema if scope is None else self._newest[scope]
            families.setdefault((schema, scope == ()), []).append(gathered)
        del waiting
        while families:  # in order of arrival; written rows are released
            schema, one_scope = next(iter(families))
            gathered = joined(families.pop((schema, one_scope)), schema)
            order = gathered.order(self._splitter.groups)
            if chosen is not None:
                goes = chosen[gathered.codes[order]]
                kept = np.sort(order[~goes])
                order = order[goes]
                if len(kept):
                    stays = gathered.taken(kept)
                    self._waiting.append((() if one_scope else None, stays))
                    self._count(stays)
            self._write_family(gathered, order, one_scope)
        pa.default_memory_pool().release_unused()  # else the next half would be allocated on top

    def _write_family(self, gathered: Gathered, order: Ints, one_scope: bool) -> None:
        """Write rows of one schema in this order, in pieces that end at the end of a file."""
        if not len(order):
            return
        files = self._format(gathered.rows.schema)
        each = max(1.0, gathered.rows.nbytes / gathered.count)
        rows = max(1, int(self._target / (each * self._ratio_of(gathered))))
        starts = file_starts(gathered, order, rows)
        ends = np.append(starts[1:], len(order))
        first = 0
        while first < len(starts):
            most = starts[first] + max(1, int(_PIECE / each))
            last = max(first + 1, int(np.searchsorted(ends, most, side="right")))
            piece = gathered.taken(order[starts[first] : ends[last - 1]])
            self._write_piece(piece, starts[first:last] - starts[first], files, one_scope)
            first = last

    def _ratio_of(self, gathered: Gathered) -> float:
        if not self._arrow:
            self._waiting.append((None, gathered))
            try:
                return self._ratio()
            finally:
                self._waiting.pop()
        return self._ratio()

    def _write_piece(
        self, piece: Gathered, starts: Ints, files: AvroFiles | ParquetFiles, one_scope: bool
    ) -> None:
        prepared = files.prepare(piece.rows)
        described = describe(piece, starts, list(self._sources))
        ends = [*starts[1:].tolist(), piece.count]
        codes = piece.codes[starts].tolist()
        self._schemas[files.id] = files.avro
        for what, code, start, end in zip(described, codes, starts.tolist(), ends, strict=True):
            data = prepared(start, end - start)
            self._write_file(data, code, end - start, what, files, one_scope)
            self._encoded += len(data) - files.overhead
        self._arrow += max(1, piece.rows.nbytes)

    def _scope(self, values: Values, schema: pa.Schema) -> Scope:
        names = [self._columns[i].column for i in self._plain]
        return typed([values[i] for i in self._plain], names, schema)

    def _write_file(
        self,
        data: Bytes,
        code: int,
        rows: int,
        what: Description,
        files: AvroFiles | ParquetFiles,
        one_scope: bool,
    ) -> None:
        values = self._splitter.values(code)
        name = self._names.name(what.first, files.extension)
        path = f"{directory(self._columns, values)}/{name}" if values else name
        self._uploads.write(path, data)
        self._files.append(
            WrittenFile(
                path=path,
                rows=rows,
                bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
                partition={c.name: v for c, v in zip(self._columns, values, strict=True)},
                event_time=what.event_time,
                ranges=what.ranges,
                scope=() if one_scope else self._scope(values, files.schema),
                schema=files.id,
            )
        )


_MEMORY = 192 << 20  # bytes of rows that wait for their files
_PARTITION, _OFFSET, _ABOUT = "_oncely_partition", "_oncely_offset", b"oncely"


class _Part(NamedTuple):
    """Rows of one scope, and the record in the chunk of each row."""

    scope: Scope
    rows: pa.Table
    record: IntArray


class FilesTask:
    """One task's files; see :class:`oncely.kinds.base.StagingTask`.

    Args:
        store: the store of the files.
        form: the format of the files.
        known: schemas by scope, as they were published when the batch began.
        fence, batch_id, attempt: parts of the files' names, which are unique to the attempt.
    """

    def __init__(
        self,
        store: Store,
        form: FileFormat,
        known: Mapping[Scope, pa.Schema],
        fence: Fence,
        batch_id: int,
        attempt: int,
    ) -> None:
        self._form, self._batch = form, batch_id
        self._published, self._known = known, dict(known)
        self._infer = form.inferring() if form.schema is None else None
        names = FileNames(fence.epoch, batch_id, str(attempt))
        self._writer = FileWriter(
            store, form.format, form.columns, form.target_bytes, _MEMORY, names
        )
        self._rows = 0
        self._conflicts: list[CannotMerge] = []

    def add(self, chunk: Chunk) -> list[Rejection]:
        """Write the rows of a chunk, and return the records that cannot be written."""
        parts, refused = self._parts(chunk)
        for scope, rows, record in parts:
            origin = Origin(chunk.partitions, chunk.partition[record], chunk.offset[record])
            bad = _rejections(self._writer.add(rows, origin, scope), record)
            refused += bad
            gone = [one.record for one in bad]  # none of their rows was added
            self._rows += int((~np.isin(record, gone)).sum())
        return _one_each(refused)

    def add_rows(self, rows: pa.Table) -> None:
        """Write rows that come from no single record.

        Raises:
            Stopped: a row cannot be written, and it belongs to no single record.
        """
        if bad := self._writer.add(rows, None, ()):
            raise row_refused(bad[0][1], NO_SINGLE_RECORD)
        self._rows += rows.num_rows

    def of_transform(self, rows: Iterable[pa.Table]) -> Staged:
        """All rows of a Spark transform; a failed task leaves no output."""
        try:
            for table in rows:
                self.add_rows(table)
            return self.finish()
        except BaseException:
            self.abandon()
            raise

    def of_replay(self, judged: Reprocessed) -> tuple[Staged, list[Rejection]]:
        """The rows of dead letters; returns the staged output and the refused records."""
        refused = list(judged.chunk.rejections)
        if judged.traceable:
            refused += self.add(judged.chunk)
        else:
            self.add_rows(judged.chunk.rows)
        return self.finish(), sorted(refused)

    def pack(self, chunk: Chunk, buckets: int) -> tuple[list[tuple[int, bytes]], list[Rejection]]:
        """The rows in packets, with one bucket for each directory in all tasks."""
        parts, refused = self._parts(chunk)
        packets = []
        for scope, rows, record in parts:
            found = split(rows, self._form.columns)
            bad = _rejections(found.rejected, record)
            refused += bad
            gone = np.isin(record, [one.record for one in bad])
            bucket = np.array([_bucket(group, buckets) for group in found.groups] or [0])
            of_row = np.where(gone, -1, bucket[found.codes])
            about = {"scope": scope, "partitions": chunk.partitions}
            whole = rows.append_column(
                _PARTITION, pa.array(chunk.partition[record], pa.int32())
            ).append_column(_OFFSET, pa.array(chunk.offset[record], pa.int64()))
            whole = whole.replace_schema_metadata({_ABOUT: msgspec.json.encode(about)})
            for one in np.unique(of_row[of_row >= 0]).tolist():
                packets.append((one, _ipc(whole.filter(pa.array(of_row == one)))))
        return packets, _one_each(refused)

    def add_packet(self, packet: pa.Buffer) -> int:
        """Write a packet's rows.

        Tasks before the shuffle may have inferred incompatible types. The driver detects that from
        their answers, and has the batch staged again; until then these rows are dropped.
        """
        rows = pa.ipc.open_stream(packet).read_all()
        about = msgspec.json.decode(rows.schema.metadata[_ABOUT], type=_About)
        origin = Origin(
            tuple(TopicPartition(*one) for one in about.partitions),
            rows[_PARTITION].to_numpy(),
            rows[_OFFSET].to_numpy(),
        )
        rows = rows.drop_columns([_PARTITION, _OFFSET]).replace_schema_metadata(None)
        if self._widened(about.scope, rows.schema) and not self._conflicts:
            self._rows += rows.num_rows
            bad = self._writer.add(conform(rows, self._known[about.scope]), origin, about.scope)
            check(not bad, f"a row that was sent can't be written: {bad[:1]}")
        return int(rows.num_rows)

    def finish(self) -> Staged:
        """Write the remaining rows, and return the receipt of all files."""
        if self._conflicts:
            self.abandon()
            return Staged(None, 0)
        done = self._writer.finish()
        schemas, grown = dict(done.schemas), []
        for scope, schema in self._known.items():
            new = not same_schema(self._published.get(scope), schema)
            if self._form.schema is None and new:
                avro = avro_schema_of(schema)
                schemas[schema_id(avro)] = avro
                grown.append((scope, schema_id(avro)))
        receipt = Receipt(done.files, schemas, grown, self._batch)
        return Staged(encode(receipt).decode(), self._rows)

    def abandon(self) -> None:
        """Remove the files, as far as possible; remaining files are orphans."""
        self._writer.abandon()

    def _parts(self, chunk: Chunk) -> tuple[list[_Part], list[Rejection]]:
        """The chunk's rows by scope; if columns are inferred, also the records without rows."""
        if self._infer is None:
            return [_Part((), chunk.rows, chunk.row_record)], []
        found = self._infer.infer(chunk.rows[VALUE], self._known)
        self._known |= found.known
        parts = [
            _Part(one.scope, one.rows, chunk.row_record[np.asarray(one.row_record)])
            for one in found.parts
        ]
        return parts, [_refused(chunk, one) for one in found.rejections]

    def _widened(self, scope: Scope, schema: pa.Schema) -> bool:
        """Merge a schema that another task has inferred; False if it is incompatible."""
        known = self._known.get(scope)
        try:
            self._known[scope] = schema if known is None else merge(known, schema, CAPS)
        except CannotMerge as conflict:
            self._conflicts.append(conflict)
            return False
        return True


def sampled(form: FileFormat, chunk: Chunk) -> Chunk:
    """A sample with the columns that are inferred from it; its rows are those of one scope."""
    if form.schema is not None:
        return chunk
    found = form.inferring().infer(chunk.rows[VALUE], {})
    refused = [_refused(chunk, one) for one in found.rejections]
    kept = [chunk.row_record[np.asarray(part.row_record)] for part in found.parts]
    rows = found.parts[0].rows if found.parts else chunk.rows.slice(0, 0)
    record = np.concatenate([chunk.row_record[:0], *kept])
    rejections = (*chunk.rejections, *refused)
    return replace(chunk, rows=rows, row_record=record, rejections=rejections)


def _refused(chunk: Chunk, one: Rejection) -> Rejection:
    """A rejection of the record of a row."""
    return one._replace(record=int(chunk.row_record[one.record]))


class _About(msgspec.Struct):
    scope: Scope
    partitions: list[tuple[str, int]]


def _bucket(group: tuple[str | None, ...], buckets: int) -> int:
    """A hash that is the same in every process."""
    return zlib.crc32(msgspec.json.encode(group)) % buckets


def _ipc(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    packet: bytes = sink.getvalue().to_pybytes()
    return packet


def _rejections(bad: Iterable[tuple[int, str]], record: IntArray) -> list[Rejection]:
    return [Rejection(int(record[row]), "write", reason) for row, reason in bad]


def _one_each(refused: Iterable[Rejection]) -> list[Rejection]:
    """One rejection for each record, of which several rows may be refused."""
    first: dict[int, Rejection] = {}
    for one in refused:
        first.setdefault(one.record, one)
    return [first[record] for record in sorted(first)]
