"""Data files: Arrow to Avro object container files and back (Avro 1.11, "Object Container Files"),
and to Parquet and back, with the same schema for the same rows. :class:`FileFormat` is the format
of a pipeline's files, :class:`Receipt` what a task tells of those that it has written.

polars encodes the rows of Avro files, about forty times faster than Python. Its header is replaced:
the new header has the field names and logical types that polars does not support, a sync marker of
the file's own (polars writes the same marker into each file) and the schema's id. The bytes of rows
fit both, because :mod:`oncely.decode.avro_schema` describes the encoding of polars.

polars encodes a row in about 100 ns, and needs 50 µs for a file of any size. So it encodes the rows
of many files at once, and the bytes are cut between rows. The length of a row follows from its
values (Avro 1.11, "Binary Encoding"); every field and every item is a union with null, whose index
is one byte.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.avro_schema import (
    arrow_schema_of,
    avro_name,
    avro_schema_of,
    schema_id,
    storable,
)
from oncely.decode.infer import InferringJson
from oncely.decode.merging import CAPS
from oncely.errors import InvariantViolation, TableMismatch
from oncely.extras import polars as pl
from oncely.kinds.conform import conform, recast
from oncely.kinds.partitions import EventTime, PartitionColumn
from oncely.stores.objects.store import Bytes

Format = Literal["avro", "parquet"]
Scope = tuple[str | None, ...]


class SourceRange(msgspec.Struct, frozen=True, array_like=True):
    """Offsets ``[start, end)`` of a topic-partition that contain all records of a file."""

    topic: str
    partition: int
    start: int
    end: int


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that a task has written, complete and closed.

    Attributes:
        path: the path below the root, ``/`` between the parts, values percent-encoded.
        rows: the number of rows, at least one.
        bytes: the size in bytes.
        sha256: the SHA-256 of its bytes, in hex.
        partition: the values of the directories: name to the value's text, None for no value.
        event_time: first and last instant of the column of ``date`` and ``hour``, in microseconds
            since 1970 UTC; None without such a column or without a value.
        ranges: the source ranges of its records; empty if a Spark transform mixed them.
        scope: the scope of its schema.
        schema: the id of the file's own schema, see ``schemas`` of :class:`Receipt`.
    """

    path: str
    rows: int
    bytes: int
    sha256: str
    partition: dict[str, str | None]
    event_time: tuple[int, int] | None
    ranges: list[SourceRange]
    scope: Scope
    schema: str


class Receipt(msgspec.Struct, frozen=True):
    """The message of a task to the driver about its files.

    Attributes:
        files: the files that it has written.
        schemas: the schemas of its files, and extended schemas, id to Avro schema in JSON.
        grown: the scopes whose schema the task has extended, and the id of the extended schema.
        batch: the number of the batch in its run.
    """

    files: list[WrittenFile]
    schemas: dict[str, str]
    grown: list[tuple[Scope, str]] = []
    batch: int = 0


def encode(what: msgspec.Struct) -> bytes:
    """As JSON."""
    return msgspec.json.encode(what)


def read_receipt(text: str) -> Receipt:
    """Parse the receipt of a task."""
    return msgspec.json.decode(text, type=Receipt)


VALUE = "value"
"""The single column of rows whose columns are inferred: the record's bytes."""


@dataclass(frozen=True)
class FileFormat:
    """Attributes of the files of a pipeline.

    Attributes:
        format: the format of each file.
        columns: the columns that determine a row's directory.
        schema: the schema of every row; None: inferred by scope.
        target_bytes: the target size of a file, in bytes.
    """

    format: Format
    columns: tuple[PartitionColumn, ...]
    schema: pa.Schema | None
    target_bytes: int = 64 << 20

    @property
    def scope_columns(self) -> tuple[str, ...]:
        """The columns whose values select a schema; empty if the schema is fixed."""
        if self.schema is not None:
            return ()
        return tuple(one.column for one in self.columns if one.kind == "column")

    def inferring(self) -> InferringJson:
        """The decoder that infers columns, if :attr:`schema` is None."""
        times = {one.column for one in self.columns if one.kind != "column"}
        return InferringJson(self.scope_columns, CAPS, *map(EventTime, times))


