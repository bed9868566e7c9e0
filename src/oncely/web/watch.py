"""Readings that go on while somebody looks, each in a thread of its own.

A page never waits long for a server: it shows the last reading, and its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from oncely.web.model import Detail, Overview, Subject, detail, overview

T = TypeVar("T")
_KEEP = 30.0  # seconds without a look after which nobody looks
_UNSEEN = 60.0  # seconds between two readings of an overview while nobody looks


class Reading(Generic[T]):
    """A value that is read again at an interval, from the first look at it on.

    Args:
        read: reads; gets the value before.
        every: seconds between two readings.
        unseen: the same while nobody looks; None: the reading ends then, until the next look.

    Attributes:
        version: grows with each reading that has another value.
    """

    def __init__(
        self, read: Callable[[T | None], T], every: float, unseen: float | None = None
    ) -> None:
        self._read, self._every, self._unseen = read, every, unseen
        self._changed = threading.Condition()
        self._value: T | None = None
        self._at = self._looked = float("-inf")
        self._thread: threading.Thread | None = None
        self._hurry = self._closed = self._slow = False
        self.version = 0

    def get(self, wait: float = 0.0) -> T | None:
        """The last value; None if there is none after ``wait`` seconds."""
        with self._changed:
            self._looked = time.monotonic()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._go, name="reading", daemon=True)
                self._thread.start()
            oldest = self._looked - 3 * self._every
            self._hurry |= self._slow
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._at >= oldest or self._closed, wait)
            return self._value

    def hurry(self) -> None:
        """Read again now."""
        with self._changed:
            self._hurry, self._at = True, float("-inf")
            self._changed.notify_all()

    def close(self) -> None:
        """End after the reading in hand."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _go(self) -> None:
        while True:
            value = self._read(self._value)
            with self._changed:
                self.version += value != self._value
                self._value, self._at = value, time.monotonic()
                self._changed.notify_all()
                self._slow = self._at - self._looked > max(_KEEP, 3 * self._every)
                pause = self._unseen if self._slow else self._every
                if pause is not None:
                    self._changed.wait_for(lambda: self._hurry or self._closed, pause)
                self._hurry = False
                if self._closed or pause is None:
                    self._thread, self._slow = None, False
                    return


@dataclass
class Watched:
    """A pipeline and its readings.

    Attributes:
        subject: the pipeline.
        every: seconds between two readings of the overview; the rest is read half as often. While
            nobody looks, the overview is read once a minute, for the line of lag and speed.
    """

    subject: Subject
    every: float = 5.0
    overview: Reading[Overview] = field(init=False)
    detail: Reading[Detail] = field(init=False)

    def __post_init__(self) -> None:
        self.overview = Reading(partial(overview, self.subject), self.every, _UNSEEN)
        self.detail = Reading(partial(detail, self.subject), 2 * self.every)

    def hurry(self) -> None:
        """Read again now: something was changed."""
        self.overview.hurry()
        self.detail.hurry()

    def close(self) -> None:
        """End the readings."""
        self.overview.close()
        self.detail.close()
