"""The rows that records become by a pipeline's decode and row transform, for an audit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from oncely.decode.base import Decoder
from oncely.runtimes.batches.task import isolating
from oncely.runtimes.chunks import Processing
from oncely.runtimes.row_transform import RowTransform
from oncely.runtimes.spark.batch_commit import OFFSET, PARTITION, TOPIC
from oncely.runtimes.spark.jobs import this_attempt
from oncely.runtimes.spark.rows import spark_schema
from oncely.runtimes.spark.worker import settle
from oncely.secrets import carried

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TIME, DELETES = "_oncely_timestamp", "_oncely_deletes"
_ORIGIN = (TOPIC, PARTITION, OFFSET, TIME)


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
    rows: pa.Table,
    records: pa.Table,
    index: np.ndarray,
    deletes: bool,
    schema: pa.Schema,
) -> pa.Table:
    own = records.take(pa.array(index, pa.int64()))
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    columns |= {name: own.column(name.removeprefix("_oncely_")) for name in _ORIGIN}
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
