"""The result of a run that ended without an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RunResult:
    """How a run has ended, and what it has committed; true in a condition if it is complete.

    Attributes:
        ended: ``complete``: by itself, with all records committed that it was to read;
            ``stopped``: it was asked to stop before.
        records: the records whose ranges it has committed.
        rows, rejects, filtered: what became of them: rows and dead letters that were written, and
            records that were filtered.
        seconds: its duration.
    """

    ended: Literal["complete", "stopped"]
    records: int = 0
    rows: int = 0
    rejects: int = 0
    filtered: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.ended == "complete"
