"""The reject budget: the number of records that may be rejected, counted across restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from oncely.errors import TooManyRejects
from oncely.reject_summary import RejectSummary


@dataclass(frozen=True)
class RejectCount:
    """Counts against ``sink.max_rejects``, kept across restarts of the pipeline.

    Attributes:
        setting: the budget at the time of counting, as text; empty when nothing was noted.
        records: records that were read.
        rejects: those of them that were rejected.
    """

    setting: str = ""
    records: int = 0
    rejects: int = 0

    def added_to(self, now: RejectCount, noted: RejectCount) -> RejectCount:
        """The count of several concurrent runs after this run has added its own.

        Args:
            now: the count in the ledger. A count for another setting is replaced.
            noted: the part of this run's count that the ledger has already.
        """
        if now.setting != self.setting:
            return self
        before = noted if noted.setting == self.setting else RejectCount()
        return RejectCount(
            self.setting,
            now.records + self.records - before.records,
            now.rejects + self.rejects - before.rejects,
        )


NOTHING_COUNTED = RejectCount()

RAISE_BUDGET = (
    "raise sink.max_rejects to keep them: rejects are counted across restarts, and a changed"
    " sink.max_rejects begins a new count"
)


@dataclass(frozen=True)
class Budget:
    """The number of records that may still be rejected.

    Attributes:
        share: the greatest share of rejects among all records, or None; exact, because 29 of 100 is
            within 29%.
        count: the greatest number of rejects, or None.
        records: records that were counted before the batch.
        rejects: rejects that were counted before the batch.
    """

    share: Fraction | None = None
    count: int | None = None
    records: int = 0
    rejects: int = 0

    JUDGED_FROM = 1_000
    """A share is computed of at least this many records: a share of a few records has no meaning.
    """

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


def refuse_beyond(
    limit: int | None,
    rejects: int,
    message: str,
    correctable: str,
    refused: Callable[[], RejectSummary | None] = lambda: None,
) -> None:
    """Refuse more rejects than the budget has left.

    Args:
        limit: the remaining number; None: any number.
        rejects: the number of rejects.
        message: the text of the error.
        correctable: the parts of the pipeline that the user can correct.
        refused: returns their reasons and a sample.

    Raises:
        TooManyRejects: there are more rejects.
    """
    if limit is not None and rejects > limit:
        way_out = f"{correctable}; or {RAISE_BUDGET}"
        raise TooManyRejects(f"sink.max_rejects: {message}", way_out=way_out, refused=refused())
