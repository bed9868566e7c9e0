"""A micro-batch whose tasks stage and whose driver publishes, without a Spark transform.

The tasks must have read exactly the planned records: only then do positions move to the planned
ends, in the transaction that makes everything take effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from oncely.commit.path import Outcome
from oncely.commit.run import PublishingRun
from oncely.core.batch import Batch, Reject
from oncely.core.budget import refuse_beyond
from oncely.core.claim import NO_RECORDS
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition
from oncely.errors import InvariantViolation, check
from oncely.reject_summary import RejectSummary
from oncely.runtimes.chunks import Bounds
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.spark.partition_commit import OFFSETS_A_TASK
from oncely.runtimes.spark.reading import Reading
from oncely.runtimes.spark.task import (
    MEND,
    PACKET_DDL,
    TOO_MANY,
    Answer,
    RangePlan,
    collect_all,
    send_ranges,
    stage_packets,
    stage_ranges,
)
from oncely.secrets import carried
from oncely.sinks.base import StagesRanges

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROUNDS = (None, None, 1)
"""The number of tasks that may stage in each round. Nearly always one round suffices. Tasks that
contradict others stage again, with the merged schema; if they contradict each other again, a
single task stages their ranges, which contradicts no other."""


@dataclass
class RangeCommit(PublishingRun[StagesRanges, RowTransform]):
    """Tasks stage the records that they read; the driver publishes.

    Attributes:
        bounds: the amount that a task decodes at once.
        layout: ``per_partition``: a task stages its own ranges; ``clustered``: one shuffle collects
            the rows of a directory, for fewer files.
        buckets: the number of tasks after that shuffle.
    """

    bounds: Bounds = field(default_factory=Bounds)
    layout: Literal["per_partition", "clustered"] = "per_partition"
    buckets: int = 8

    def run(
        self, frame: DataFrame, batch_id: int, ranges: Mapping[TopicPartition, OffsetRange]
    ) -> list[Outcome]:
        """Stage, check, publish."""
        self.sink.begin_batch()
        return self._publish(self._batch(ranges, self._agreed(frame, batch_id, ranges)), batch_id)

    def _agreed(
        self,
        frame: DataFrame,
        batch_id: int,
        ranges: Mapping[TopicPartition, OffsetRange],
    ) -> list[Answer]:
        """The answers of tasks that agree; ranges of the others are staged again."""
        agreed: list[Answer] = []
        left = ranges
        # A batch has no more records than offsets, and more records never lower the budget.
        max_rejects = self._budget().left(_offsets(ranges), 0)
        for tasks in _ROUNDS:
            answers = self._stage(frame, batch_id, left, tasks, max_rejects)
            fits = [one.staged is None or self.sink.agree(one.staged) for one in answers]
            against = [one for one, fit in zip(answers, fits, strict=True) if not fit]
            if not against:
                return sorted([*agreed, *answers], key=_order)
            if self.layout == "clustered":  # a file may have rows of any task: all stage again
                continue
            agreed += [one for one, fit in zip(answers, fits, strict=True) if fit]
            left = {tp: ranges[tp] for one in against for tp in one.read}
            frame = _only(frame, left)
        raise InvariantViolation(
            f"the tasks of batch {batch_id} contradict each other, even with a single task"
        )

    def _stage(
        self,
        frame: DataFrame,
        batch_id: int,
        ranges: Mapping[TopicPartition, OffsetRange],
        most: int | None,
        max_rejects: int | None,
    ) -> list[Answer]:
        """Run one job, of at most so many tasks; its answers in the order of their ranges."""
        clustered = self.layout == "clustered"
        reading = Reading.of(self, ranges, self.bounds)
        buckets = self.buckets if clustered else 0
        plan = RangePlan(self.sink, self.fence, batch_id, reading, buckets, max_rejects)
        tasks = most or max(1, -(-_offsets(ranges) // OFFSETS_A_TASK))
        # Not to the number of ranges: if some are staged already, Spark would put two of the others
        # into one task rather than one of them beside an empty one.
        if most or tasks < len(ranges):
            frame = frame.coalesce(tasks)
        if clustered:
            packets = frame.mapInArrow(carried(partial(send_ranges, plan)), PACKET_DDL)
            frame = packets.repartition(self.buckets, packets["bucket"]).select("answer", "packet")
        task = stage_packets if clustered else stage_ranges
        return sorted(collect_all(frame, task, plan, Answer), key=_order)

    def _batch(
        self, ranges: Mapping[TopicPartition, OffsetRange], answers: Sequence[Answer]
    ) -> Batch:
        """The job's output as a batch, after a check that it is complete.

        Raises:
            InvariantViolation: a task has read, sent or staged other records than planned.
            TooManyRejects: the reject budget is spent; nothing was published.
        """
        read: dict[TopicPartition, OffsetRange] = {}
        staged = [one.staged for one in answers if one.staged is not None]
        counts = dict.fromkeys(ranges, NO_RECORDS)
        rejects: list[Reject] = []
        for one in answers:
            check(not read.keys() & one.read.keys(), "two tasks have read one topic-partition")
            read |= one.read
            counts |= one.counts
            rejects += one.rejects
        for tp, range_ in read.items():
            planned = ranges[tp]
            fits = range_.start == planned.start and range_.end <= planned.end
            check(fits, f"{tp}: a task has read {range_}, and {planned} was planned")
        rows = sum(one.rows for one in counts.values())
        there = sum(one.rows for one in staged)
        check(rows == there, f"tasks have made {rows} rows, and {there} were staged")
        records = sum(one.records for one in counts.values())
        refuse_beyond(
            self._budget().left(records, 0),
            len(rejects),
            TOO_MANY.format(f"{len(rejects):,}"),
            MEND,
            lambda: RejectSummary.of(
                [one.reason for one in rejects],
                lambda chosen: [rejects[at].refused for at in chosen],
            ),
        )
        return Batch(ranges, counts, rejects, staged)


def _order(answer: Answer) -> list[TopicPartition]:
    return sorted(answer.read)


def _offsets(ranges: Mapping[TopicPartition, OffsetRange]) -> int:
    return sum(range_.end - range_.start for range_ in ranges.values())


def _only(frame: DataFrame, ranges: Mapping[TopicPartition, OffsetRange]) -> DataFrame:
    """The records of these topic-partitions."""
    from pyspark.sql.functions import col, lit

    wanted = lit(False)
    for tp in ranges:
        topic = col("topic") == tp.topic if "topic" in frame.columns else lit(True)
        wanted = wanted | (topic & (col("partition") == tp.partition))
    return frame.where(wanted)
