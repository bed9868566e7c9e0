"""The reject budget: how many records may be rejected, counted over restarts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class RejectCount:
    """What has been counted against ``sink.max_rejects``, over restarts of the pipeline.

    Attributes:
        setting: the budget that it is counted against, as text; empty when nothing was noted.
        records: records that were read.
        rejects: those of them that were rejected.
    """

    setting: str = ""
    records: int = 0
    rejects: int = 0


NOTHING_COUNTED = RejectCount()

RAISE_BUDGET = (
    "raise sink.max_rejects to keep them: rejects are counted over restarts, and a changed"
    " sink.max_rejects begins a new count"
)


@dataclass(frozen=True)
class Budget:
    """How many records may still be rejected.

    Attributes:
        share: the greatest share of rejects among all records, or None; exact, because 29 of
            100 is within 29%.
        count: the greatest number of rejects, or None.
        records: records that were counted before the batch.
        rejects: rejects that were counted before the batch.
    """

    share: Fraction | None = None
    count: int | None = None
    records: int = 0
    rejects: int = 0

    JUDGED_FROM = 1_000
    """A share of a handful of records says nothing: it is judged as if of at least so many."""

    @property
    def setting(self) -> str:
        """The budget as text, exact."""
        return str(self.share if self.count is None else self.count)

    def left(self, more_records: int, more_rejects: int) -> int | None:
        """Rejects that may still be added after ``more_records`` and ``more_rejects``."""
        limits = [] if self.count is None else [self.count]
        if self.share is not None and self.share < 1:
            limits.append(int(max(self.records + more_records, self.JUDGED_FROM) * self.share))
        return max(0, min(limits) - self.rejects - more_rejects) if limits else None
