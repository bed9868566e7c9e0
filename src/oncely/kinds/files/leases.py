"""Staging leases: the limits by which a process stages files, kept below the root.

``vacuum`` removes an unpublished file when no process can publish it any more. A process publishes
files up to its own ``max_staging_age``, which it has read from the pipeline file at its start. The
pipeline file may have been changed since, so ``vacuum`` cannot rely on the file alone. Every
process that stages files (a run, a replay of dead letters, a compaction) therefore writes a lease
before the first file of a batch, and ``vacuum`` uses the largest limits among its own and those of
all valid leases.

A lease is an empty file whose name contains the limits. A batch may begin up to ``max_staging_age``
after its lease was written; then the process writes the next lease. The files of a batch are
published up to ``max_staging_age`` and the transaction timeout after the batch began, or never. So
a lease is valid for twice the age and the timeout, by the store's clock, and need not be revoked:
it also covers a process that was fenced while it was paused. An expired lease is an orphan.

Each lease has a name of its own, so two processes never write the same file: pyarrow offers no
compare-and-set of object stores.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from oncely.kinds.staged_files import clock
from oncely.stores.objects.store import Store, StoredFile

FOLDER = "_oncely/staging"
"""The folder below the root, beside the owner's file."""

_NAME = re.compile(
    re.escape(FOLDER) + r"/age(\d{1,12}\.\d{3})-timeout(\d{1,12}\.\d{3})-[0-9a-f]{16}"
)


@dataclass(frozen=True)
class LeaseLimits:
    """Limits of the time between staging and publication of a file.

    Attributes:
        max_staging_age: seconds from the beginning of its batch to the check of its age.
        transaction_timeout: seconds after which the broker ends the transaction that publishes it.
    """

    max_staging_age: float
    transaction_timeout: float

    @property
    def valid(self) -> timedelta:
        """The time for which a lease with these limits is valid."""
        return timedelta(seconds=2 * self.max_staging_age + self.transaction_timeout)


@dataclass
class StagingLeases:
    """The leases that one process writes.

    Attributes:
        store: the root.
        limits: the limits of this process.
    """

    store: Store
    limits: LeaseLimits
    _written: float | None = field(default=None, init=False)

    def hold(self) -> None:
        """Ensure a valid lease; called before the first file of a batch is staged.

        Raises:
            Unavailable: the store cannot write it.
        """
        now, limits = clock(), self.limits
        if self._written is not None and now - self._written <= limits.max_staging_age:
            return
        age, timeout = max(0.0, limits.max_staging_age), limits.transaction_timeout
        name = f"age{age:.3f}-timeout{timeout:.3f}-{uuid.uuid4().hex[:16]}"
        self.store.write(f"{FOLDER}/{name}", b"")
        self.store.durable()
        self._written = now


def limits_of(path: str) -> LeaseLimits | None:
    """The limits of a lease; None if the path is not that of a lease."""
    found = _NAME.fullmatch(path)
    return LeaseLimits(float(found[1]), float(found[2])) if found else None


def valid_leases(stored: Iterable[StoredFile], at: datetime) -> dict[str, LeaseLimits]:
    """The leases that are valid at a time of the store's clock, by path."""
    found = ((one, limits_of(one.path)) for one in stored)
    return {
        one.path: limits
        for one, limits in found
        if limits is not None and one.modified + limits.valid >= at
    }
