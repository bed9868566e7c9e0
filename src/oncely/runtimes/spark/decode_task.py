"""The first stage of a batch commit: records become rows, or a reason and nulls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from oncely.core.ranges import TopicPartition
from oncely.decode.base import Decoded, Decoder
from oncely.runtimes.batches.plan import Ranges
from oncely.runtimes.batches.reading import fetched, isolating
from oncely.runtimes.spark.jobs import this_attempt
from oncely.runtimes.spark.worker import settle
from oncely.sources.kafka import KafkaSource

TOPIC, PARTITION, OFFSET, REASON, VALUE = (
    f"_oncely_{name}" for name in ("topic", "partition", "offset", "reason", "value")
)
_ORIGIN = 5  # columns that tell where a row is from
NO_TOMBSTONES = "a record without a value can't pass a Spark transform"


@dataclass(frozen=True)
class DecodePlan:
    """The parameters of a decoding task.

    Attributes:
        source: the topics.
        decoder: decodes the records.
        needs: the columns of the records that the decoder reads.
        shares: the ranges of each task.
    """

    source: KafkaSource
    decoder: Decoder
    needs: frozenset[str]
    shares: Sequence[Ranges]


def decoded_schema(schema: pa.Schema) -> pa.Schema:
    """The decoder's columns, all nullable, the origin of the record, and the reason of a reject."""
    fields = [field.with_nullable(True) for field in schema]
    more = [(TOPIC, pa.string()), (PARTITION, pa.int32()), (OFFSET, pa.int64())]
    more += [(REASON, pa.string()), (VALUE, pa.binary())]
    return pa.schema([*fields, *(pa.field(*one) for one in more)])


def decode_task(plan: DecodePlan, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One output row for each record of the task's share: its columns, or a reason and nulls."""
    settle()
    schema = decoded_schema(plan.decoder.schema)
    decode = isolating(plan.decoder, again=this_attempt().again)
    with closing(plan.source):
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for records in fetched(plan.source, plan.shares[number], plan.needs):
                    yield from _decoded(decode(records), records, schema)


def _decoded(decoded: Decoded, records: pa.Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    reasons = {one.record: one.reason for one in decoded.rejections}
    reasons |= {int(i): NO_TOMBSTONES for i in decoded.tombstone_record.to_pylist()}
    good = _columns(decoded.rows, records.take(decoded.row_record), None, schema)
    bad = records.take(pa.array(sorted(reasons), pa.int64()))
    none = pa.table({f.name: pa.nulls(bad.num_rows, f.type) for f in list(schema)[:-_ORIGIN]})
    why = [reasons[i] for i in sorted(reasons)]
    yield from good.to_batches()
    yield from _columns(none, bad, why, schema).to_batches()


def _columns(
    rows: pa.Table, records: pa.Table, reasons: list[str] | None, schema: pa.Schema
) -> pa.Table:
    origin = [records.column(name) for name in ("topic", "partition", "offset")]
    why = pa.array(reasons if reasons else [None] * rows.num_rows, pa.string())
    # Only a reject's bytes are kept: those of rows are in columns.
    value = records.column("value") if reasons else pa.nulls(rows.num_rows, pa.binary())
    table = pa.table([*rows.columns, *origin, why, value], names=schema.names)
    return table.cast(schema)


def origin(row: tuple[str, int, int]) -> tuple[TopicPartition, int]:
    """Topic, partition and offset in the driver's form."""
    return TopicPartition(row[0], int(row[1])), int(row[2])