SCHEMA_ID = "oncely.schema.id"
"""The header's key for the schema's id."""

_MAGIC = b"Obj\x01"
_SYNC = 16
_BLOCK = 256_000  # bytes: a reader buffers a block at a time
_SNAPPY = pa.Codec("snappy")
_UTC, _NAIVE = pa.timestamp("us", "UTC"), pa.timestamp("us")
_NO_COLUMNS = avro_schema_of(pa.schema([])).encode()
# Rows without columns: no bytes, in Snappy's form, and their CRC-32.
_NOTHING = b"\x0a\x00\x00\x00\x00\x00"

Contents = Callable[[int, int], Bytes]
"""Returns the content of a file, by the number of its first row and of its rows."""


class AvroFiles:
    """Files of one schema.

    Attributes:
        schema: the columns of the rows, storable.
        avro: the Avro schema, as JSON.
        id: the id of ``avro``.
        overhead: the size of a file without rows, in bytes.
    """

    extension = "avro"

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = storable(schema)
        self.avro = avro_schema_of(self.schema)
        self.id = schema_id(self.avro)
        meta = {
            "avro.schema": self.avro,
            "avro.codec": "snappy",
            SCHEMA_ID: self.id,
        }
        pairs = b"".join(_text(key) + _text(value) for key, value in meta.items())
        self._head = _MAGIC + _long(len(meta)) + pairs + b"\x00"
        self.overhead = len(self._head) + 2 * _SYNC

    def prepare(self, rows: pa.Table) -> Contents:
        """The contents of files with these rows, which are converted to the schema once.

        Args:
            rows: of any schema that this one extends.
        """
        if not len(self.schema):
            return partial(self._file, None)
        rows = conform(rows, self.schema)
        given = pa.schema([pa.field(f.name, _given(f.type)) for f in self.schema])
        rows = conform(rows, given)
        # Names are not written into the file, and polars accepts neither empty nor repeated names.
        rows = rows.rename_columns([str(i) for i in range(rows.num_columns)]).combine_chunks()
        return partial(self._file, _Encoded(rows))

    def _file(self, encoded: _Encoded | None, start: int, rows: int) -> bytes:
        sync = os.urandom(_SYNC)
        out: list[bytes] = [self._head, sync]
        if encoded is None:
            out += [_long(rows), _NOTHING, sync]
            return b"".join(out)
        for count, block in encoded.blocks(start, rows):
            packed = _SNAPPY.compress(block, asbytes=True)
            checksum = zlib.crc32(block).to_bytes(4, "big")
            out += [_long(count), _long(len(packed) + len(checksum)), packed, checksum, sync]
        return b"".join(out)


class _Encoded:
    """The bytes of rows in sequence, and the end of each row."""

    def __init__(self, rows: pa.Table) -> None:
        frame = pl.from_arrow(rows, rechunk=True)
        written = io.BytesIO()
        if not isinstance(frame, pl.DataFrame):
            raise InvariantViolation("a table became no frame")
        frame.write_avro(written, compression="uncompressed")
        data = written.getbuffer()
        begin = _header_length(data)
        count, begin = _read_long(data, begin)
        size, begin = _read_long(data, begin)
        self._ends = row_ends(rows)
        # One block, of exactly the size of its rows: otherwise a cut could fall inside a block
        # header.
        whole = begin + size + _SYNC == len(data) and self._ends[-1] == size
        if count != rows.num_rows or not whole:
            raise InvariantViolation("polars encodes rows in an unknown way")
        self._bytes = data[begin : begin + size]

    def blocks(self, start: int, rows: int) -> Iterator[tuple[int, memoryview]]:
        """Bytes of some of the rows, in blocks of a convenient size for readers."""
        at, end = start, start + rows
        while at < end:
            room = self._ends[at] + _BLOCK
            following = min(end, max(at + 1, int(np.searchsorted(self._ends, room, "right")) - 1))
            yield following - at, self._bytes[self._ends[at] : self._ends[following]]
            at = following


