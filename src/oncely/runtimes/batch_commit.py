"""A micro-batch of a Spark transform: batch commit.

A shuffle mixes partitions, so no task's rows belong to one range. Tasks stage what comes out
of the transform; the driver publishes all of it with all rejects and all positions in one
transaction. Rejects never travel through the user's query: a ``WHERE`` would drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncely.core.ledger import Append, Entry, Skip, decide
from oncely.core.offsets import Position, SourceIdentity, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.decode.base import Rejection
from oncely.errors import InvariantViolation, TooManyRejects, Unavailable
from oncely.runtimes.backoff import Backoff
from oncely.runtimes.commit import Outcome
from oncely.runtimes.determinism import refuse_non_deterministic
from oncely.runtimes.ledger_keeper import LedgerKeeper
from oncely.runtimes.letters import dead_letters
from oncely.runtimes.staging_task import (
    OFFSET,
    PARTITION,
    REASON,
    STAGED_DDL,
    TOPIC,
    VALUE,
    DecodePlan,
    StagePlan,
    decode_task,
    decoded_schema,
    origin,
    read_staged,
    stage_task,
)
from oncely.sinks.base import (
    Opened,
    PositionMoved,
    Publication,
    Reject,
    Staged,
    StagedRowsGone,
    Written,
)
from oncely.sinks.sql.sink import SqlSink
from oncely.sinks.sql.staging import publish, sweep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Transform = Callable[["DataFrame"], "DataFrame"]


@dataclass
class BatchCommit(LedgerKeeper[Transform]):
    """Tasks stage; the driver publishes."""

    def open(
        self,
        source: SourceIdentity,
        start: Callable[[], Mapping[TopicPartition, Position]],
        earliest: Mapping[TopicPartition, Position],
        expected: int | None,
    ) -> Opened:
        """Take the ledger, and drop what older runs left staged."""
        opened = super().open(source, start, earliest, expected)
        self._tidy(lambda: sweep(self.sink, self.fence))
        return opened

    def run(
        self, frame: DataFrame, batch_id: int, ranges: Mapping[TopicPartition, OffsetRange]
    ) -> list[Outcome]:
        """Decode once, set rejects aside, transform, stage, publish."""
        from pyspark import StorageLevel
        from pyspark.sql.pandas.types import from_arrow_schema

        plan = DecodePlan(self.decoder, self._only_topic)
        schema = from_arrow_schema(decoded_schema(self.decoder.schema))
        decoded = frame.mapInArrow(partial(decode_task, plan), schema)
        # A local checkpoint, not a cache: rejects are counted in one job and rows staged in
        # another, and a block that is lost in between must fail the batch. Decoded anew, a
        # record could be a reject in the one and a row in the other.
        decoded = decoded.localCheckpoint(True, StorageLevel.MEMORY_AND_DISK)
        written, rejects = self._set_aside(decoded, ranges)
        rows = decoded.where(decoded[REASON].isNull()).select(*self.decoder.schema.names)
        staged = stage_frame(self.sink, self.transform(rows), self.fence, batch_id)
        replayed = self._publish(Publication(ranges, written, rejects, staged))
        self._tidy(lambda: sweep(self.sink, self.fence, keep_batches_from=batch_id + 1))
        self._count(sum(one.records for one in written.values()), len(rejects))
        return [Outcome(tp, ranges[tp], written[tp], replayed) for tp in sorted(ranges)]

    def _set_aside(
        self, decoded: DataFrame, ranges: Mapping[TopicPartition, OffsetRange]
    ) -> tuple[dict[TopicPartition, Written], list[Reject]]:
        """Count the records of each range and make dead letters of the bad ones.

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
        left = self._budget().left(records, 0)
        if left is not None and rejected > left:
            raise TooManyRejects(
                f"sink.max_rejects: {rejected} records of this batch can't be decoded",
                way_out="mend decode; or raise sink.max_rejects to keep them",
            )
        columns = (TOPIC, PARTITION, OFFSET, REASON, VALUE)
        bad = decoded.where(decoded[REASON].isNotNull()).select(*columns)
        rejects = self._letters([tuple(row) for row in bad.collect()]) if rejected else []
        written = {
            tp: Written(counts.get(tp, (0, 0))[0], 0, counts.get(tp, (0, 0))[1], 0) for tp in ranges
        }
        return written, rejects

    def _letters(self, bad: Sequence[tuple[Any, ...]]) -> list[Reject]:
        origins = [origin(row[:3]) for row in bad]
        why = [Rejection(i, "decode", row[3]) for i, row in enumerate(bad)]
        values = [None if row[4] is None else bytes(row[4]) for row in bad]
        return dead_letters(self.source, pa.table({"value": values}), origins, why)

    def _publish(self, what: Publication) -> bool:
        """Publish, settling a lost answer by the ledger; True when it had taken effect before.

        Raises:
            InvariantViolation: the ledger holds some ranges of the batch and not others.
        """
        patience = Backoff()
        while True:
            try:
                entries = self._entries()
                if self._all_done(what.ranges, entries):
                    return True
                publish(self.sink, what, entries, self.fence)
            except PositionMoved:
                continue
            except StagedRowsGone:
                if self._all_done(what.ranges, self._entries()):
                    return True  # our own publication took them, and its answer was lost
                raise
            except Unavailable:
                patience.wait_or_raise()
                continue
            return False

    def _all_done(
        self, ranges: Mapping[TopicPartition, OffsetRange], entries: Mapping[TopicPartition, Entry]
    ) -> bool:
        """Append for all, or Skip for all: one transaction has them all or none."""
        decisions = [decide(entries[tp], r, self.fence.epoch) for tp, r in ranges.items()]
        if all(isinstance(one, Append) for one in decisions):
            return False
        if all(isinstance(one, Skip) for one in decisions):
            return True
        raise InvariantViolation(f"a batch commit met a ledger that holds half of it: {decisions}")


def stage_frame(sink: SqlSink, frame: DataFrame, fence: Any, batch_id: int) -> list[Staged]:
    """Run the transform's plan and stage its rows; only successful attempts are heard of.

    Raises:
        ConfigError: the plan is not deterministic before a shuffle.
    """
    refuse_non_deterministic(frame)
    plan = StagePlan(sink, fence, batch_id)
    answers = frame.mapInArrow(partial(stage_task, plan), STAGED_DDL).collect()
    return read_staged(tuple(row) for row in answers)


def output_schema(session: Any, transform: Transform, schema: pa.Schema) -> pa.Schema:
    """The columns that a Spark transform makes of the decoder's columns."""
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    nullable = pa.schema([field.with_nullable(True) for field in schema])
    made = transform(session.createDataFrame([], from_arrow_schema(nullable)))
    return to_arrow_schema(made.schema)
