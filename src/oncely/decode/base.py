"""The port of decoders: one outcome for each record, for any bytes.

Records come as an Arrow table with those columns of :data:`oncely.kafka.records.RECORDS`
that the decoder ``needs`` (always ``value``); topic, partition and offset are always there. A
record is named by its index in that table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from oncely.core.batch import Rejection


class InvalidRecord(Exception):
    """A record cannot become a row; the text is the rejection's reason."""


@dataclass(frozen=True)
class Decoded:
    """The outcome of decoding ``n`` records: each is in exactly one of the groups.

    Attributes:
        rows: one row for each good record, in record order, with the decoder's ``schema``.
        row_record: int64 array, the record index of each row, ascending.
        rejections: the refused records, ascending.
        tombstones: key columns of records without a value, if the decoder has a key schema; such a
            record deletes in an upsert.
        tombstone_record: int64 array, the record index of each tombstone, ascending.
        dropped: the number of records that a filter has dropped; they are in no other group.
    """

    rows: pa.Table
    row_record: pa.Int64Array
    rejections: Sequence[Rejection] = ()
    tombstones: pa.Table | None = None
    tombstone_record: pa.Int64Array = field(default_factory=lambda: pa.array([], pa.int64()))
    dropped: int = 0


class Decoder(Protocol):
    """Turns records into rows. Picklable, because it is sent to Spark's Python workers."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of every row; with a key decoder, key columns follow the value's columns."""

    @property
    def needs(self) -> frozenset[str]:
        """The names in :data:`oncely.kafka.records.RECORDS` that the decoder reads."""

    def decode(self, records: pa.Table) -> Decoded:
        """Decode ``records``. Never raises for the content of a record: that is a rejection.

        Raises:
            Unavailable: a service that the decoder needs does not answer.
            ConfigError: a service refuses the configured login.
            SchemaChanged: records have a newer schema than that of the columns.
        """