def read_avro(data: bytes) -> pa.Table:
    """The rows of a file that Oncely wrote, in its own schema.

    Raises:
        InvariantViolation: it is not such a file, or it is damaged.
    """
    meta = header(data)
    count = _count(data)
    if meta["avro.schema"] == _NO_COLUMNS:
        return pa.table({"": pa.nulls(count)}).select([])
    schema = arrow_schema_of(meta["avro.schema"].decode())
    if not count:  # polars panics without rows
        return schema.empty_table()
    try:
        frame = pl.read_avro(io.BytesIO(data))
    except (
        Exception,
        pl.exceptions.PanicException,
    ) as error:  # not a subclass of Exception
        raise InvariantViolation(f"this is no Avro file of ours: {error}") from None
    rows = frame.to_arrow()
    columns = [recast(rows.column(i), f.type, f.name, avro_name) for i, f in enumerate(schema)]
    return pa.table(columns, schema=schema)


def header(data: bytes) -> dict[str, bytes]:
    """The metadata of a file.

    Raises:
        InvariantViolation: it is not an Avro file.
    """
    found: dict[str, bytes] = {}
    try:
        _header_length(memoryview(data), found)
    except IndexError:
        raise InvariantViolation("this is no Avro file") from None
    if "avro.schema" not in found:
        raise InvariantViolation("an Avro file without a schema")
    return found


def _header_length(data: memoryview, found: dict[str, bytes] | None = None) -> int:
    """The offset of the first block, after the sync marker."""
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise InvariantViolation("this is no Avro file")
    count, at = _read_long(data, len(_MAGIC))
    while count:
        if count < 0:  # a block of pairs that begins with its size
            _, at = _read_long(data, at)
        for _ in range(abs(count)):
            key, at = _read_text(data, at)
            value, at = _read_text(data, at)
            if found is not None:
                found[key.decode(errors="replace")] = value
        count, at = _read_long(data, at)
    return at + _SYNC


def _count(data: bytes) -> int:
    """The number of rows according to the file's blocks."""
    view, rows = memoryview(data), 0
    at = _header_length(view)
    while at < len(view):
        try:
            count, at = _read_long(view, at)
            size, at = _read_long(view, at)
        except IndexError:
            raise InvariantViolation("an Avro file that ends inside a block") from None
        rows, at = rows + count, at + size + _SYNC
    if at != len(view):
        raise InvariantViolation("an Avro file that ends inside a block")
    return rows


def _given(arrow: pa.DataType) -> pa.DataType:
    """The type passed to polars, so that it writes the bytes of ``arrow``.

    It does not write timestamps with a zone: the numbers are the same, and our header has the zone.
    It writes wrong decimals: they are passed as bytes.
    """
    if arrow == _UTC:
        return _NAIVE
    if pa.types.is_decimal(arrow):
        return pa.binary()
    if pa.types.is_struct(arrow):
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        return pa.struct([pa.field(f.name, _given(f.type)) for f in fields])
    return pa.list_(_given(arrow.value_type)) if pa.types.is_list(arrow) else arrow


def _text(value: str) -> bytes:
    data = value.encode()
    return _long(len(data)) + data


def _long(number: int) -> bytes:
    """Zigzag, then seven bits per byte."""
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def _read_long(data: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
        shift += 7


def _read_text(data: memoryview, at: int) -> tuple[bytes, int]:
    length, at = _read_long(data, at)
    return bytes(data[at : at + length]), at + length


# -- the end of each row in the bytes of polars ----------------------------------------------


Lengths: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


_FIXED = {pa.bool_(): 1, pa.float32(): 4, pa.float64(): 8}


def row_ends(rows: pa.Table) -> Lengths:
    """The end of each row, in bytes, after a first 0: one number more than rows.

    Args:
        rows: the rows that were passed to polars, each column in one chunk.

    Raises:
        InvariantViolation: a type that files do not support.
    """
    total = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        for array in column.chunks if column.num_chunks == 1 else [column.combine_chunks()]:
            total += _lengths(array)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(total)])


def _lengths(array: pa.Array) -> Lengths:
    """Bytes of each value, with the index of its union."""
    inside = _inside(array)
    if array.null_count:
        inside = np.where(pc.is_valid(array).to_numpy(zero_copy_only=False), inside, 0)
    return inside + 1


