"""Rows of a Spark transform: tasks over them, and how Spark holds them until they are published.

Tasks convert the rows to packets, which a local checkpoint keeps. So all of the transform's work is
done before a transaction begins, and a transaction that is repeated writes the same rows. The
driver reads the packets in parts; neither it nor its JVM holds all of them.

A plan must give the same rows when a part of it is repeated, which is checked. When an executor is
lost in the middle of a shuffle, Spark repeats only the lost map tasks. If they give other rows than
before, some rows are duplicated and others lost. So the input of an exchange must be deterministic.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncely.core.batch import Batch, Packet, Staged, StagedRowsGone
from oncely.core.claim import NO_RECORDS, Counts, Fence
from oncely.errors import ConfigError
from oncely.kinds.base import PacksRows, StagesBatches
from oncely.phases import phase, timed
from oncely.runtimes.jobs.base import Attempt, ShuffleBlock, all_of
from oncely.runtimes.spark.jobs import Batches, answered, collected

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


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
