"""What Spark tasks run for a batch commit: decode in one stage, stage rows in the last one."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from oncely.core.batch import Staged
from oncely.core.claim import Fence
from oncely.core.topics import TopicPartition
from oncely.decode.base import Decoder
from oncely.errors import OncelyError
from oncely.runtimes.spark import worker
from oncely.runtimes.spark.task import careful_decode, with_topic
from oncely.sinks.base import StagesBatches

TOPIC, PARTITION, OFFSET, REASON, VALUE = (
    f"_oncely_{name}" for name in ("topic", "partition", "offset", "reason", "value")
)
NO_TOMBSTONES = "a record without a value can't pass a Spark transform"

STAGED_DDL = "name STRING, `rows` BIGINT, error STRING"
_STAGED = pa.schema([("name", pa.string()), ("rows", pa.int64()), ("error", pa.string())])


@dataclass(frozen=True)
class DecodePlan:
    """What a decoding task needs."""

    decoder: Decoder
    only_topic: str | None


def decoded_schema(schema: pa.Schema) -> pa.Schema:
    """The decoder's columns, all nullable, where a record came from, and of a reject why."""
    fields = [field.with_nullable(True) for field in schema]
    more = [(TOPIC, pa.string()), (PARTITION, pa.int32()), (OFFSET, pa.int64())]
    more += [(REASON, pa.string()), (VALUE, pa.binary())]
    return pa.schema([*fields, *(pa.field(*one) for one in more)])


def decode_task(plan: DecodePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One output row for each record: its columns, or a reason and nulls."""
    worker.settle()
    schema = decoded_schema(plan.decoder.schema)
    decode = careful_decode(plan.decoder)
    for batch in batches:
        records = with_topic(batch, plan.only_topic)
        decoded = decode(records)
        reasons = {one.record: one.reason for one in decoded.rejections}
        reasons |= {int(i): NO_TOMBSTONES for i in decoded.tombstone_record.to_pylist()}
        good = _columns(decoded.rows, records.take(decoded.row_record), None, schema)
        bad = records.take(pa.array(sorted(reasons), pa.int64()))
        none = pa.table({f.name: pa.nulls(bad.num_rows, f.type) for f in plan.decoder.schema})
        why = [reasons[i] for i in sorted(reasons)]
        yield from good.to_batches()
        yield from _columns(none, bad, why, schema).to_batches()


def _columns(
    rows: pa.Table, records: pa.Table, reasons: list[str] | None, schema: pa.Schema
) -> pa.Table:
    origin = [records.column(name) for name in ("topic", "partition", "offset")]
    why = pa.array(reasons if reasons else [None] * rows.num_rows, pa.string())
    # Only a reject's bytes travel on: the rows have theirs in columns.
    value = records.column("value") if reasons else pa.nulls(rows.num_rows, pa.binary())
    table = pa.table([*rows.columns, *origin, why, value], names=schema.names)
    return table.cast(schema)


@dataclass(frozen=True)
class StagePlan:
    """What a staging task needs."""

    sink: StagesBatches
    fence: Fence
    batch_id: int


def stage_task(plan: StagePlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stage the task's rows under the attempt's own name; answer with one row."""
    from pyspark import TaskContext

    worker.settle()
    context = TaskContext.get()
    attempt = context.taskAttemptId() if context is not None else 0
    tables = (pa.Table.from_batches([batch]) for batch in batches)
    try:
        done = plan.sink.stage(plan.fence, plan.batch_id, attempt, tables)
        answer: tuple[str | None, int | None, str | None] = (done.name, done.rows, None)
    except OncelyError as error:
        answer = (None, None, base64.b64encode(pickle.dumps(error)).decode())
        for _ in batches:
            pass
    yield pa.RecordBatch.from_pylist(
        [dict(zip(_STAGED.names, answer, strict=True))], schema=_STAGED
    )


def read_staged(rows: Iterable[tuple[str | None, int | None, str | None]]) -> list[Staged]:
    """The answers of a job's successful tasks.

    Raises:
        OncelyError: what a task answered instead.
    """
    staged = []
    for name, count, error in rows:
        if error is not None:
            raise pickle.loads(base64.b64decode(error))  # noqa: S301 - our own task's answer
        staged.append(Staged(name, int(count or 0)))
    return staged


def origin(row: tuple[str, int, int]) -> tuple[TopicPartition, int]:
    """Topic, partition and offset as the driver uses them."""
    return TopicPartition(row[0], int(row[1])), int(row[2])