def _inside(array: pa.Array) -> Lengths:
    arrow = array.type
    if arrow in _FIXED:
        return np.full(len(array), _FIXED[arrow])
    if pa.types.is_integer(arrow) or pa.types.is_temporal(arrow):
        return _of_longs(array)
    if pa.types.is_string(arrow) or pa.types.is_binary(arrow):
        sizes: Lengths = np.diff(_offsets(array))
        return sizes + _digits(sizes.astype(np.uint64) << np.uint64(1))
    if pa.types.is_struct(arrow):
        fields = (array.field(i) for i in range(arrow.num_fields))
        found: Lengths = np.sum([_lengths(field) for field in fields], axis=0, dtype=np.int64)
        return found
    if pa.types.is_list(arrow):
        return _of_lists(array)
    raise InvariantViolation(f"{arrow} is not a type of files")


def _of_longs(array: pa.Array) -> Lengths:
    wide = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    if wide.null_count:
        wide = pc.fill_null(wide, 0)
    numbers = wide.to_numpy(zero_copy_only=False).astype(np.int64)
    return _digits(((numbers << 1) ^ (numbers >> 63)).view(np.uint64))


def _of_lists(array: pa.ListArray) -> Lengths:
    """A block with its count and its items, unless it is empty, and the empty block at the end."""
    offsets = _offsets(array)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(_lengths(array.values))])
    counts = np.diff(offsets)
    heads = np.where(counts > 0, _digits(counts.astype(np.uint64) << np.uint64(1)), 0)
    items: Lengths = ends[offsets[1:]] - ends[offsets[:-1]]
    return items + heads + 1


def _offsets(array: pa.Array) -> Lengths:
    """The offsets of values in the array's buffers."""
    if not len(array):
        return np.zeros(1, np.int64)
    if pa.types.is_list(array.type):
        return np.asarray(array.offsets.to_numpy(), np.int64)
    found = np.frombuffer(array.buffers()[1], np.int32)[array.offset :][: len(array) + 1]
    return found.astype(np.int64)


def _digits(numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> Lengths:
    """The number of bytes of integers with seven bits per byte."""
    found = np.ones(len(numbers), np.int64)
    largest = int(numbers.max()) if len(numbers) else 0
    for bits in range(7, 64, 7):
        if largest >> bits == 0:
            break
        found += numbers >= np.uint64(1 << bits)
    return found


# -- Parquet ---------------------------------------------------------------------------------


_AVRO = "oncely.schema"


class ParquetFiles:
    """Files of one schema; see :class:`AvroFiles`.

    Raises:
        TableMismatch: a type that files do not support, or no column at all.
    """

    extension = "parquet"
    overhead = 0

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = storable(schema)
        if not len(self.schema):
            raise TableMismatch("Parquet has no rows without columns", way_out='format = "avro"')
        self.avro = avro_schema_of(self.schema)
        self.id = schema_id(self.avro)
        self._head = self.schema.with_metadata({SCHEMA_ID: self.id, _AVRO: self.avro})

    def prepare(self, rows: pa.Table) -> Contents:
        """See :meth:`AvroFiles.prepare`."""
        return partial(_parquet, conform(rows, self.schema).cast(self._head))


def _parquet(rows: pa.Table, start: int, count: int) -> pa.Buffer:
    import pyarrow.parquet as pq

    out = pa.BufferOutputStream()
    pq.write_table(rows.slice(start, count), out, compression="snappy")
    return out.getvalue()


def read_parquet(data: bytes) -> pa.Table:
    """The rows of a file that Oncely wrote, in its own schema.

    Raises:
        InvariantViolation: it is not such a file, or it is damaged.
    """
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(pa.BufferReader(data))
        avro = (rows.schema.metadata or {})[_AVRO.encode()].decode()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InvariantViolation(f"this is no Parquet file of ours: {error}") from None
    return rows.cast(arrow_schema_of(avro))


def decoded(data: bytes, form: Format) -> pa.Table:
    """A file's bytes as rows, with the file's own columns.

    Raises:
        InvariantViolation: they are not a file of Oncely.
    """
    return read_avro(data) if form == "avro" else read_parquet(data)
