"""A batch of a Spark transform: batch commit, and how Spark holds the rows until it.

A shuffle mixes partitions, so no task's rows belong to one range. The driver publishes the output
of the transform with all rejects and all positions in one transaction: it reads the rows from Spark
while it writes them, or tasks have staged them as files. Rejects do not pass through the user's
query: a ``WHERE`` would drop them.

The first stage is :func:`decode_task`: records become rows, or a reason and nulls.

Tasks convert the rows to packets, which a local checkpoint keeps. So all of the transform's work is
done before a transaction begins, and a transaction that is repeated writes the same rows. The
driver reads the packets in parts; neither it nor its JVM holds all of them.

A plan must give the same rows when a part of it is repeated, which is checked. When an executor is
lost in the middle of a shuffle, Spark repeats only the lost map tasks. If they give other rows than
before, some rows are duplicated and others lost. So the input of an exchange must be deterministic.

For an audit the rows that records become by decode and transform are a DataFrame, too.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from oncely.commit.path import Outcome
from oncely.commit.run import OpenLedger
from oncely.core.batch import Batch, Packet, Reject, Rejection, Staged, StagedRowsGone
from oncely.core.claim import NO_RECORDS, Counts, Fence, refuse_beyond
from oncely.core.ranges import TopicPartition
from oncely.decode.base import Decoded, Decoder
from oncely.errors import KEPT, ConfigError, RejectSample, RejectSummary
from oncely.kafka.source import KafkaSource
from oncely.kinds.base import PacksRows, StagesBatches
from oncely.phases import phase, timed
from oncely.runtimes.batches.commit import shares_of
from oncely.runtimes.chunks import Processing, Ranges, dead_letters, fetched, isolating
from oncely.runtimes.jobs import Attempt, ShuffleBlock, all_of
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.spark.jobs import Batches, SparkJobs, answered, collected, settle, this_attempt
from oncely.secrets import carried

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

TOPIC, PARTITION, OFFSET, REASON, VALUE = (
    f"_oncely_{name}" for name in ("topic", "partition", "offset", "reason", "value")
)
_ORIGIN = 5  # columns that tell where a row is from
NO_TOMBSTONES = "a record without a value can't pass a Spark transform"


def decoded_schema(schema: pa.Schema) -> pa.Schema:
    """The decoder's columns, all nullable, the origin of the record, and the reason of a reject."""
    fields = [field.with_nullable(True) for field in schema]
    more = [(TOPIC, pa.string()), (PARTITION, pa.int32()), (OFFSET, pa.int64())]
    more += [(REASON, pa.string()), (VALUE, pa.binary())]
    return pa.schema([*fields, *(pa.field(*one) for one in more)])


