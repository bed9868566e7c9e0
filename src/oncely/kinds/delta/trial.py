"""Delta tables in the trials of ``oncely semantics``: staged files and commits have the fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from oncely.kinds.trial import (
    BEFORE,
    COMMIT,
    POSITION,
    RECORDS,
    STAGING,
    Killer,
    KillingStores,
    Place,
    Trial,
)
from oncely.stores.delta import Change, DeltaTables, connect
from oncely.stores.objects.root import S3Options


@dataclass
class KillingTables:
    """``Parts.delta_connect``."""

    killer: Killer

    def __call__(self, url: str, s3: S3Options | None) -> Any:
        """Open the table; its commits have the fault."""
        return _Table(connect(url, s3), self.killer)


class _Table:
    """A table that tracks the step of its commits."""

    def __init__(self, inner: DeltaTables, killer: Killer) -> None:
        self._inner, self._killer = inner, killer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def commit(self, table: Any, change: Change) -> None:
        records, position = bool(change.files), "ranges" in change.metadata
        if position if self._killer.position_first else records:
            self._killer.at(BEFORE)
        self._inner.commit(table, change)
        self._killer.committed(records=records, position=position)


def _sink(place: Place, name: str) -> dict[str, Any]:
    url = place.root("delta", name).as_uri()
    return {"kind": "delta", "url": url, "partition_by": ["team"], "flush_interval": "0 seconds"}


def _found(place: Place, name: str) -> Counter[int]:
    from deltalake import DeltaTable

    table = DeltaTable(place.root("delta", name)).to_pyarrow_table(columns=["id"])
    return Counter(table["id"].to_pylist())


TRIAL = Trial(
    title="Into a Delta table",
    points=(*STAGING, BEFORE, RECORDS, POSITION, COMMIT),
    sink=_sink,
    faulty=lambda killer, _: {
        "files_connect": KillingStores(killer),
        "delta_connect": KillingTables(killer),
    },
    found=_found,
    in_files=True,
    one_commit=(RECORDS, POSITION),
    note="Tasks write files; then the driver makes one commit of the table, which has no"
    " middle: files and position are in the same version. A weaker semantics makes two commits.",
)
