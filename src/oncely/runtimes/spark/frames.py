"""Tasks over the rows of a Spark transform."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from oncely.core.batch import Staged
from oncely.core.claim import Fence
from oncely.phases import phase, timed
from oncely.runtimes.jobs.base import Attempt, ShuffleBlock
from oncely.runtimes.spark.jobs import Batches
from oncely.sinks.base import PacksRows, StagesBatches

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_PACKET_BYTES = 4_000_000  # of rows, before a sink has converted them
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True)
class StagePlan:
    """The parameters of a task that stages rows of a Spark transform."""

    sink: StagesBatches
    fence: Fence
    batch_id: int


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
    plan: StagePlan, batches: Batches, attempt: Attempt
) -> Generator[Staged, None, None]:
    """Stage rows of a Spark transform under the attempt's own name."""
    rows = (pa.Table.from_batches([batch]) for batch in timed("read", batches))
    with phase("write"):
        staged = plan.sink.stage(plan.fence, plan.batch_id, attempt.number, rows)
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
