"""A task of the files sink: infers the columns of its rows, and writes files below the root."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from oncely.core.batch import Chunk, IntArray, Rejection, Staged
from oncely.core.claim import Fence
from oncely.core.ranges import TopicPartition
from oncely.decode.avro_names import avro_schema_of, schema_id
from oncely.decode.merging import CAPS, CannotMerge, merge
from oncely.decode.schema import same_schema
from oncely.errors import check
from oncely.lake.conform import conform
from oncely.lake.file_format import VALUE, FileFormat
from oncely.lake.partitions import FileNames, split
from oncely.lake.records import Receipt, Scope, encode
from oncely.sinks.base import NO_SINGLE_RECORD, row_refused
from oncely.sinks.files.writer import FileWriter, Origin
from oncely.stores.objects.store import Store

_MEMORY = 192 << 20  # bytes of rows that wait for their files
_PARTITION, _OFFSET, _ABOUT = "_oncely_partition", "_oncely_offset", b"oncely"


class _Part(NamedTuple):
    """Rows of one scope, and the record in the chunk of each row."""

    scope: Scope
    rows: pa.Table
    record: IntArray


class FilesTask:
    """One task's files; see :class:`oncely.sinks.base.StagingTask`.

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
        refused = [
            Rejection(int(chunk.row_record[one.record]), one.stage, one.reason)
            for one in found.rejections
        ]
        return parts, refused

    def _widened(self, scope: Scope, schema: pa.Schema) -> bool:
        """Merge a schema that another task has inferred; False if it is incompatible."""
        known = self._known.get(scope)
        try:
            self._known[scope] = schema if known is None else merge(known, schema, CAPS)
        except CannotMerge as conflict:
            self._conflicts.append(conflict)
            return False
        return True


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
