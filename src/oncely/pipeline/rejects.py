"""Dead letters listed, and tried again with the pipeline as it is described now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from oncely.config import SqlSinkSettings
from oncely.decode.base import Decoded, Decoder, Rejection
from oncely.decode.careful import decode_carefully
from oncely.errors import ConfigError, Unavailable, WrongInput
from oncely.pipeline.sql_destination import SqlDestination
from oncely.runtimes.backoff import Backoff
from oncely.runtimes.chunks import Bounds, Chunks
from oncely.runtimes.row_transform import Unchanged
from oncely.runtimes.staging_task import NO_TOMBSTONES
from oncely.runtimes.transform_once import transform_rows
from oncely.sinks.base import Reject
from oncely.sinks.sql.replay import FIRST, Judge, Judged, Place, Replayed, replay_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncely.pipeline.pipeline import Pipeline

REJECTS_A_TRANSACTION = 500
_ALL_AT_ONCE = Bounds(records=1 << 40, bytes=1 << 60, seconds=1e9)
_NO_OLD_DELETES = (
    "a tombstone has no version: applied late, it could delete a row that is newer than it"
)
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
        WrongInput: the database does not let us in.
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
    """Decode all dead letters again and move those that pass now into the table.

    Args:
        pipeline: whose.
        spark: a session for a Spark transform; one of our own by default.
        progress: told (moved, kept) after every transaction.

    Returns:
        How many were moved, and how many stay rejects.

    Raises:
        WrongInput: an upsert without a version column, or the table doesn't take the rows.
        Stopped: the table refuses a row of the Spark transform.
        Unavailable: the database did not come back.
    """
    sink = pipeline.settings.sink
    if isinstance(sink, SqlSinkSettings) and sink.mode == "upsert" and sink.version is None:
        raise ConfigError(
            "sink.version",
            "is missing: a replayed record is old and would overwrite a newer row of its key",
            way_out="name a column that grows with each change; or delete the rejects by SQL",
        )
    if not pipeline.destination.look().rejects:
        return 0, 0
    if pipeline.spark_path is not None and spark is None:
        spark = pipeline.start_spark()
    destination = pipeline.destination
    if not isinstance(destination, SqlDestination):
        raise WrongInput("replay")
    bound = destination.sink(pipeline.row_schema(spark)).bind()
    judge = _judge(pipeline, spark)
    moved = kept = 0
    after: Place | None = FIRST
    patience = Backoff()
    while after is not None:
        try:
            done: Replayed = replay_run(bound, after, REJECTS_A_TRANSACTION, judge)
        except Unavailable:
            patience.wait_or_raise()
            continue
        patience.reset()
        after, moved, kept = done.last, moved + done.moved, kept + done.kept
        progress(moved, kept)
    return moved, kept


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


def _upserts(pipeline: Pipeline) -> bool:
    sink = pipeline.settings.sink
    return isinstance(sink, SqlSinkSettings) and sink.mode == "upsert"


def _judge(pipeline: Pipeline, spark: SparkSession | None) -> Judge:
    by_spark = pipeline.spark_transform is not None
    transform = Unchanged() if by_spark else pipeline.row_transform
    decode = _decoding(pipeline.decoder, by_spark, _upserts(pipeline))

    def judge(found: Sequence[Reject]) -> Judged:
        starts = {one.partition: 0 for one in found}
        chunks = Chunks(starts, decode, transform, lambda *_: [], _ALL_AT_ONCE)
        (chunk,) = chunks.cut([records_of(found)])
        if pipeline.spark_transform is None or spark is None:
            return Judged(chunk)
        rows = transform_rows(spark, pipeline.spark_transform, chunk.rows)
        first = np.zeros(rows.num_rows, dtype=np.int64)
        return Judged(replace(chunk, rows=rows, row_record=first), traceable=False)

    return judge


def _decoding(decoder: Decoder, by_spark: bool, upsert: bool) -> Callable[[pa.Table], Decoded]:
    """Decode with care: among dead letters is what once killed a decoder."""

    def decode(records: pa.Table) -> Decoded:
        decoded = decode_carefully(decoder, records)
        if not len(decoded.tombstone_record) or not (by_spark or upsert):
            return decoded
        why = NO_TOMBSTONES if by_spark else _NO_OLD_DELETES
        more = [Rejection(int(i), "write", why) for i in decoded.tombstone_record.to_pylist()]
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
