"""Undecoded records: key, value, timestamp and headers as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.decode.base import Decoded

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
