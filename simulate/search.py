"""Runs of many seeds, in processes of a pool."""

from __future__ import annotations

import logging

from oncely.errors import OncelyError
from simulate.mistakes import MISTAKES
from simulate.schedule import Violation
from simulate.world import run

MOST = 4_000  # seeds for a mistake to be found


def quiet() -> None:
    """Log nothing in this process."""
    logging.disable(logging.CRITICAL)


def broken_of(bounds: tuple[int, int]) -> list[tuple[int, str]]:
    """The seeds that break, and how."""
    broken = []
    for seed in range(*bounds):
        if why := _broken(seed):
            broken.append((seed, why))
    return broken


def _broken(seed: int) -> str | None:
    try:
        run(seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def first_found(mistake: str) -> tuple[str, int | None, str]:
    """A mistake, the first seed that finds it, and how."""
    with MISTAKES[mistake]():
        for seed in range(MOST):
            try:
                run(seed)
            except (Violation, OncelyError) as error:  # any other error is the simulation's own
                return mistake, seed, f"{type(error).__name__}: {error}"
    return mistake, None, ""
