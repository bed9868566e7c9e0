"""Log entries about errors after which it is tried again: one for each cause and minute."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable

from oncely.errors import OncelyError

log = logging.getLogger(__name__)

_EVERY = 60.0  # seconds


class Complaints:
    """The causes of a process that were logged. Safe for several threads.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._told: dict[str, tuple[float, int]] = {}

    def tell(self, error: OncelyError) -> None:
        """Log an error, unless its cause was logged less than a minute ago.

        Texts that differ in numbers, such as those of processes and ports, have the same cause.
        """
        cause, now = re.sub(r"\d+", "", error.message), self._clock()
        with self._lock:
            at, more = self._told.pop(cause, (now - _EVERY, 0))
            due = now - at >= _EVERY
            recent = {one: told for one, told in self._told.items() if now - told[0] < 2 * _EVERY}
            self._told = recent | {cause: (now, 0) if due else (at, more + 1)}
        if due:
            often = f" ({more} times more since the last entry)" if more else ""
            way_out = f"; way out: {error.way_out}" if error.way_out else ""
            log.warning("%s%s; it is tried again%s", error.message, way_out, often)


tell = Complaints().tell
