"""Python's garbage collector, where many objects are made that form no reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 100)  # objects, and collections of the younger generations


@contextmanager
def no_gc() -> Iterator[None]:
    """Suspend the garbage collector: millions of short-lived objects form no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Raise the thresholds of the garbage collector, up to the end of the context.

    A collection becomes due with each 700 messages that were taken, and visits those in the buffers
    again and again, although no message is part of a reference cycle. With CPython's thresholds
    this takes three quarters of the time of a poll, in pauses in which no thread runs Python.
    Thresholds that are higher, or zero, are left alone.
    """
    before = gc.get_threshold()
    if before[0]:
        first, second, third = map(max, before, _THRESHOLDS)
        gc.set_threshold(first, second, third)
    try:
        yield
    finally:
        gc.set_threshold(*before)
