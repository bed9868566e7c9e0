"""No guarantee: positions move on a timer, independent of the records' outcome.

This corresponds to a consumer with ``enable.auto.commit``. The driver hands a batch's ranges out to
its tasks, and when the timer fires it saves the ends of the ranges that were handed out: their
records may be written by then, or not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.core.claim import NOT_COUNTED, Claim, Counts, Fence
from oncely.core.ledger import Entry
from oncely.core.ranges import OffsetRange, Position, TopicPartition
from oncely.errors import Fenced, OncelyError
from oncely.ledgers.base import Ledger
from oncely.threads import Thread

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Interval:
    """The interval between two saves of the positions.

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
        at: the task's positions.
    """

    at: dict[TopicPartition, Position] = field(default_factory=dict)

    @property
    def one_store(self) -> bool:
        """These positions are not stored."""
        return False

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """The task's positions as ledger entries."""
        del of, settled
        return {tp: Entry(at, fence.epoch, run=fence.run) for tp, at in self.at.items()}

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Advance the task's positions."""
        del counts
        self.at |= {tp: claim.end(tp) for tp in claim.ranges}


class PositionTimer:
    """Saves the ends of handed-out ranges, in a thread of its own if the interval is a time."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._condition = threading.Condition()
        self._ends: dict[TopicPartition, Position] = {}
        self._since = 0
        self._ending = False
        self._thread: Thread | None = None
        self._to: tuple[Ledger, Fence] | None = None

    def begin(self, ledger: Ledger, fence: Fence) -> None:
        """Begin to save into this ledger."""
        self._to = ledger, fence
        if self._interval.seconds is not None and self._thread is None:
            self._ending = False
            self._thread = Thread(self._tick, "commit-interval")
            self._thread.start()

    def hand_out(self, ranges: Mapping[TopicPartition, OffsetRange]) -> None:
        """Note ranges that tasks are about to read: the timer may save their ends from now on.

        Raises the error with which its thread has ended.
        """
        if self._thread is not None:
            self._thread.check()
        with self._condition:
            self._ends |= {tp: range_.end for tp, range_ in ranges.items()}
            self._since += sum(range_.end - range_.start for range_ in ranges.values())
            offsets = self._interval.offsets
            due = offsets is not None and self._since >= offsets
        if due:
            self._save()

    def forget(self) -> None:
        """Forget unsaved ends: a new epoch begins at the stored positions."""
        with self._condition:
            self._ends, self._since = {}, 0

    def close(self) -> None:
        """Save the ends of the handed-out ranges. Called at the end without an error."""
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
                for attempt in attempts(Backoff(total=0)):
                    with attempt:
                        save(*self._to, ends)
        except Fenced as error:  # the next batch raises it as well, and ends the run
            log.warning("positions were not saved: %s", error.message)
        except OncelyError as error:
            log.warning("positions were not saved, and are saved again later: %s", error)
            with self._condition:
                self._ends = ends | self._ends


def save(ledger: Ledger, fence: Fence, ends: Mapping[TopicPartition, Position]) -> None:
    """Set positions to the ends of handed-out ranges.

    Raises:
        Fenced: a newer run has opened. The positions that a run of some partitions still holds
            are saved.
    """
    entries = ledger.positions(fence, settled=True)
    if fence.partitions is None:
        fence.refuse_taken(entries)
    held = {
        tp: one for tp, one in entries.items() if fence.partitions is None or fence.is_held(one)
    }
    ranges = {
        tp: OffsetRange(held[tp].position, end)
        for tp, end in ends.items()
        if tp in held and held[tp].position < end
    }
    if ranges:
        ledger.move(Claim(fence, ranges, held), dict.fromkeys(ranges, NOT_COUNTED))
    fence.refuse_taken(entries)
