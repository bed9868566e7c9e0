"""Filters that make records wait: a delay, and a throttle. Pure: they never sleep.

A partition whose next record must wait is paused, and read again from that record on when its time
has come. Its order is kept, nothing is held in memory, and other partitions go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from oncely.core.ranges import TopicPartition


class Admitted(NamedTuple):
    """The records that need not wait.

    Attributes:
        number: of the first ones.
        wait_ms: the time after which the next one may follow; 0 if all are admitted.
        ahead_ms: how far the timestamp of that one is in the future, when its wait begins.
    """

    number: int
    wait_ms: int = 0
    ahead_ms: int = 0


@dataclass(frozen=True)
class Delay:
    """The settings of the filters; None: there is no such filter.

    Attributes:
        delay_ms: the age that a record must have.
        rate: the records of a partition in a number of milliseconds.
    """

    delay_ms: int | None = None
    rate: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return self.delay_ms is not None or self.rate is not None


@dataclass
class _Window:
    began: int
    used: int = 0


@dataclass
class Throttle:
    """The state of the filters of each partition.

    A partition's window of the throttle begins with the first record after the last window's end.

    The age of a record from the future is not known. The first one waits for the delay from when it
    is seen, and those that come behind it within the same time again do not wait: no record waits
    longer than the delay.
    """

    waits: Delay = field(default_factory=Delay)
    _windows: dict[TopicPartition, _Window] = field(default_factory=dict)
    _ahead: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    """When the first record from the future was seen, and its timestamp."""

    def admit(self, tp: TopicPartition, timestamps: Sequence[int | None], now: int) -> Admitted:
        """How many of these records need not wait.

        Args:
            tp: their partition.
            timestamps: of consecutive records, in ms since 1970; None: the record has none.
            now: the present, in the same form.
        """
        old = self._old_enough(tp, timestamps, now)
        count, wait, _ = old
        if self.waits.rate is None or not count:
            return old
        most, length = self.waits.rate
        window = self._windows.get(tp)
        if window is None or not window.began <= now < window.began + length:
            window = self._windows[tp] = _Window(now)
        admitted = min(count, most - window.used)
        window.used += admitted
        if admitted < count:
            wait = max(1, window.began + length - now)
        return Admitted(admitted, wait)

    def _old_enough(
        self, tp: TopicPartition, timestamps: Sequence[int | None], now: int
    ) -> Admitted:
        delay = self.waits.delay_ms
        if delay is None:
            return Admitted(len(timestamps))
        for count, at in enumerate(timestamps):
            if at is None:
                continue
            seen, first = self._ahead.get(tp, (now + 1, -1))
            if at > now and not seen <= now < seen + 2 * delay:
                self._ahead[tp] = now, at
                return Admitted(count, delay, at - now)
            since = seen if at > now or at == first else at
            if since + delay > now:
                return Admitted(count, since + delay - now)
        return Admitted(len(timestamps))
