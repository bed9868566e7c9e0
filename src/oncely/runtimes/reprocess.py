"""What decode and row transform of today make of records that are read again.

Audits compare it with the destination; repairs, backfills and replays of dead letters write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from oncely.core.batch import Chunk, Reject
from oncely.core.topics import Position, TopicPartition
from oncely.decode.base import Decoded
from oncely.runtimes.chunks import Bounds, Chunks, Letters, partitions_of
from oncely.runtimes.row_transform import RowTransform

_ALL_AT_ONCE = Bounds(records=1 << 40, bytes=1 << 60, seconds=1e9)
RECORDS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""Records in the form of Spark's Kafka source."""


def _no_letters(*_: Any) -> list[Reject]:
    return []


@dataclass(frozen=True)
class Reprocessing:
    """Decodes and transforms records as a task does. Writes nothing.

    Attributes:
        decode: decodes records to rows, tombstones and rejections.
        transform: transforms rows.
        letters: creates dead letters of rejected records; none by default.
        headers: include the records' headers.
    """

    decode: Callable[[pa.Table], Decoded]
    transform: RowTransform
    letters: Letters = _no_letters
    headers: bool = False

    def chunks(
        self,
        starts: Mapping[TopicPartition, Position],
        tables: Iterable[pa.Table],
        bounds: Bounds = _ALL_AT_ONCE,
    ) -> Iterator[Chunk]:
        """Records of the form of :data:`RECORDS` as chunks.

        Args:
            starts: the partitions of the records, and offsets that are not above theirs.
            tables: the records, ascending in each partition.
            bounds: the limits of a chunk; by default all records are one.
        """
        chunks = Chunks(
            starts, self.decode, self.transform, self.letters, bounds, headers=self.headers
        )
        return chunks.cut(tables)

    def chunk(self, records: pa.Table) -> Chunk:
        """Records as one chunk; at least one record."""
        starts = dict.fromkeys(partitions_of(records)[0], 0)
        (chunk,) = self.chunks(starts, [records])
        return chunk


def records_of(found: Sequence[Reject]) -> pa.Table:
    """Rejects as source records."""
    rows = [
        {
            "topic": one.partition.topic,
            "partition": one.partition.partition,
            "offset": one.offset,
            "timestamp": None if one.timestamp_ms is None else one.timestamp_ms * 1000,
            "key": one.key,
            "value": one.value,
            "headers": [{"key": name, "value": value} for name, value in one.headers],
        }
        for one in found
    ]
    return pa.Table.from_pylist(rows, schema=RECORDS)
