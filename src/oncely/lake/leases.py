"""Staging leases: the limits by which a process stages files, kept below the root.

``vacuum`` removes an unnamed file when no process can name it any more. A process names files up
to its own ``max_staging_age``, which it has read from the pipeline file at its start. The pipeline
file may have been changed since, so ``vacuum`` can't go by the file alone. Every process that
stages files (a run, a replay of dead letters, a compaction) therefore writes a lease before the
first file of a batch, and ``vacuum`` goes by the largest limits among its own and those of all
leases that are valid.

A lease is an empty file whose name holds the limits. A batch may begin up to ``max_staging_age``
after its lease was written; then the process writes the next one. The files of a batch are named
up to ``max_staging_age`` and the transaction timeout after the batch began, or never. So a lease
counts for twice the age and the timeout, by the store's clock, and nobody has to take it back: it
also covers a process that was fenced while it was paused. An expired lease is an orphan.

Each lease has a name of its own, so two processes never write the same file: object stores have
no compare-and-set that pyarrow knows.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from oncely.clients.files.store import Store, Stored

FOLDER = "_oncely/staging"
"""Below the root, beside the root's owner."""

_NAME = re.compile(
    re.escape(FOLDER) + r"/age(\d{1,12}\.\d{3})-timeout(\d{1,12}\.\d{3})-[0-9a-f]{16}"
)


# CLOCK_BOOTTIME keeps counting while the process or the machine is suspended.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    """Seconds on a clock that also counts while the process or the machine is suspended."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True)
class Limits:
    """How long a staged file may wait to be named.

    Attributes:
        max_staging_age: seconds from the beginning of its batch to the look at its age.
        transaction_timeout: seconds after which the broker ends the transaction that names it.
    """

    max_staging_age: float
    transaction_timeout: float

    @property
    def valid(self) -> timedelta:
        """How long a lease with these limits counts."""
        return timedelta(seconds=2 * self.max_staging_age + self.transaction_timeout)


@dataclass
class StagingLeases:
    """The leases that one process writes.

    Attributes:
        store: the root.
        limits: by which this process stages files.
    """

    store: Store
    limits: Limits
    _written: float | None = field(default=None, init=False)

    def hold(self) -> None:
        """Have a valid lease; called before the first file of a batch is staged.

        Raises:
            Unavailable: the store does not take it.
        """
        now, limits = clock(), self.limits
        if self._written is not None and now - self._written <= limits.max_staging_age:
            return
        age, timeout = max(0.0, limits.max_staging_age), limits.transaction_timeout
        name = f"age{age:.3f}-timeout{timeout:.3f}-{uuid.uuid4().hex[:16]}"
        self.store.write(f"{FOLDER}/{name}", b"")
        self.store.durable()
        self._written = now


def limits_of(path: str) -> Limits | None:
    """What a lease says; None: the path is no lease's."""
    found = _NAME.fullmatch(path)
    return Limits(float(found[1]), float(found[2])) if found else None


def valid_leases(stored: Iterable[Stored], at: datetime) -> dict[str, Limits]:
    """The leases that still count at a time of the store's clock, by path."""
    found = ((one, limits_of(one.path)) for one in stored)
    return {
        one.path: limits
        for one, limits in found
        if limits is not None and one.modified + limits.valid >= at
    }
