"""Isolation of the rows on which a step fails: what a record's own bytes raise belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa

from oncely.errors import OncelyError

T = TypeVar("T")

OF_VALUES = (ValueError, TypeError, ArithmeticError, LookupError, pa.ArrowException)
"""The errors that a conversion raises for a value; a lack of memory and our own are others."""


def isolated(
    step: Callable[[int, int], T],
    count: int,
    of_a_row: tuple[type[Exception], ...] = OF_VALUES,
    others: tuple[type[Exception], ...] = (),
) -> tuple[list[tuple[int, T]], dict[int, Exception]]:
    """Run a step on rows; on an error halve the part until the bad row is alone.

    Args:
        step: takes the first index of a part and the one after its last.
        count: the number of rows.
        of_a_row: errors that a single row may cause.
        others: those among them that no row causes; they are raised.

    Returns:
        The result of each part with its first index, ascending, and the error of each bad row.
    """
    done: list[tuple[int, T]] = []
    bad: dict[int, Exception] = {}
    parts = [(0, count)]
    while parts:
        start, stop = parts.pop()
        try:
            done.append((start, step(start, stop)))
        except of_a_row as error:
            if isinstance(error, (OncelyError, MemoryError, *others)) or stop == start:
                raise
            if stop - start == 1:
                bad[start] = error
            else:
                middle = (start + stop) // 2
                parts += [(middle, stop), (start, middle)]
    return done, bad


def unexpected(error: Exception) -> str:
    """The reason of a rejection for an error that no check has foreseen."""
    return f"{type(error).__name__}: {error}"
