"""Schemas of Spark as those of Arrow, and back, alike on every release of Spark."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


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
