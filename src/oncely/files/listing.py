"""The files that are part of the table, counted and listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from oncely.files.table import Table
from oncely.lake.records import ManifestFile


@dataclass(frozen=True)
class Listing:
    """Files by path.

    Attributes:
        files: the selected files.
        total: the number of files of the whole table.
    """

    files: tuple[ManifestFile, ...]
    total: int

    @property
    def rows(self) -> int:
        """The number of rows in the listed files."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """The size of the listed files."""
        return sum(file.bytes for file in self.files)

    def as_json(self) -> dict[str, Any]:
        """JSON-able values: each file as in its manifest message."""
        return {
            "files": [msgspec.to_builtins(file) for file in self.files],
            "listed": len(self.files),
            "total": self.total,
            "rows": self.rows,
            "bytes": self.bytes,
        }


def listing(table: Table, where: Mapping[str, str | None] | None = None) -> Listing:
    """The files with these partition values.

    Raises:
        ConfigError: never written to, or not partitioned by these columns.
        Unavailable: the cluster does not answer.
    """
    contents = table.look()
    return Listing(tuple(table.chosen(contents, where or {})), len(contents.files))


def addresses(
    table: Table, where: Mapping[str, str | None] | None = None
) -> Iterator[dict[str, Any]]:
    """The files with these partition values as other programs open them, as JSON-able values.

    Raises:
        ConfigError: never written to, or not partitioned by these columns.
        Unavailable: the cluster does not answer.
    """
    for file in listing(table, where).files:
        found = {
            "path": table.store.address(file.path),
            "format": file.format,
            "rows": file.rows,
            "bytes": file.bytes,
        }
        yield found | {"partition": file.partition} if file.partition else found