def decode_task(
    source: KafkaSource,
    decoder: Decoder,
    needs: frozenset[str],
    shares: Sequence[Ranges],
    numbers: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """One output row for each record of the task's share: its columns, or a reason and nulls."""
    settle()
    schema = decoded_schema(decoder.schema)
    decode = isolating(decoder, again=this_attempt().again)
    with closing(source):
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for records in fetched(source, shares[number], needs):
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


Transform = Callable[["DataFrame"], "DataFrame"]

_LOOKED_AT = 1_000  # refused records whose reasons are shown when the pipeline stops


@dataclass
class BatchCommit:
    """Tasks make rows; the driver publishes them.

    Attributes:
        ledger: the ledger of the positions.
        transform: the Spark transform.
        jobs: has the Spark session.
    """

    ledger: OpenLedger[PacksRows | StagesBatches]
    transform: Transform
    jobs: SparkJobs

    def opened(self) -> None:
        """See :class:`~oncely.runtimes.batches.run.CommitsBatches`. Staged output of older runs is
        removed."""
        self.ledger.tidy(0, *self._sweep())

    def _sweep(self, keep_batches_from: int | None = None) -> list[Callable[[], object]]:
        """Removal of staged output, if tasks stage any."""
        sink = self.ledger.context.sink
        if isinstance(sink, PacksRows):
            return []
        return [partial(sink.sweep, self.ledger.fence, keep_batches_from)]

    def run(self, batch_id: int, ranges: Ranges) -> list[Outcome]:
        """Decode once, separate rejects, transform, publish."""
        context, shares = self.ledger.context, shares_of(ranges)
        task = partial(decode_task, context.source, context.decoder, context.needs, shares)
        schema = spark_schema(decoded_schema(context.decoder.schema))
        numbers = self.jobs.session.range(0, len(shares), 1, len(shares))
        decoded = numbers.mapInArrow(carried(task), schema)
        with phase("decode"):
            # A local checkpoint, not a cache: rejects are counted in one job and rows made in
            # another, and a block that is lost in between must fail the batch. Decoded again, a
            # record could be a reject in one job and a row in the other.
            decoded = decoded.localCheckpoint()
            counts, rejects = self._set_aside(decoded, ranges)
        rows = decoded.where(decoded[REASON].isNull()).select(*context.decoder.schema.names)
        batch = self._made(self.transform(rows), batch_id, Batch(ranges, counts, rejects))
        return self.ledger.publish(batch, *self._sweep(batch_id + 1))

    def _made(self, frame: DataFrame, batch_id: int, batch: Batch) -> Batch:
        """Run the transform's plan; the batch with its rows.

        Raises:
            ConfigError: the plan is not deterministic before a shuffle.
        """
        sink = self.ledger.context.sink
        if isinstance(sink, PacksRows):
            return HeldRows.of(sink, frame).into(batch)
        refuse_non_deterministic(frame)
        sink.begin_batch()
        task = partial(stage_rows, sink, self.ledger.fence, batch_id)
        return replace(batch, staged=all_of(collected(answered(frame, task))))

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
            self.ledger.budget.left(records, 0),
            rejected,
            f"{rejected:,} records of this batch can't be decoded;"
            f" reasons of the first {min(rejected, _LOOKED_AT):,}",
            "correct decode",
            partial(_refused, bad),
        )
        rejects = self._letters([tuple(row) for row in bad.collect()]) if rejected else []
        found = {tp: counts.get(tp, (0, 0)) for tp in ranges}
        return {tp: Counts(all_, 0, bad_, 0) for tp, (all_, bad_) in found.items()}, rejects

    def _letters(self, bad: Sequence[tuple[Any, ...]]) -> list[Reject]:
        origins = [(TopicPartition(row[0], int(row[1])), int(row[2])) for row in bad]
        why = [Rejection(i, "decode", row[3]) for i, row in enumerate(bad)]
        values = [None if row[4] is None else bytes(row[4]) for row in bad]
        return dead_letters(self.ledger.context.source, pa.table({"value": values}), origins, why)


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


def transform_rows(session: SparkSession, transform: Transform, rows: pa.Table) -> pa.Table:
    """Run the transform over ``rows`` as if they were a batch; all columns are nullable."""
    nullable = pa.schema([field.with_nullable(True) for field in rows.schema])
    given = carried(partial(_given, rows.cast(nullable)))
    made = transform(session.range(0, 1, 1, 1).mapInArrow(given, spark_schema(nullable)))
    empty = arrow_schema(made.schema).empty_table()
    parts: list[pa.Table] = all_of(collected(answered(made, _tables)))
    return pa.concat_tables([empty, *(part.cast(empty.schema) for part in parts)])


