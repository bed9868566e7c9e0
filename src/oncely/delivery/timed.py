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
from typing import Any

from oncely.core.ledger import Entry, advance
from oncely.core.offsets import Position, TopicPartition
from oncely.core.ranges import OffsetRange
from oncely.delivery.apart import Apart
from oncely.errors import Fenced, OncelyError
from oncely.sinks.base import Chunk, Fence, Opened, PositionMoved, Publication, RangeKind, Written

log = logging.getLogger(__name__)


@dataclass
class Timed(Apart):
    """Records as they come; positions by the clock, or by the number of records handed out.

    Attributes:
        seconds: between two saves; None where ``offsets`` decides.
        offsets: offsets handed out between two saves; None where ``seconds`` decide.
    """

    seconds: float | None = 5.0
    offsets: int | None = None
    _timer: _Timer | None = field(default=None, init=False, repr=False, compare=False)
    _fence: Fence | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_timer": None}

    @property
    def timed(self) -> bool:
        """Positions lead and follow as they like."""
        return True

    def open(self, *args: Any, **more: Any) -> Opened:
        """Take the next epoch; what was handed out before and not saved is forgotten."""
        if self._timer is not None:
            self._timer.forget()
        opened = super().open(*args, **more)
        self._fence = opened.fence
        return opened

    def in_hand(self, ranges: Mapping[TopicPartition, OffsetRange]) -> Blind:
        """Hand a batch out: from here on the timer may save its end."""
        if self._fence is None:
            raise RuntimeError("a batch was handed out before the ledger was opened")
        if self._timer is None:
            self._timer = _Timer(self, self.seconds, self.offsets)
        self._timer.hand_out(ranges)
        starts = {tp: range_.start for tp, range_ in ranges.items()}
        records = self.records.in_hand(ranges)
        return Blind(records, self.positions, position_first=False, at=starts)

    def close(self) -> None:
        """The run ends in order: save where it has come to."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        super().close()

    def save(self, ends: Mapping[TopicPartition, Position]) -> None:
        """Put positions where handed-out ranges end.

        Raises:
            Fenced: a newer run has opened.
            PositionMoved, Unavailable: they may be saved again.
        """
        if self._fence is None or not ends:
            return
        entries = self.positions.committed(self._fence)
        newest = max((entry.epoch for entry in entries.values()), default=0)
        if newest > self._fence.epoch:
            raise Fenced(self._fence.pipeline, self._fence.epoch, newest)
        ranges = {
            tp: OffsetRange(entries[tp].position, end)
            for tp, end in ends.items()
            if tp in entries and entries[tp].position < end
        }
        nothing = dict.fromkeys(ranges, Written(0, 0, 0, 0))
        if ranges:
            self.positions.move(ranges, entries, self._fence, nothing, "data")


@dataclass
class Blind(Apart):
    """What tasks of one batch write with: no position is asked, and none is moved."""

    at: dict[TopicPartition, Position] = field(default_factory=dict)

    def entries(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """Where this task itself has come to."""
        return {tp: Entry(at, fence.epoch) for tp, at in self.at.items()}

    def committed(self, fence: Fence) -> dict[TopicPartition, Entry]:
        """The same."""
        return self.entries(fence)

    def commit(
        self,
        chunk: Chunk,
        entries: Mapping[TopicPartition, Entry],
        fence: Fence,
        max_rejects: int | None = None,
        kind: RangeKind = "data",  # noqa: ARG002 - the port's
    ) -> dict[TopicPartition, Written]:
        """Write the records."""
        written = self.records.write(chunk, fence, max_rejects)
        self.at |= {tp: advance(entries[tp], [range_]) for tp, range_ in chunk.ranges.items()}
        return written

    def publish(
        self,
        what: Publication,
        entries: Mapping[TopicPartition, Entry],  # noqa: ARG002 - the port's
        fence: Fence,
    ) -> None:
        """Write the staged records."""
        self.records.write_staged(what, fence)


class _Timer:
    """Saves what was handed out, in a thread of its own when it goes by the clock."""

    def __init__(self, of: Timed, seconds: float | None, offsets: int | None) -> None:
        self._of, self._seconds, self._offsets = of, seconds, offsets
        self._condition = threading.Condition()
        self._ends: dict[TopicPartition, Position] = {}
        self._since = 0
        self._ending = False
        self._thread: threading.Thread | None = None
        if seconds is not None:
            self._thread = threading.Thread(target=self._tick, name="commit-interval", daemon=True)
            self._thread.start()

    def hand_out(self, ranges: Mapping[TopicPartition, OffsetRange]) -> None:
        """Note what tasks are about to read."""
        with self._condition:
            self._ends |= {tp: range_.end for tp, range_ in ranges.items()}
            self._since += sum(range_.end - range_.start for range_ in ranges.values())
            due = self._offsets is not None and self._since >= self._offsets
        if due:
            self._save()

    def forget(self) -> None:
        """A new epoch begins where the positions stand."""
        with self._condition:
            self._ends, self._since = {}, 0

    def close(self) -> None:
        """Save for the last time."""
        with self._condition:
            self._ending = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout=30)
        self._save()

    def _tick(self) -> None:
        due = time.monotonic() + (self._seconds or 0)
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._ending, due - time.monotonic()):
                    return
            self._save()
            due = time.monotonic() + (self._seconds or 0)

    def _save(self) -> None:
        with self._condition:
            ends, self._ends, self._since = self._ends, {}, 0
        try:
            self._of.save(ends)
        except Fenced as error:  # the next batch finds out as well, and ends the run
            log.warning("positions were not saved: %s", error.message)
        except (OncelyError, PositionMoved) as error:
            log.warning("positions were not saved, and are saved again later: %s", error)
            with self._condition:
                self._ends = ends | self._ends
