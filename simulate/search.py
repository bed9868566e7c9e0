"""Runs of many seeds, in processes of a pool."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import current_process
from typing import Literal

from oncely.errors import OncelyError
from simulate.batch_mistakes import BATCH_MISTAKES
from simulate.batches import run_batches
from simulate.mistakes import MISTAKES, Mistake
from simulate.schedule import Violation
from simulate.world import run

MOST = 4_000  # seeds for a mistake to be found

Of = Literal["worker", "batches"]
RUNS: Mapping[Of, Callable[..., None]] = {"worker": run, "batches": run_batches}
ALL: Mapping[str, tuple[Of, Mistake]] = {
    **{name: ("worker", mistake) for name, mistake in MISTAKES.items()},
    **{name: ("batches", mistake) for name, mistake in BATCH_MISTAKES.items()},
}


def prepare() -> None:
    """Log nothing in this process of a pool, and keep its threads on one processor.

    One thread runs at a time, and wakes the next one: between two processors a seed takes twice as
    long.
    """
    logging.disable(logging.CRITICAL)
    if sys.platform == "linux":
        processors = sorted(os.sched_getaffinity(0))
        number = int(current_process().name.rpartition("-")[2])
        os.sched_setaffinity(0, {processors[number % len(processors)]})


def broken_of(seeds: tuple[Of, int, int]) -> list[tuple[Of, int, str]]:
    """The seeds that break, and how."""
    of, first, last = seeds
    broken = []
    for seed in range(first, last):
        if why := _broken(of, seed):
            broken.append((of, seed, why))
    return broken


def _broken(of: Of, seed: int) -> str | None:
    try:
        RUNS[of](seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def first_found(name: str) -> tuple[str, int | None, str]:
    """A mistake, the first seed that finds it, and how."""
    of, mistake = ALL[name]
    with mistake():
        for seed in range(MOST):
            try:
                RUNS[of](seed)
            except (Violation, OncelyError) as error:  # any other error is the simulation's own
                return name, seed, f"{type(error).__name__}: {error}"
    return name, None, ""
