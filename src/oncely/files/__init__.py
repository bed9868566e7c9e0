"""The files of a pipeline, by its manifest: list, read, verify, compact, vacuum.

    from oncely import files

    frame = files.read(spark, "events.toml", where={"user": "ann"})

Only files that the manifest lists are part of the table.
"""

from __future__ import annotations

from oncely.files.spark import read
from oncely.files.table import Table, table_of

__all__ = ["Table", "read", "table_of"]
