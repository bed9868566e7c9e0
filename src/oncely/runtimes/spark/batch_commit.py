"""A batch of a Spark transform: batch commit.

A shuffle mixes partitions, so no task's rows belong to one range. The driver publishes the output
of the transform with all rejects and all positions in one transaction: it reads the rows from Spark
while it writes them, or tasks have staged them as files. Rejects do not pass through the user's
query: a ``WHERE`` would drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncely.commit.path import Outcome
from oncely.commit.run import PublishingRun
from oncely.core.batch import Batch, Reject, Rejection, Staged
from oncely.core.budget import refuse_beyond
from oncely.core.claim import Counts, Opened, Takeover
from oncely.core.ranges import TopicPartition
from oncely.phases import phase
from oncely.reject_summary import KEPT, RejectSample, RejectSummary
from oncely.runtimes.batches.plan import Ranges, shares_of
from oncely.runtimes.chunks import dead_letters
from oncely.runtimes.jobs.base import all_of
from oncely.runtimes.spark.decode_task import (
    OFFSET,
    PARTITION,
    REASON,
    TOPIC,
    VALUE,
    DecodePlan,
    decode_task,
    decoded_schema,
    origin,
)
from oncely.runtimes.spark.frames import StagePlan, arrow_schema, spark_schema, stage_rows
from oncely.runtimes.spark.held_rows import HeldRows, refuse_non_deterministic
from oncely.runtimes.spark.jobs import SparkJobs, answered, collected
from oncely.secrets import carried
from oncely.sinks.base import PacksRows, StagesBatches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Transform = Callable[["DataFrame"], "DataFrame"]

_LOOKED_AT = 1_000  # refused records whose reasons are shown when the pipeline stops


@dataclass(kw_only=True)
class BatchCommit(PublishingRun[PacksRows | StagesBatches, Transform]):
    """Tasks make rows; the driver publishes them.

    Attributes:
        jobs: has the Spark session.
    """

    jobs: SparkJobs

    def open(self, takeover: Takeover) -> Opened:
        """Take over the ledger, and drop staged output of older runs."""
        opened = super().open(takeover)
        self._tidy(0, *self._sweep())
        return opened

    def _sweep(self, keep_batches_from: int | None = None) -> list[Callable[[], object]]:
        """Removal of staged output, if tasks stage any."""
        if isinstance(self.sink, PacksRows):
            return []
        return [partial(self.sink.sweep, self.fence, keep_batches_from)]

    def run(self, batch_id: int, ranges: Ranges) -> list[Outcome]:
        """Decode once, separate rejects, transform, publish."""
        shares = shares_of(ranges)
        plan = DecodePlan(self.source, self.decoder, self.needs, shares)
        schema = spark_schema(decoded_schema(self.decoder.schema))
        numbers = self.jobs.session.range(0, len(shares), 1, len(shares))
        decoded = numbers.mapInArrow(carried(partial(decode_task, plan)), schema)
        with phase("decode"):
            # A local checkpoint, not a cache: rejects are counted in one job and rows made in
            # another, and a block that is lost in between must fail the batch. Decoded again, a
            # record could be a reject in one job and a row in the other.
            decoded = decoded.localCheckpoint()
            counts, rejects = self._set_aside(decoded, ranges)
        rows = decoded.where(decoded[REASON].isNull()).select(*self.decoder.schema.names)
        batch = self._made(self.transform(rows), batch_id, Batch(ranges, counts, rejects))
        return self._publish(batch, *self._sweep(batch_id + 1))

    def _made(self, frame: DataFrame, batch_id: int, batch: Batch) -> Batch:
        """Run the transform's plan; the batch with its rows.

        Raises:
            ConfigError: the plan is not deterministic before a shuffle.
        """
        if isinstance(self.sink, PacksRows):
            return HeldRows.of(self.sink, frame).into(batch)
        refuse_non_deterministic(frame)
        self.sink.begin_batch()
        task = partial(stage_rows, StagePlan(self.sink, self.fence, batch_id))
        return replace(batch, staged=all_of(collected(answered(frame, task)), Staged))

    def _set_aside(
        self, decoded: DataFrame, ranges: Ranges
    ) -> tuple[dict[TopicPartition, Counts], list[Reject]]:
        """Count the records of each range and create dead letters of the refused ones.

        Raises:
            TooManyRejects: the reject budget is spent.
        """
        from pyspark.sql import functions as F

        counts = {
            TopicPartition(row[0], row[1]): (row[2], row[3])
            for row in decoded.groupBy(TOPIC, PARTITION)
            .agg(F.count(F.lit(1)), F.count(REASON))
            .collect()
        }
        records = sum(all_ for all_, _ in counts.values())
        rejected = sum(bad for _, bad in counts.values())
        columns = (TOPIC, PARTITION, OFFSET, REASON, VALUE)
        bad = decoded.where(decoded[REASON].isNotNull()).select(*columns)
        refuse_beyond(
            self._budget().left(records, 0),
            rejected,
            f"{rejected:,} records of this batch can't be decoded;"
            f" reasons of the first {min(rejected, _LOOKED_AT):,}",
            "correct decode",
            partial(_refused, bad),
        )
        rejects = self._letters([tuple(row) for row in bad.collect()]) if rejected else []
        of_ranges = {
            tp: Counts(counts.get(tp, (0, 0))[0], 0, counts.get(tp, (0, 0))[1], 0) for tp in ranges
        }
        return of_ranges, rejects

    def _letters(self, bad: Sequence[tuple[Any, ...]]) -> list[Reject]:
        origins = [origin(row[:3]) for row in bad]
        why = [Rejection(i, "decode", row[3]) for i, row in enumerate(bad)]
        values = [None if row[4] is None else bytes(row[4]) for row in bad]
        return dead_letters(self.source, pa.table({"value": values}), origins, why)


def output_schema(session: Any, transform: Transform, schema: pa.Schema) -> pa.Schema:
    """The columns of a Spark transform's result for the decoder's columns.

    Raises:
        ConfigError: its plan is not deterministic before a shuffle.
    """
    # From an RDD: Spark would fold a plan over an empty list, including its shuffles.
    nothing = session.sparkContext.emptyRDD()
    made = transform(session.createDataFrame(nothing, spark_schema(schema)))
    refuse_non_deterministic(made)
    return arrow_schema(made.schema)


def _refused(bad: DataFrame) -> RejectSummary:
    """Reasons and a sample of the first refused records."""
    from pyspark.sql import functions as F

    value = F.substring(VALUE, 1, KEPT)
    found = bad.select(TOPIC, PARTITION, OFFSET, REASON, value).limit(_LOOKED_AT).collect()
    records = [
        RejectSample(
            topic, partition, offset, "decode", reason, None if value is None else bytes(value)
        )
        for topic, partition, offset, reason, value in map(tuple, found)
    ]
    return RejectSummary.of(
        [one.reason for one in records], lambda chosen: [records[a] for a in chosen]
    )
