"""A table's rows without Spark: one file after the other, for inspection or small exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from oncely.files.reading import Allowed, Named, read_as
from oncely.files.schemas import wanted_schema
from oncely.files.table import Table


def rows(
    table: Table,
    *,
    where: Mapping[str, str | None] | None = None,
    columns: Sequence[str] | None = None,
    rounding: Allowed = "refuse",
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """The columns, and the rows of one file after the other, in the order of paths.

    Args and errors are those of :func:`oncely.files.read`; errors of files are raised during the
    iteration.
    """
    contents = table.look()
    files = list(table.chosen(contents, where or {}))
    scopes = {file.scope for file in files} or contents.schemas.keys()
    schema = wanted_schema(contents.schemas, scopes, columns, rounding=rounding == "allow")
    return schema, (read_as(table.store, Named.of(file), schema, rounding) for file in files)
