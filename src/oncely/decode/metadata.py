"""Parts of the Kafka record as columns: metadata and keys beside the value's columns, keys alone
for records without a value, or undecoded parts as the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Rejection
from oncely.decode.base import Decoded, Decoder, InvalidRecord
from oncely.decode.columns import BytesDecoder, Piece, Positions, from_dicts, read_each, shortened
from oncely.decode.reference import JsonRules, parse_object, parse_value, read_value, scalar, utf8
from oncely.decode.schema import METADATA_COLUMNS, RAW_COLUMNS, MetadataColumn, type_name
from oncely.errors import ConfigError

_ALWAYS = {"topic", "partition", "offset"}


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
        return tuple(pa.field(part.column, METADATA_COLUMNS[part.of]) for part in self.parts)

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
    return pc.cast(given, METADATA_COLUMNS[part.of])


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


# -- keys -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextDecoder(BytesDecoder):
    """Decodes UTF-8 text into the one column of its schema. Null is NULL.

    A column of another type than STRING takes the texts that it takes in JSON; numbers and booleans
    are written as JSON writes them.

    Attributes:
        rounding: cut off digits that a TIMESTAMP does not keep.
        unwrap: the bytes are a JSON object, and the text is the scalar in this member of it.
        json: the bytes are a JSON scalar.
    """

    rounding: bool = False
    unwrap: str = ""
    json: bool = False

    def _decode_slice(self, values: pa.Array) -> tuple[list[Piece], dict[int, str]]:
        found, good, refused = read_each(values.to_pylist(), self._value)
        return [(good, from_dicts(self.schema, found))], refused

    def _value(self, data: bytes | None) -> dict[str, Any]:
        (field,) = self.schema
        if data is None:
            return {field.name: None}
        found: Any = self._found(data)
        if not pa.types.is_string(field.type) and type(found) is str:
            found = scalar(found)
        rules = JsonRules(strict=not (self.unwrap or self.json), rounding=self.rounding)
        return {field.name: read_value(field.type, found, field.name, rules)}

    def _found(self, data: bytes) -> Any:
        if not self.unwrap:
            return parse_value(data, self.column) if self.json else utf8(data, self.column)
        members = parse_object(data, self.column)
        if self.unwrap not in members:
            raise InvalidRecord(f"the {self.column} has no member {self.unwrap!r}")
        return members[self.unwrap]


@dataclass(frozen=True)
class WithKey:
    """Decodes values and keys, each with its own decoder.

    - A record with value and key becomes a row: the value's columns, then the key's.
    - A record without a value (null, a tombstone) and with a good key becomes a tombstone: the
      key's columns alone. A tombstone with a null key identifies no row, and is rejected.
    - An invalid value or key is a rejection; the value's reason comes first.

    A column of both, for example ``id``, is one column of the rows, at the value's place, and its
    type must be the same in both. Producers write it twice; if it is NULL in the value, the key's
    counts, and if the two differ, the record is rejected. Otherwise an upsert by the value's ``id``
    would write one row, and the tombstone of the same Kafka key delete another.

    Attributes:
        value: decodes the value.
        key: decodes the key.

    Raises:
        ConfigError: a shared column has two types, or a type that cannot be compared.
    """

    value: Decoder
    key: Decoder

    def __post_init__(self) -> None:
        for name in self._shared:
            of_value, of_key = (each.schema.field(name).type for each in (self.value, self.key))
            in_key = type_name(of_key)
            if of_value != of_key:
                problem = f"is {in_key} in the key and {type_name(of_value)} in the value"
            elif pa.types.is_nested(of_key):
                problem = f"is in key and value, and {in_key} has no ="
            else:
                continue
            way_out = "rename one of them, or leave it out of one schema"
            raise ConfigError("decode.key", f"column {name!r} {problem}", way_out=way_out)

    @cached_property
    def _shared(self) -> tuple[str, ...]:
        return tuple(name for name in self.value.schema.names if name in self.key.schema.names)

    @cached_property
    def schema(self) -> pa.Schema:
        """The value's columns, followed by the columns that only the key has."""
        keys = {field.name: field for field in self.key.schema}
        columns = [
            field.with_nullable(keys.pop(field.name, field).nullable and field.nullable)
            for field in self.value.schema
        ]
        return pa.schema(columns + list(keys.values()))

    @property
    def needs(self) -> frozenset[str]:
        """The columns of the records that either decoder reads."""
        return self.value.needs | self.key.needs | {"value", "key"}

    def decode(self, records: pa.Table) -> Decoded:
        """Decode every record: a row, a tombstone or a rejection."""
        empty = _nulls(records["value"])
        nameless = empty & _nulls(records["key"])
        valued = np.flatnonzero(~empty)
        values = self.value.decode(_chosen(records, valued))
        keys = self.key.decode(records)

        rows, row_record, bad = self._rows(values, valued, keys)
        bad |= {rejection.record: rejection.reason for rejection in keys.rejections}
        bad |= dict.fromkeys(np.flatnonzero(nameless).tolist(), _NAMELESS)
        bad |= {int(valued[record]): reason for record, _, reason in values.rejections}
        of_key = np.asarray(keys.row_record)
        dead = np.flatnonzero((empty & ~nameless)[of_key])
        return Decoded(
            rows=rows,
            row_record=pa.array(row_record, pa.int64()),
            rejections=[Rejection(record, "decode", bad[record]) for record in sorted(bad)],
            tombstones=_chosen(keys.rows, dead),
            tombstone_record=pa.array(of_key[dead], pa.int64()),
        )

    def _rows(
        self, values: Decoded, valued: Positions, keys: Decoded
    ) -> tuple[pa.Table, Positions, dict[int, str]]:
        """Join values and keys by record; also return the records whose shared columns differ."""
        records, at_value, at_key = np.intersect1d(
            valued[np.asarray(values.row_record)],
            np.asarray(keys.row_record),
            assume_unique=True,
            return_indices=True,
        )
        left, right = _chosen(values.rows, at_value), _chosen(keys.rows, at_key)
        bad: dict[int, str] = {}
        columns = []
        for name in self.schema.names:
            if name not in self._shared:
                columns.append((left if name in left.schema.names else right)[name])
                continue
            differs = pc.fill_null(pc.not_equal(left[name], right[name]), False)
            for row in np.flatnonzero(differs.to_numpy()).tolist():
                found = _shown(right[name][row]), _shown(left[name][row])
                bad[int(records[row])] = f"{name}: {found[0]} in the key, {found[1]} in the value"
            columns.append(pc.coalesce(left[name], right[name]))
        keep = np.flatnonzero(~np.isin(records, [*bad]))
        rows = pa.Table.from_arrays(columns, schema=self.schema)
        return _chosen(rows, keep), records[keep], bad


_NAMELESS = "value and key are null: a tombstone that names nothing"
_MOST_SHOWN = 40


def _nulls(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return np.asarray(column.is_null())


def _chosen(table: pa.Table, positions: Positions) -> pa.Table:
    """These rows, ascending. ``filter`` keeps the chunks; ``take`` would join them into one."""
    if len(positions) == len(table):
        return table
    mask = np.zeros(len(table), np.bool_)
    mask[positions] = True
    return table.filter(pa.array(mask))


def _shown(value: pa.Scalar) -> str:
    text = repr(value.as_py())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
