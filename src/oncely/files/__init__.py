"""The files of a pipeline, by its manifest: list, read, verify, compact, vacuum.

    from oncely import files

    frame = files.read(spark, "events.toml", where={"user": "ann"})

Nothing here takes a file for part of the table that the manifest does not name.
"""

from __future__ import annotations

from oncely.files.spark import read
from oncely.files.table import Table, table_of

__all__ = ["Table", "read", "table_of"]