def _given(rows: pa.Table, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in numbers:
        yield from rows.to_batches()


def _tables(batches: Iterable[pa.RecordBatch], attempt: Attempt) -> Generator[pa.Table, None, None]:
    del attempt
    yield from (pa.Table.from_batches([batch]) for batch in batches)


TIME, DELETES = "_oncely_timestamp", "_oncely_deletes"
_PLACE = (TOPIC, PARTITION, OFFSET, TIME)


@dataclass(frozen=True)
class RowPlan:
    """The parameters of a task."""

    decoder: Decoder
    transform: RowTransform

    @property
    def schema(self) -> pa.Schema:
        """The columns of a row, its record, and whether the record deletes."""
        rows = self.transform.output(self.decoder.schema)
        more = [(TOPIC, pa.string()), (PARTITION, pa.int32()), (OFFSET, pa.int64())]
        more += [(TIME, pa.timestamp("us", "UTC")), (DELETES, pa.bool_())]
        return pa.schema([one.with_nullable(True) for one in rows] + [pa.field(*m) for m in more])


def expected_rows(plan: RowPlan, records: DataFrame) -> DataFrame:
    """The rows of records. A tombstone has a row with its key columns only; a record that is
    refused or filtered has none."""
    from pyspark.sql import functions as F

    needed = sorted(plan.decoder.needs | {"topic", "partition", "offset", "timestamp"})
    origin = [F.col(name) for name in needed]
    schema = spark_schema(plan.schema)
    return records.select(*origin).mapInArrow(carried(partial(row_task, plan)), schema)


def row_task(plan: RowPlan, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of a task's records."""
    settle()
    schema = plan.schema
    again = Processing(isolating(plan.decoder, again=this_attempt().again), plan.transform)
    for batch in batches:
        records = pa.Table.from_batches([batch])
        if not records.num_rows:
            continue
        chunk = again.chunk(records)
        yield from _lines(chunk.rows, records, chunk.row_record, False, schema).to_batches()
        if chunk.deletes is not None:
            dead = _lines(chunk.deletes, records, chunk.delete_record, True, schema)
            yield from dead.to_batches()


def _lines(
    rows: pa.Table, records: pa.Table, index: np.ndarray, deletes: bool, schema: pa.Schema
) -> pa.Table:
    own = records.take(pa.array(index, pa.int64()))
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    columns |= {name: own.column(name.removeprefix("_oncely_")) for name in _PLACE}
    columns[DELETES] = pa.chunked_array([pa.repeat(pa.scalar(deletes), rows.num_rows)])
    return pa.table(
        [
            columns[one.name].cast(one.type)
            if one.name in columns
            else pa.nulls(rows.num_rows, one.type)
            for one in schema
        ],
        schema=schema,
    )


# -- rows between the stages ----------------------------------------------------------------

_PACKET_BYTES = 4_000_000  # of rows, before a sink has converted them
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True)
class PacketSize:
    """The description of a packet.

    Attributes:
        staged: what it contains.
        size: its bytes.
    """

    staged: Staged
    size: int


def stage_rows(
    sink: StagesBatches, fence: Fence, batch_id: int, batches: Batches, attempt: Attempt
) -> Generator[Staged, None, None]:
    """Stage rows of a Spark transform under the attempt's own name."""
    rows = (pa.Table.from_batches([batch]) for batch in timed("read", batches))
    with phase("write"):
        staged = sink.stage(fence, batch_id, attempt.number, rows)
    yield staged


def pack_rows(
    sink: PacksRows, batches: Batches, attempt: Attempt
) -> Generator[ShuffleBlock, None, None]:
    """Rows of a Spark transform in the form in which the driver writes them: blocks about which a
    :class:`PacketSize` is told."""
    del attempt
    for batch in timed("read", batches):
        for rows in _cut(pa.Table.from_batches([batch])):
            with phase("write"):
                packets = sink.pack(rows)
            for one in packets:
                content = _serialized(one.content)
                yield ShuffleBlock(0, content, PacketSize(one.staged, len(content)))


def _cut(rows: pa.Table) -> Iterator[pa.Table]:
    """Slices of a few megabytes; a row that is larger is a slice by itself."""
    step = max(1, rows.num_rows * _PACKET_BYTES // max(1, rows.nbytes))
    return (rows.slice(at, step) for at in range(0, rows.num_rows, step))


def _serialized(rows: pa.Table) -> bytes:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, rows.schema, options=_COMPRESSED) as writer:
        writer.write_table(rows)
    return bytes(stream.getvalue())


# -- schemas, alike on every release of Spark ----------------------------------------------


def arrow_schema(schema: StructType) -> pa.Schema:
    """The columns of a DataFrame; timestamps are those of UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    # Later releases have no default for the time zone, earlier ones no parameter.
    asks = "timezone" in inspect.signature(to_arrow_schema).parameters
    return to_arrow_schema(schema, **({"timezone": "UTC"} if asks else {}))


def spark_schema(schema: pa.Schema) -> StructType:
    """Columns of Arrow, all nullable; a timestamp without a time zone is one of UTC."""
    from pyspark.sql.pandas.types import from_arrow_schema

    nullable = pa.schema([field.with_nullable(True) for field in schema])
    return from_arrow_schema(nullable, prefer_timestamp_ntz=False)


_PARTITION = 16_000_000
"""Bytes of packets that the driver reads at once. Its JVM holds two such parts: the one that is
written, and the next one."""


@dataclass(frozen=True)
class HeldRows:
    """The rows of one batch.

    Attributes:
        frame: the checkpoint: a row for each packet.
        sizes: the packets' descriptions, by the tasks that have made them.
    """

    frame: DataFrame
    sizes: Sequence[PacketSize]

    @classmethod
    def of(cls, sink: PacksRows, frame: DataFrame) -> HeldRows:
        """Run the transform's plan.

        Raises:
            ConfigError: the plan is not deterministic before a shuffle.
            Stopped: a row cannot be written.
        """
        refuse_non_deterministic(frame)
        # Lazy: the job that collects the answers fills the checkpoint.
        kept = answered(frame, partial(pack_rows, sink)).localCheckpoint(eager=False)
        return cls(kept, all_of(collected(kept)))

    def into(self, batch: Batch) -> Batch:
        """The batch with these rows."""
        return replace(batch, staged=[one.staged for one in self.sizes], packets=self.read)

    def read(self) -> Iterator[Packet]:
        """All packets, in any order.

        Raises:
            StagedRowsGone: they are not those of :attr:`sizes`. Of a task that was run twice, the
                answer may be of one attempt and the packets of the other.
        """
        parts = -(-sum(one.size for one in self.sizes) // _PARTITION)
        told = _sum([one.staged for one in self.sizes])
        found: list[Staged] = []
        kept = self.frame.where(self.frame["packet"].isNotNull()).select("answer", "packet")
        packets = kept.repartition(max(1, parts))
        for answer, content in packets.toLocalIterator(prefetchPartitions=True):
            staged = pickle.loads(bytes(answer)).staged  # noqa: S301 - our own tasks' answers
            found.append(staged)
            with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
                rows = reader.read_all()
            yield Packet(staged, rows)
        held = _sum(found)
        if (held.rows, held.digest) != (told.rows, told.digest):
            raise StagedRowsGone(
                f"tasks have reported {told.rows} rows, and Spark holds {held.rows}, or other ones;"
                " the batch is repeated"
            )


def _sum(staged: Sequence[Staged]) -> Counts:
    return sum((Counts(0, one.rows, 0, 0, one.digest, one.recipe) for one in staged), NO_RECORDS)


# -- determinism ---------------------------------------------------------------------------


def refuse_non_deterministic(frame: DataFrame) -> None:
    """Refuse ``rand()``, ``uuid()`` and non-deterministic functions below a shuffle.

    Raises:
        ConfigError: names the operator.
    """
    physical = frame._jdf.queryExecution().executedPlan()
    for node in _nodes(physical):
        if "Exchange" not in node.nodeName():
            continue
        for below in _nodes(node):
            if not _own_expressions_deterministic(below):
                raise ConfigError(
                    "transform.spark",
                    f"{below.nodeName()} is not deterministic and feeds a shuffle",
                    way_out="take rand(), uuid() and the like after the last shuffle,"
                    " or derive the value from the record",
                )


def _nodes(plan: Any) -> Iterator[Any]:
    """The operators of a physical plan, also inside an adaptive one."""
    if plan.getClass().getSimpleName() == "AdaptiveSparkPlanExec":
        plan = plan.initialPlan()  # the plan with exchanges, which its input plan lacks
    yield plan
    children = plan.children()
    for i in range(children.length()):
        yield from _nodes(children.apply(i))


def _own_expressions_deterministic(plan: Any) -> bool:
    expressions = plan.expressions()
    return all(bool(expressions.apply(i).deterministic()) for i in range(expressions.length()))
