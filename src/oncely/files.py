"""The files of a pipeline, by its manifest: list, read, verify, compact, vacuum.

    from oncely import files

    frame = files.read(spark, "events.toml", where={"user": "ann"})

Only files that the manifest lists are part of the table. Spark distributes paths, and workers fetch
files and convert them to rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from oncely.kinds.files.records import ManifestFile
from oncely.kinds.files.table import Allowed, Named, Table, read_as, selected
from oncely.kinds.files.table import table_of as table_of_parts
from oncely.pipeline import Pipeline
from oncely.stores.objects.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Table", "read", "table_of"]

_ROWS = 20_000  # rows in an Arrow batch sent to the JVM
_TASK = 64 << 20  # bytes of files per task, approximately
_OPEN = 1 << 20  # cost of fetching a file, as bytes that could be read meanwhile
_LINES = "files array<struct<path: string, format: string, sha256: string>>"


def table_of(pipeline: str | Path | Pipeline) -> Table:
    """The table of a pipeline with a files sink.

    Args:
        pipeline: its file, or the pipeline itself.

    Raises:
        ConfigError: the file is invalid, or the sink has another kind.
    """
    if not isinstance(pipeline, Pipeline):
        pipeline = Pipeline.from_file(pipeline)
    return table_of_parts(pipeline)


def read(
    spark: SparkSession,
    pipeline: str | Path | Pipeline | Table,
    *,
    where: Mapping[str, str | None] | None = None,
    columns: Sequence[str] | None = None,
    rounding: Allowed = "refuse",
) -> DataFrame:
    """The rows of a pipeline's files according to the present manifest.

    Files that are added later are not included; files that are compacted away stay readable for
    ``sink.max_staging_age``. Each file is compared with its published SHA-256. Its columns are
    resolved to the published schema: missing columns are null, int becomes double.

    Args:
        spark: the session.
        pipeline: the pipeline file, the pipeline, or its table.
        where: select files by values of partition columns; None for "no value". The values are
            texts as in the directories, decoded: ``{"date": "2026-11-21"}``.
        columns: the requested columns, in this order; all by default.
        rounding: ``allow``: whole numbers that have no exact floating-point value in their column
            are rounded. By default reading them is an error.

    Raises:
        WrongInput: a number would be rounded, and ``rounding`` refuses it.
        ConfigError: the sink is no files sink, or was never written to; ``where`` contains a name
            that is no partition column; ``columns`` contains an unknown column; a column has
            incompatible types in two scopes.
        Unavailable: the cluster does not answer.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    table = pipeline if isinstance(pipeline, Table) else table_of(pipeline)
    files, schema = selected(table, where, columns, rounding)
    spark_schema = from_arrow_schema(schema, prefer_timestamp_ntz=True)
    if not files:
        return spark.createDataFrame([], spark_schema)
    tasks = _dealt(files, spark.sparkContext.defaultParallelism)
    # One element for each task, regardless of sizes: a shuffle would distribute them by hash.
    dealt = spark.sparkContext.parallelize([(task,) for task in tasks], len(tasks))
    frame = spark.createDataFrame(dealt, _LINES)
    return frame.mapInArrow(_Reader(table.store, schema, rounding), spark_schema)


@dataclass(frozen=True)
class _Reader:
    """The work of a task: reads files."""

    store: Store
    schema: pa.Schema
    rounding: Allowed

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column("files").to_pylist():
                for file in task:
                    rows = read_as(self.store, Named(**file), self.schema, self.rounding)
                    yield from rows.to_batches(max_chunksize=_ROWS)


def _dealt(files: Sequence[ManifestFile], cores: int) -> list[list[Named]]:
    """The files of each task; those of one task are consecutive."""
    costs = [file.bytes + _OPEN for file in files]
    most = min(_TASK, max(_OPEN, sum(costs) // cores))
    tasks: list[list[Named]] = []
    size = most
    for file, cost in zip(files, costs, strict=True):
        if size + cost > most:
            tasks.append([])
            size = 0
        size += cost
        tasks[-1].append(Named.of(file))
    return tasks
