"""Repetition of what another attempt may answer better, within a limit of time."""

from __future__ import annotations

import time
from collections.abc import Iterator

_LEAST = 0.1  # seconds


def tries(seconds: float, pause: float = 0.1) -> Iterator[float]:
    """Yield before each attempt the seconds that are left for it, at least a tenth of one.

    The first attempt is made in any case, and the last one begins a pause after the limit at most.
    A caller leaves the loop when an answer is good or lasting; after the loop it raises the error
    of the last attempt.

    Args:
        seconds: the limit.
        pause: seconds between two attempts.
    """
    deadline = time.monotonic() + seconds
    while True:
        yield max(_LEAST, deadline - time.monotonic())
        if time.monotonic() >= deadline:
            return
        time.sleep(pause)
