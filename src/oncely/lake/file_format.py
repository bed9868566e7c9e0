"""What a pipeline's files are: their columns, their format, where a row goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from oncely.decode.infer import InferringJson
from oncely.decode.merging import Caps
from oncely.lake.event_time import EventTime
from oncely.lake.partitions import PartitionColumn
from oncely.lake.records import Format

VALUE = "value"
"""The one column of rows whose columns are inferred: the record's bytes."""


@dataclass(frozen=True)
class FileFormat:
    """Attributes of the files of a pipeline.

    Attributes:
        format: of each.
        columns: that choose a row's directory.
        schema: of every row; None: inferred, by scope.
        target_bytes: of a file.
        caps: of an inferred schema.
    """

    format: Format
    columns: tuple[PartitionColumn, ...]
    schema: pa.Schema | None
    target_bytes: int = 64 << 20
    caps: Caps = field(default_factory=Caps)

    @property
    def scope_columns(self) -> tuple[str, ...]:
        """The columns whose values share a schema; none where it is fixed."""
        if self.schema is not None:
            return ()
        return tuple(one.column for one in self.columns if one.kind == "column")

    def inferring(self) -> InferringJson:
        """Makes columns of records, for :attr:`schema` None."""
        times = {one.column for one in self.columns if one.kind != "column"}
        return InferringJson(self.scope_columns, self.caps, *map(EventTime, times))
