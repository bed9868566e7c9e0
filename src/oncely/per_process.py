"""What belongs to one process: clients that are created at first use, and the garbage collector,
which is held back where many objects are made that form no reference cycles."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

C = TypeVar("C")


class PerProcess(Generic[C]):
    """Holds at most one client, made at first use: neither a fork nor pickling takes it along.

    A client has locks, sockets and threads that do not exist in a forked child. The child keeps its
    parent's until it ends: closing it would send a farewell in the parent's name, or wait for
    threads that a fork does not copy. What was garbage at the fork is never collected there.

    Args:
        make: connects; picklable where the holder is.
        end: disconnects.
    """

    def __init__(self, make: Callable[[], C], end: Callable[[C], object] | None = None) -> None:
        self._make, self._end = make, end
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._client: C | None = None
        self._using = threading.RLock()
        _all.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "_end": self._end}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_anew()

    @property
    def made(self) -> bool:
        """True while there is a client."""
        return self._client is not None

    def get(self) -> C:
        """The client, for several users at a time."""
        with self._using:
            if self._client is None:
                self._client = self._make()
            return self._client

    @contextmanager
    def use(self) -> Iterator[C]:
        """The client, for one user; discarded if the block raises: its state is unknown then."""
        with self._using:
            try:
                yield self.get()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the client, if there is one; never raises."""
        with self._using:
            client, self._client = self._client, None
            if client is not None and self._end is not None:
                with suppress(Exception):
                    self._end(client)

    def forked(self) -> None:
        """Keep the parent's client unused, and its lock, which a thread of the parent may hold."""
        _inherited.append((self._client, self._using))
        self._begin_anew()


_all: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()
_inherited: list[object] = []


class _Forks:
    """Suspends the garbage collector from the beginning of a fork to its end, in both processes.

    A collection in the child that destroyed a client of librdkafka would crash, also if the client
    was garbage at the fork. Hooks of other modules allocate objects before ours in the child.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler that forks may interrupt the thread that has it.
        self.lock, self.threads, self.collecting = threading.RLock(), 0, False

    def begin(self) -> None:
        """Before a fork; several threads may be there."""
        with self.lock:
            if not self.threads:
                self.collecting = gc.isenabled()
                gc.disable()
            self.threads += 1

    def end(self) -> None:
        """After a fork, in the parent."""
        with self.lock:
            self.threads -= 1
            if not self.threads and self.collecting:
                gc.enable()

    def in_child(self) -> None:
        """After a fork, in the child: what is there now is never collected."""
        self.lock, self.threads = threading.RLock(), 0
        gc.freeze()
        if self.collecting:
            gc.enable()
        for one in list(_all):
            one.forked()


_forks = _Forks()
os.register_at_fork(before=_forks.begin, after_in_parent=_forks.end, after_in_child=_forks.in_child)


# -- the garbage collector ------------------------------------------------------------------

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
