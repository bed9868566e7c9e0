"""Seconds of a batch by phase: plan, read, decode, write, commit (docs/metrics.md).

:func:`into` names the mapping that collects the seconds, :func:`phase` measures a block. Phases
nest: seconds of an inner phase do not count as those of the outer one. Without a mapping nothing
is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TypeVar

Phase = Literal["plan", "read", "decode", "write", "commit"]
Seconds = dict[str, float]

PHASES: tuple[Phase, ...] = ("plan", "read", "decode", "write", "commit")

A = TypeVar("A")
T = TypeVar("T")

_seconds: ContextVar[Seconds | None] = ContextVar("seconds", default=None)
_inner: ContextVar[list[float]] = ContextVar("inner")  # seconds of phases inside of this one


@contextmanager
def into(seconds: Seconds) -> Iterator[None]:
    """Within the block, phases add to this mapping; a thread adds in a copy of the context."""
    token, outer = _seconds.set(seconds), _inner.set([])
    try:
        yield
    finally:
        _inner.reset(outer)
        _seconds.reset(token)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Add the seconds of the block, without those of phases inside of it. Also a decorator."""
    seconds = _seconds.get()
    if seconds is None:
        yield
        return
    inner: list[float] = []
    token, began = _inner.set(inner), time.perf_counter()
    try:
        yield
    finally:
        spent = time.perf_counter() - began
        _inner.reset(token)
        _add(seconds, name, spent - sum(inner))
        _inner.get().append(spent)


def timed(name: Phase, items: Iterable[T]) -> Iterator[T]:
    """The items; the waits for them are of this phase."""
    iterator = iter(items)
    while True:
        with phase(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def longest(several: Iterable[Mapping[str, float]]) -> None:
    """Add the seconds of tasks or threads that have worked side by side: of each phase the
    greatest."""
    seconds = _seconds.get()
    if seconds is None:
        return
    most: Seconds = {}
    for one in several:
        most |= {name: max(spent, most.get(name, 0.0)) for name, spent in one.items()}
    for name, spent in most.items():
        _add(seconds, name, spent)
    _inner.get().append(sum(most.values()))


def measured(work: Callable[[A], T], item: A) -> tuple[T, Seconds]:
    """Call the function; its answer, and its seconds for :func:`longest`."""
    seconds: Seconds = {}
    with into(seconds):
        return work(item), seconds


def _add(seconds: Seconds, name: str, spent: float) -> None:
    seconds[name] = seconds.get(name, 0.0) + max(0.0, spent)
