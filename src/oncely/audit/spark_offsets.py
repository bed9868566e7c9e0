"""The readable offsets of large ranges, by a Spark batch job.

Workers get no more of a record than its partition and offset, and return runs of consecutive
offsets: a log without holes is a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from oncely.audit.evidence import IntArray, no_runs, runs_of
from oncely.audit.records import committed
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RUNS = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32()), ("first", pa.int64()), ("end", pa.int64())]
)
_RUNS_DDL = "topic string, partition int, first bigint, end bigint"


def readable_runs(
    spark: SparkSession,
    brokers: str,
    kafka: Mapping[str, object],
    ranges: Mapping[TopicPartition, OffsetRange],
) -> dict[TopicPartition, IntArray]:
    """The readable offsets of one range of each partition, as runs.

    Args:
        spark: with the Kafka connector.
        brokers: ``host:port``, separated by commas.
        kafka: librdkafka's properties.
        ranges: at or above the first offsets of the logs, and below their last stable offsets.
    """
    frame = committed(
        spark, brokers, kafka, ranges,
        # Deletion may pass meanwhile: the caller compares the first offsets afterwards.
        failOnDataLoss="false",
        minPartitions=str(max(len(ranges), 2 * spark.sparkContext.defaultParallelism)),
    )  # fmt: skip
    found = frame.select("topic", "partition", "offset").mapInArrow(_runs, _RUNS_DDL).collect()
    parts: dict[TopicPartition, list[tuple[int, int]]] = {tp: [] for tp in ranges}
    for topic, partition, first, end in found:
        parts[TopicPartition(topic, partition)].append((first, end))
    return {tp: _joined(sorted(own)) for tp, own in parts.items()}


def _runs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs of the offsets of a task, which reads one partition's range in order."""
    open_run: tuple[str, int, int, int] | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        topic, number = batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()
        runs = runs_of(batch.column("offset").to_numpy()).tolist()
        done = []
        for first, end in runs:
            if open_run is not None and open_run[:2] == (topic, number) and open_run[3] == first:
                open_run = (topic, number, open_run[2], end)
                continue
            if open_run is not None:
                done.append(open_run)
            open_run = (topic, number, first, end)
        if done:
            yield _batch(done)
    if open_run is not None:
        yield _batch([open_run])


def _batch(runs: list[tuple[str, int, int, int]]) -> pa.RecordBatch:
    return pa.record_batch(list(zip(*runs, strict=True)), schema=_RUNS)


def _joined(runs: list[tuple[int, int]]) -> IntArray:
    """The runs of all tasks, ascending, those that touch joined."""
    if not runs:
        return no_runs()
    given = np.array(runs, dtype=np.int64)
    breaks = np.flatnonzero(given[1:, 0] != given[:-1, 1])
    firsts = given[np.concatenate([[0], breaks + 1]), 0]
    ends = given[np.concatenate([breaks, [len(given) - 1]]), 1]
    return np.stack([firsts, ends], axis=1)
