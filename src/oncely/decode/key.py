"""Keys as columns: beside the value's columns, and alone for records without a value."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.base import Decoded, Decoder, Rejection
from oncely.decode.columns import Columns, Positions
from oncely.decode.gather import Gather, Slice, slices
from oncely.decode.schema import type_name
from oncely.errors import ConfigError

PlainFormat = Literal["string", "long", "int", "raw"]
PLAIN_FORMATS: dict[PlainFormat, pa.DataType] = {
    "string": pa.string(),
    "long": pa.int64(),
    "int": pa.int32(),
    "raw": pa.binary(),
}
"""Keys that are one plain value: UTF-8 text, Kafka's LongSerializer and IntegerSerializer
(big-endian, 8 and 4 bytes), and the bytes themselves."""
_NUMBERS = {"long": struct.Struct(">q"), "int": struct.Struct(">i")}


@dataclass(frozen=True)
class PlainKey:
    """Decodes a key that is one plain value into one column. A null key is NULL.

    Attributes:
        format: one of :data:`PLAIN_FORMATS`.
        name: the column's name.
        column: which bytes of the record are read.
    """

    format: PlainFormat
    name: str
    column: str = "key"

    @property
    def schema(self) -> pa.Schema:
        """The one column."""
        return pa.schema([(self.name, PLAIN_FORMATS[self.format])])

    @property
    def needs(self) -> frozenset[str]:
        """The columns of the records that are read."""
        return frozenset({self.column})

    def decode(self, records: pa.Table) -> Decoded:
        """Decode every record; bytes that are no such value are rejections."""
        gather = Gather(self.schema)
        for part in slices(records[self.column]):
            self._decode_slice(part, gather)
        return gather.decoded()

    def _decode_slice(self, part: Slice, gather: Gather) -> None:
        found: list[Any] = []
        good: list[int] = []
        for record, data in enumerate(part.values.to_pylist(), part.first):
            try:
                found.append(None if data is None else self._value(data))
                good.append(record)
            except UnicodeDecodeError as error:
                byte = data[error.start]
                gather.reject(
                    record, f"the {self.column} is not UTF-8: byte 0x{byte:02x} at {error.start}"
                )
            except struct.error:
                size = _NUMBERS[self.format].size
                gather.reject(
                    record, f"the {self.column} has {len(data)} bytes, {self.format} has {size}"
                )
        batch = _PLAIN.batch(self.schema, [found])
        gather.rows([(np.array(good, np.int64), batch)])

    def _value(self, data: bytes) -> Any:
        if self.format == "raw":
            return data
        if self.format == "string":
            return data.decode("utf-8")
        return _NUMBERS[self.format].unpack(data)[0]


_PLAIN = Columns(pick=lambda _, name: lambda value: value[name])


@dataclass(frozen=True)
class WithKey:
    """Decodes values and keys, each with its own decoder.

    - A record with value and key becomes a row: the value's columns, then the key's.
    - A record without a value (null, a tombstone) and with a good key becomes a tombstone: the
      key's columns alone. A tombstone with a null key names nothing, and is rejected.
    - A bad value or a bad key is a rejection; the value's reason comes first.

    A column that both have, say ``id``, is one column of the rows, at the value's place, and
    its type must be the same in both. Producers write it twice; where the value leaves it NULL
    the key's counts, and where the two differ the record is rejected. Otherwise an upsert by the
    value's ``id`` would write one row, and the tombstone of the same Kafka key delete another.

    Attributes:
        value: decodes the value.
        key: decodes the key.
        path: the key of the pipeline file that errors name.

    Raises:
        ConfigError: a shared column has two types, or a type that can't be compared.
    """

    value: Decoder
    key: Decoder
    path: str = "decode.key"

    def __post_init__(self) -> None:
        for name in self._shared:
            of_value, of_key = (
                decoder.schema.field(name).type for decoder in (self.value, self.key)
            )
            way_out = "rename one of them, or leave it out of one schema"
            if of_value != of_key:
                raise ConfigError(
                    self.path,
                    f"column {name!r} is {type_name(of_key)} in the key "
                    f"and {type_name(of_value)} in the value",
                    way_out=way_out,
                )
            if pa.types.is_nested(of_key):
                problem = f"column {name!r} is in key and value, and {type_name(of_key)} has no ="
                raise ConfigError(self.path, problem, way_out=way_out)

    @cached_property
    def _shared(self) -> tuple[str, ...]:
        return tuple(name for name in self.value.schema.names if name in self.key.schema.names)

    @cached_property
    def schema(self) -> pa.Schema:
        """The value's columns, then those that only the key has."""
        columns = []
        for field in self.value.schema:
            if field.name in self._shared:
                other = self.key.schema.field(field.name)
                field = field.with_nullable(field.nullable and other.nullable)  # noqa: PLW2901
            columns.append(field)
        return pa.schema(columns + [f for f in self.key.schema if f.name not in self._shared])

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
        of_key = _numbers(keys.row_record)
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
        """Join values and keys by record; also the records whose shared columns differ."""
        records, at_value, at_key = np.intersect1d(
            valued[_numbers(values.row_record)],
            _numbers(keys.row_record),
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

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


_NAMELESS = "value and key are null: a tombstone that names nothing"
_MOST_SHOWN = 40


def _nulls(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = column.is_null().to_numpy()
    return found


def _numbers(records: pa.Int64Array) -> Positions:
    found: Positions = records.to_numpy()
    return found


def _chosen(table: pa.Table, positions: Positions) -> pa.Table:
    """These rows, ascending. A filter keeps the chunks; to take would join them into one."""
    if len(positions) == len(table):
        return table
    mask = np.zeros(len(table), np.bool_)
    mask[positions] = True
    return table.filter(pa.array(mask))


def _shown(value: pa.Scalar) -> str:
    text = repr(value.as_py())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
