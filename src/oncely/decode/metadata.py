"""Parts of the Kafka record as columns: beside those that are decoded from its value and key, or
undecoded as the whole row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Rejection
from oncely.decode.base import Decoded, Decoder, InvalidRecord
from oncely.decode.columns import shortened
from oncely.decode.reference import utf8
from oncely.errors import ConfigError

TYPES: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "key": pa.string(),
    "headers": pa.string(),
}
"""The parts of a record, in the order of their columns, and the types of the columns."""
_ALWAYS = {"topic", "partition", "offset"}


class MetadataColumn(NamedTuple):
    """A column.

    Attributes:
        of: a name in :data:`TYPES`.
        column: the name of the column.
        header: the name of the header, if it is one.
    """

    of: str
    column: str
    header: str = ""

    @property
    def setting(self) -> str:
        """The key of the pipeline file."""
        return f"decode.metadata.{self.of}" + (f".{self.header}" if self.header else "")


@dataclass(frozen=True)
class WithMetadata:
    """Adds columns to the rows and tombstones of another decoder, behind its own.

    A missing timestamp, key or header, and a header without a value, are NULL. Of several headers
    with one name the last one counts. A key or header that is not UTF-8 is a rejection.

    Attributes:
        decoder: decodes value and key.
        parts: the columns.

    Raises:
        ConfigError: a column of this name is decoded from value or key.
    """

    decoder: Decoder
    parts: tuple[MetadataColumn, ...]

    def __post_init__(self) -> None:
        taken = {name.lower() for name in self.decoder.schema.names}
        for part in self.parts:
            if part.column.lower() in taken:
                raise ConfigError(
                    part.setting,
                    f"value or key has a column {part.column!r}, too",
                    way_out=f"give it another name, such as record_{part.column}",
                )

    @cached_property
    def _fields(self) -> tuple[pa.Field, ...]:
        return tuple(pa.field(part.column, TYPES[part.of]) for part in self.parts)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the decoder, and those of the parts."""
        return pa.schema([*self.decoder.schema, *self._fields])

    @property
    def needs(self) -> frozenset[str]:
        """The columns that are read; topic, partition and offset are always there."""
        return self.decoder.needs | ({part.of for part in self.parts} - _ALWAYS)

    def decode(self, records: pa.Table) -> Decoded:
        """Decode every record."""
        done = self.decoder.decode(records)
        bad: dict[int, str] = {}
        columns = [_column(part, records, bad) for part in self.parts]
        bad |= {one.record: one.reason for one in done.rejections}
        added = pa.table(columns, schema=pa.schema(self._fields))
        rows, row_record = _joined(done.rows, done.row_record, added, bad)
        tombstones, tombstone_record = done.tombstones, done.tombstone_record
        if tombstones is not None:
            tombstones, tombstone_record = _joined(tombstones, tombstone_record, added, bad)
        return Decoded(
            rows=rows,
            row_record=row_record,
            rejections=[Rejection(one, "decode", bad[one]) for one in sorted(bad)],
            tombstones=tombstones,
            tombstone_record=tombstone_record,
            dropped=done.dropped,
        )


def _joined(
    rows: pa.Table, of: pa.Int64Array, added: pa.Table, bad: dict[int, str]
) -> tuple[pa.Table, pa.Int64Array]:
    """Rows with the added columns of their records, without those of bad records."""
    if bad and (keep := ~np.isin(of, [*bad])).sum() < len(of):
        rows, of = rows.filter(pa.array(keep)), of.filter(pa.array(keep))
    if len(of) < len(added):
        added = added.take(of)
    for field, column in zip(added.schema, added.columns, strict=True):
        rows = rows.append_column(field, column)
    return rows, of


def _column(part: MetadataColumn, records: pa.Table, bad: dict[int, str]) -> pa.ChunkedArray:
    """The column of a part; records with texts that are not UTF-8 are added to ``bad``."""
    given = records.column(part.of)
    match part.of:
        case "headers":
            values = [_last(chunk, part.header) for chunk in given.chunks]
            found = pa.chunked_array(values, pa.binary())
            return _texts(found, f"header {part.header!r}", bad)
        case "key":
            return _texts(given, "key", bad)
    return pc.cast(given, TYPES[part.of])


def _last(headers: pa.ListArray, name: str) -> pa.Array:
    """The value of the last header of this name of each record."""
    flat = pc.list_flatten(headers)
    named = np.flatnonzero(pc.equal(flat.field("key"), name).fill_null(False))
    at = np.full(len(headers), -1)
    np.maximum.at(at, np.asarray(pc.list_parent_indices(headers))[named], named)
    return pc.cast(flat.field("value"), pa.binary()).take(pa.array(at, mask=at < 0))


def _texts(values: pa.ChunkedArray, what: str, bad: dict[int, str]) -> pa.ChunkedArray:
    try:
        return pc.cast(values, pa.string())
    except pa.ArrowInvalid:
        found: list[str | None] = []
        for record, value in enumerate(values.to_pylist()):
            found.append(None)
            try:
                found[-1] = None if value is None else utf8(value, what)
            except InvalidRecord as error:
                bad.setdefault(record, shortened(str(error)))
        return pa.chunked_array([pa.array(found, pa.string())])


RAW_COLUMNS: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}
"""Columns of a raw row. Headers are a list: Kafka keeps their order, and a name may repeat."""


@dataclass(frozen=True)
class RawDecoder:
    """Converts records without decoding; every record is a row, also a record without a value.

    Attributes:
        columns: names out of :data:`RAW_COLUMNS`, in the order of the rows' columns.
    """

    columns: tuple[str, ...] = ("key", "value", "timestamp")

    @property
    def schema(self) -> pa.Schema:
        """The chosen columns; all may be null."""
        return pa.schema([(name, RAW_COLUMNS[name]) for name in self.columns])

    @property
    def needs(self) -> frozenset[str]:
        """The chosen columns, and the value, which every decoder reads."""
        return frozenset({"value", *self.columns})

    def decode(self, records: pa.Table) -> Decoded:
        """Convert every record to a row."""
        taken = [pc.cast(records[name], RAW_COLUMNS[name]) for name in self.columns]
        return Decoded(
            rows=pa.Table.from_arrays(taken, schema=self.schema),
            row_record=pa.array(np.arange(len(records)), pa.int64()),
        )
