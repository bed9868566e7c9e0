"""A record as functions of users get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oncely.context import Context


@dataclass(frozen=True, eq=False)
class Record:
    """A record, as decoded and transformed.

    Attributes:
        topic, partition, offset: where it was read.
        row: the columns by name. With ``decode.format = "raw"``: ``key``, ``value`` (bytes or
            None) and ``timestamp``.
        headers: names and values, in order.
        deleted: it is a tombstone; its row has the columns of the key only.
    """

    topic: str
    partition: int
    offset: int
    row: Mapping[str, Any]
    headers: Sequence[tuple[str, bytes | None]]
    deleted: bool
    number: int = field(repr=False)
    """Its index in the chunk."""
    context: Context = field(default_factory=dict, repr=False)
    """The values that travel with it; current while a loop over the batch is here."""

    def __getitem__(self, column: str) -> Any:
        return self.row[column]

    @property
    def key(self) -> Any:
        """The column ``key``."""
        return self._column("key")

    @property
    def value(self) -> Any:
        """The column ``value``."""
        return self._column("value")

    @property
    def timestamp(self) -> Any:
        """The column ``timestamp``."""
        return self._column("timestamp")

    def _column(self, name: str) -> Any:
        if name not in self.row:
            raise AttributeError(
                f"the decoded record has no column {name!r}, but {', '.join(self.row)}"
            )
        return self.row[name]
