"""``[sink]`` with ``kind = "delta"``: a Delta table, and the way of writing rows to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from oncely.config.base import Problem, all_invalid, as_tuple
from oncely.config.pipeline import PipelineSettings
from oncely.config.root import RootSettings, partition_columns
from oncely.config.sink import key_problems, upsert_problems

_LONGEST = 86_400  # seconds: well below the retention of a table's VACUUM, a week by default


class DeltaSinkSettings(RootSettings):
    """``[sink]`` with ``kind = "delta"``.

    Attributes:
        mode: append rows, or upsert them by ``keys``.
        keys: the columns that identify a row in an upsert.
        version: a column that grows with each change: an older row never replaces a newer one.
        keep_source: also write topic, partition and offset of each row; by default in a table that
            Oncely creates, or that has these columns. Unless it is false, rows must not have
            columns of the same names.
        partition_by: the columns that make up the directories.
    """

    examples: ClassVar[Mapping[str, str]] = {
        "url": 'url = "s3://lake/flights"',
        "partition_by": 'partition_by = ["carrier"]',
    }

    kind: Literal["delta"]
    mode: Literal["append", "upsert"] = "append"
    keys: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = ()
    version: str | None = None
    keep_source: bool | None = None
    partition_by: Annotated[
        tuple[str, ...], BeforeValidator(as_tuple), AfterValidator(partition_columns)
    ] = ()

    @property
    def batch_records(self) -> int | None:
        """Maximum offsets of a batch by default; the driver merges the rows of an upsert."""
        return None if self.mode == "upsert" else super().batch_records

    def problems(self, pipeline: PipelineSettings) -> list[Problem]:
        """What does not go with the rest of the file."""
        found = super().problems(pipeline) + key_problems(pipeline.decode.key, self.mode, self.keys)
        if pipeline.by_spark and self.mode == "upsert":
            found.append(
                Problem("transform.spark", "gives rows in no order, and of two rows of a key an"
                        " upsert keeps the last", "use transform.sql or .python, or append")
            )  # fmt: skip
        return found

    @model_validator(mode="after")
    def _fits(self) -> Self:
        from oncely.kinds.partitions import parse_partition_by

        found = upsert_problems(self.mode, self.keys, self.version)
        if any(one.kind != "column" for one in parse_partition_by(self.partition_by)):
            found.append(Problem("partition_by", "Delta has no partitions by date(…) or hour(…)",
                                 "make a column of it in the transform"))  # fmt: skip
        if self.max_staging_age > _LONGEST:
            found.append(Problem("max_staging_age", "allowed: up to a day, well below the retention"
                                 " of the table's VACUUM", 'write "1 hour"'))  # fmt: skip
        if not self.url.startswith(("file:", "s3:")):
            found.append(Problem("url", "a Delta table lies below file:// or s3://",
                                 "write s3://bucket/prefix"))  # fmt: skip
        if found := [*found, *self._store_problems()]:
            raise all_invalid(found)
        return self
