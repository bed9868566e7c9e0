"""Dead letters listed, and tried again with the pipeline as it is described now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from oncely.commit.backoff import Backoff
from oncely.core.batch import Reject, Rejection
from oncely.decode.base import Decoded, Decoder
from oncely.decode.isolate_crashes import isolate_crashes
from oncely.errors import Unavailable
from oncely.runtimes.chunks import Bounds, Chunks
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.spark.staging_task import NO_TOMBSTONES
from oncely.runtimes.spark.transform_once import transform_rows
from oncely.sinks.replaying import Judge, Judged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.pipeline.pipeline import Pipeline

REJECTS_A_TRANSACTION = 500
_ALL_AT_ONCE = Bounds(records=1 << 40, bytes=1 << 60, seconds=1e9)
_RECORDS = pa.schema(
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
"""Records as Spark's Kafka source gives them."""


@dataclass(frozen=True)
class Rejects:
    """Some of a pipeline's dead letters, by topic, partition and offset.

    Attributes:
        listed: the first ones.
        total: how many there are.
    """

    listed: tuple[Reject, ...]
    total: int


def rejects(pipeline: Pipeline, limit: int) -> Rejects:
    """The first ``limit`` dead letters.

    Raises:
        WrongInput: the server does not let us in.
        Unavailable: no answer.
    """
    listed, total = pipeline.destination.rejects(limit)
    return Rejects(tuple(listed), total)


def replay(
    pipeline: Pipeline,
    *,
    spark: SparkSession | None = None,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> tuple[int, int]:
    """Decode all dead letters again and write those that pass now.

    Args:
        pipeline: whose.
        spark: a session for a Spark transform; one of our own by default.
        progress: told (moved, kept) after every transaction.

    Returns:
        How many were moved, and how many stay rejects.

    Raises:
        WrongInput: old records would do harm there, or the destination doesn't take the rows.
        Stopped: a row of the Spark transform can't be written.
        Unavailable: the server did not come back.
    """
    destination = pipeline.destination
    destination.check_replay()
    if not destination.look().rejects:
        return 0, 0
    if pipeline.spark_path is not None and spark is None:
        spark = pipeline.start_spark()
    schema = pipeline.row_schema(spark)
    judge = _judge(pipeline, spark, headers="headers" in destination.sink(schema).needs)
    moved = kept = 0
    patience = Backoff()
    with destination.replaying(schema) as under_way:
        while True:
            try:
                done = under_way.step(REJECTS_A_TRANSACTION, judge)
            except Unavailable:
                patience.wait_or_raise()
                continue
            if done is None:
                return moved, kept
            patience.reset()
            moved, kept = moved + done.moved, kept + done.kept
            progress(moved, kept)


def records_of(found: Sequence[Reject]) -> pa.Table:
    """Rejects as the records they were."""
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
    return pa.Table.from_pylist(rows, schema=_RECORDS)


def _judge(pipeline: Pipeline, spark: SparkSession | None, *, headers: bool) -> Judge:
    by_spark = pipeline.spark_transform is not None
    transform = Unchanged() if by_spark else pipeline.row_transform
    late = NO_TOMBSTONES if by_spark else pipeline.destination.late_delete
    decode = _decoding(pipeline.decoder, late)

    def judge(found: Sequence[Reject]) -> Judged:
        starts = {one.partition: 0 for one in found}
        chunks = Chunks(
            starts, decode, transform, lambda *_: [], _ALL_AT_ONCE, headers=headers and not by_spark
        )
        (chunk,) = chunks.cut([records_of(found)])
        if pipeline.spark_transform is None or spark is None:
            return Judged(chunk)
        rows = transform_rows(spark, pipeline.spark_transform, chunk.rows)
        first = np.zeros(rows.num_rows, dtype=np.int64)
        return Judged(replace(chunk, rows=rows, row_record=first), traceable=False)

    return judge


def _decoding(decoder: Decoder, late_delete: str | None) -> Callable[[pa.Table], Decoded]:
    """Decode with care: among dead letters is what once killed a decoder.

    Args:
        decoder: the pipeline's.
        late_delete: why tombstones stay rejects; None: they are none.
    """

    def decode(records: pa.Table) -> Decoded:
        decoded = isolate_crashes(decoder, records)
        if late_delete is None or not len(decoded.tombstone_record):
            return decoded
        gone = decoded.tombstone_record.to_pylist()
        more = [Rejection(int(i), "write", late_delete) for i in gone]
        rejections = tuple(sorted((*decoded.rejections, *more)))
        return replace(
            decoded,
            rejections=rejections,
            tombstones=None,
            tombstone_record=pa.array([], pa.int64()),
        )

    return decode


def as_json(found: Rejects) -> dict[str, Any]:
    """For programs; bytes that are no UTF-8 text come as ``{"base64": ...}``."""
    import base64

    def text(value: bytes | None) -> Any:
        try:
            return None if value is None else value.decode("utf-8")
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value or b"").decode()}

    return {
        "rejects": [
            {
                "topic": one.partition.topic,
                "partition": one.partition.partition,
                "offset": one.offset,
                "timestamp_ms": one.timestamp_ms,
                "key": text(one.key),
                "value": text(one.value),
                "headers": [[name, text(value)] for name, value in one.headers],
                "stage": one.stage,
                "reason": one.reason,
            }
            for one in found.listed
        ],
        "total": found.total,
    }
