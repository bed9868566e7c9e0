"""No guarantee: positions move on a timer, whatever becomes of the records.

What a consumer does with ``enable.auto.commit``. The driver hands a batch's ranges out to its
tasks, and when the timer fires it saves where the ranges end that were handed out: they may be
written by then, or not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from oncely.core.claim import NO_RECORDS, Claim, Counts, Fence, PositionMoved
from oncely.core.ledger import Entry
from oncely.core.ranges import OffsetRange
from oncely.core.topics import Position, TopicPartition
from oncely.errors import Fenced, OncelyError
from oncely.ledgers.base import Ledger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Interval:
    """When positions are saved.

    Attributes:
        seconds: between two saves; None where ``offsets`` decides.
        offsets: offsets handed out between two saves; None where ``seconds`` decide.
    """

    seconds: float | None = 5.0
    offsets: int | None = None


@dataclass
class LocalPositions:
    """Positions of one task, for records whose positions the driver moves by a timer.

    Attributes:
        at: where the task has come to.
    """

    at: dict[TopicPartition, Position] = field(default_factory=dict)

    @property
    def one_store(self) -> bool:
        """They are not stored."""
        return False

    def positions(self, fence: Fence, *, settled: bool = False) -> dict[TopicPartition, Entry]:
        """Where the task has come to, as the ledger would say it."""
        del settled
        return {tp: Entry(at, fence.epoch, run=fence.run) for tp, at in self.at.items()}

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Go on."""
        del counts
        self.at |= {tp: claim.end(tp) for tp in claim.ranges}


class PositionTimer:
    """Saves what was handed out, in a thread of its own when it goes by the clock."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._condition = threading.Condition()
        self._ends: dict[TopicPartition, Position] = {}
        self._since = 0
        self._ending = False
        self._thread: threading.Thread | None = None
        self._to: tuple[Ledger, Fence] | None = None

    def begin(self, ledger: Ledger, fence: Fence) -> None:
        """Save into this ledger from here on."""
        self._to = ledger, fence
        if self._interval.seconds is not None and self._thread is None:
            self._ending = False
            self._thread = threading.Thread(target=self._tick, name="commit-interval", daemon=True)
            self._thread.start()

    def hand_out(self, ranges: Mapping[TopicPartition, OffsetRange]) -> None:
        """Note what tasks are about to read: from here on the timer may save its end."""
        with self._condition:
            self._ends |= {tp: range_.end for tp, range_ in ranges.items()}
            self._since += sum(range_.end - range_.start for range_ in ranges.values())
            offsets = self._interval.offsets
            due = offsets is not None and self._since >= offsets
        if due:
            self._save()

    def forget(self) -> None:
        """A new epoch begins where the positions stand: what was not saved is forgotten."""
        with self._condition:
            self._ends, self._since = {}, 0

    def close(self) -> None:
        """The run ends in order: save where it has come to."""
        with self._condition:
            self._ending = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout=30)
            self._thread = None
        self._save()

    def _tick(self) -> None:
        seconds = self._interval.seconds or 0.0
        due = time.monotonic() + seconds
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._ending, due - time.monotonic()):
                    return
            self._save()
            due = time.monotonic() + seconds

    def _save(self) -> None:
        with self._condition:
            ends, self._ends, self._since = self._ends, {}, 0
        try:
            if self._to is not None and ends:
                save(*self._to, ends)
        except Fenced as error:  # the next batch finds out as well, and ends the run
            log.warning("positions were not saved: %s", error.message)
        except (OncelyError, PositionMoved) as error:
            log.warning("positions were not saved, and are saved again later: %s", error)
            with self._condition:
                self._ends = ends | self._ends


def save(ledger: Ledger, fence: Fence, ends: Mapping[TopicPartition, Position]) -> None:
    """Put positions where handed-out ranges end.

    Raises:
        Fenced: a newer run has opened.
        PositionMoved, Unavailable: they may be saved again.
    """
    entries = ledger.positions(fence, settled=True)
    newest = max((entry.epoch for entry in entries.values()), default=0)
    if newest > fence.epoch:
        raise Fenced(fence.pipeline, fence.epoch, newest)
    ranges = {
        tp: OffsetRange(entries[tp].position, end)
        for tp, end in ends.items()
        if tp in entries and entries[tp].position < end
    }
    if ranges:
        ledger.move(Claim(fence, ranges, entries), dict.fromkeys(ranges, NO_RECORDS))
