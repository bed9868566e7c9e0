"""The result of a run that ended without an error."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from oncely.core import events


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


@dataclass
class Counts:
    """Counts of the events of a run."""

    began: float = field(default_factory=time.monotonic)
    records: int = 0
    rows: int = 0
    rejects: int = 0
    filtered: int = 0

    def count(self, event: events.Event) -> None:
        """Count an event."""
        if isinstance(event, events.BatchCommitted):
            self.records += event.records
            self.rows += event.rows
            self.rejects += event.rejects
            self.filtered += event.filtered

    def result(self, *, complete: bool) -> RunResult:
        """The result of the run, which has ended."""
        counts = self.records, self.rows, self.rejects, self.filtered
        seconds = time.monotonic() - self.began
        return RunResult("complete" if complete else "stopped", *counts, seconds)
