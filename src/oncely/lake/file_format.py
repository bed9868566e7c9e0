"""The format of a pipeline's files: their columns, encoding and directories."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from oncely.decode.infer import InferringJson
from oncely.decode.merging import CAPS
from oncely.lake.partitions import EventTime, PartitionColumn
from oncely.lake.records import Format

VALUE = "value"
"""The single column of rows whose columns are inferred: the record's bytes."""


@dataclass(frozen=True)
class FileFormat:
    """Attributes of the files of a pipeline.

    Attributes:
        format: the format of each file.
        columns: the columns that determine a row's directory.
        schema: the schema of every row; None: inferred by scope.
        target_bytes: the target size of a file, in bytes.
    """

    format: Format
    columns: tuple[PartitionColumn, ...]
    schema: pa.Schema | None
    target_bytes: int = 64 << 20

    @property
    def scope_columns(self) -> tuple[str, ...]:
        """The columns whose values select a schema; empty if the schema is fixed."""
        if self.schema is not None:
            return ()
        return tuple(one.column for one in self.columns if one.kind == "column")

    def inferring(self) -> InferringJson:
        """The decoder that infers columns, if :attr:`schema` is None."""
        times = {one.column for one in self.columns if one.kind != "column"}
        return InferringJson(self.scope_columns, CAPS, *map(EventTime, times))
